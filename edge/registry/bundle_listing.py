"""A line's bundles for people and machines."""

from collections.abc import Iterator
from typing import Any

import msgspec

from broker_config.protocol.errors import EdgeNodeError, printable
from edge.registry.bundle_store import Store

_EVENTS = 10  # that people are shown


def facts(store: Store) -> dict[str, Any]:
    """All that is known: the state, and what each bundle says about itself."""
    found: dict[str, Any] = msgspec.to_builtins(store.state())
    return {"store": str(store.folder), **found, "bundles": [_about(store, each) for each in store.digests()]}


def _about(store: Store, digest: str) -> dict[str, Any]:
    try:
        manifest = store.manifest(digest)
    except EdgeNodeError as error:
        return {"bundle": digest, "damaged": error.what}
    return {
        "bundle": digest,
        "model": manifest.id,
        "created": manifest.created,
        "classes": list(manifest.classes),
        "precision": manifest.precision,
        "signed": manifest.broadcast is not None,
    }


def lines(store: Store) -> Iterator[str]:
    """A table of the bundles, and the last events."""
    state = store.state()
    for each in facts(store)["bundles"]:
        digest = each["bundle"]
        role = {state.active: "active", state.previous: "previous"}.get(digest, "")
        if role == "active" and state.trial:
            role = "active, on probation"
        if digest in state.bad:
            role = f"failed: {state.bad[digest]}"
        said = each.get("damaged") or f"{each['model']}, {each['created']}, {', '.join(each['classes'])}"
        yield printable(f"{digest}  {said}{f'  [{role}]' if role else ''}")
    if not state.history:
        yield f"{store.folder} has served nothing yet; next: edge-node serve BUNDLE"
    for event in state.history[-_EVENTS:]:
        why = f": {event.why}" if event.why else ""
        yield printable(f"{event.time}  {event.bundle} {event.what} by {event.by}{why}")
