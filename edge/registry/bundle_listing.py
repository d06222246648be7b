"""Listing of a line's bundles, as JSON and as text."""

from collections.abc import Iterator
from typing import Any

import msgspec

from broker_config.protocol.errors import EdgeNodeError, replace_unprintable
from edge.bundle.bundle_format import SIGNATURE
from edge.registry.bundle_store import BundleStore

_EVENTS = 10  # at most in the text


def list_bundles(store: BundleStore) -> dict[str, Any]:
    """The store's state and the main facts of each bundle."""
    found: dict[str, Any] = msgspec.to_builtins(store.state())
    return {
        "store": str(store.folder),
        **found,
        "bundles": [_describe(store, each) for each in store.digests()],
    }


def _describe(store: BundleStore, digest: str) -> dict[str, Any]:
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
        "signed": (store.path(digest) / SIGNATURE).exists(),
    }


def _brief(described: dict[str, Any]) -> str:
    signed = "" if described["signed"] else "not "
    classes = ", ".join(described["classes"])
    return f"{described['model']}, {described['created']}, {signed}signed, {classes}"


def format_bundles(store: BundleStore) -> Iterator[str]:
    """A table of the bundles, and the last events."""
    state = store.state()
    for each in list_bundles(store)["bundles"]:
        digest = each["bundle"]
        role = {state.active: "active", state.previous: "previous"}.get(digest, "")
        if role == "active" and state.trial:
            role = "active, on probation"
        if digest in state.bad:
            role = f"failed: {state.bad[digest]}"
        said = each.get("damaged") or _brief(each)
        role_text = f"  [{role}]" if role else ""
        yield replace_unprintable(f"{digest}  {said}{role_text}")
    if not state.history:
        yield f"{store.folder} has served nothing yet; next: edge-node serve BUNDLE"
    for event in state.history[-_EVENTS:]:
        why = f": {event.why}" if event.why else ""
        yield replace_unprintable(f"{event.time}  {event.bundle} {event.what} by {event.by}{why}")
