"""What can be done to a store while no daemon serves from it: all checks that need no running model."""

from typing import TYPE_CHECKING

from broker_config.protocol.errors import UsageError
from edge.inference.served_model import load_model
from edge.registry.bundle_store import Store
from edge.registry.control_requests import Answer, Request

if TYPE_CHECKING:
    from edge.bundle.verification import Verifier


def do(store: Store, request: Request, verifier: "Verifier | None") -> Answer:
    """Change what the next daemon serves first; EdgeNodeError when a bundle must not or cannot be served."""
    state = store.state()
    back = request.action == "rollback"
    digest = state.previous if back else request.bundle
    if not digest:
        raise UsageError("there is no bundle to go back to", "edge-node bundle list shows what there is")
    if not request.force and not back:
        _check(store, digest)
    if verifier and back:
        verifier = verifier._replace(accept_older=True)
    model = load_model(store.path(digest), verifier)
    if back:
        store.rolled_back(request.by, "on purpose", failed=False)
    else:
        store.activated(digest, request.by)
    checked = "its signature is right" if verifier else "its signature is looked at when the line starts"
    return Answer(
        done=True,
        text=f"{model.manifest.id} ({digest}) is served when the line starts: edge-node serve",
        findings=(f"{checked}, and its golden image comes out as promised",),
    )


def _check(store: Store, digest: str) -> None:
    state = store.state()
    remedy = f"to serve it all the same: edge-node bundle activate {digest} --force"
    if how := state.bad.get(digest):
        raise UsageError(f"the bundle {digest} has failed in service: {how}", remedy)
    if state.active:
        others = set(store.manifest(digest).classes) ^ set(store.manifest(state.active).classes)
        if others:
            raise UsageError(f"it has not the active bundle's classes: {', '.join(sorted(others))}", remedy)
