"""Requests to change what a line serves: to its running daemon,
or carried out directly while none runs.

A command and the daemon exchange files in the folder of the line's bundle store, where only its
owner can write: `requests/ID.json` is a request, `requests/ID.answer` its result.
"""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import Struct

from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.storage import disk
from edge.bundle.bundle_format import read_bundle
from edge.inference.model_trial import ModelTrial
from edge.inference.outcomes import new_id
from edge.registry.bundle_store import BundleStore

if TYPE_CHECKING:
    from edge.bundle.verification import Verifier

_PAUSE = 0.05  # seconds between two checks for an answer

_log = logging.getLogger(__name__)


class Request(Struct, frozen=True, kw_only=True):
    """A change of what the line serves."""

    action: Literal["activate", "rollback"]
    by: str
    bundle: str = ""  # digits
    force: bool = False  # whatever the gate finds
    accept_older: bool = False


class Answer(Struct, frozen=True, kw_only=True):
    """The result of a request."""

    done: bool
    text: str
    remedy: str = ""
    findings: tuple[str, ...] = ()


def send_request(
    store: Path, request: Request, patience: float, is_alive: Callable[[], bool]
) -> Answer:
    """The daemon's answer; EdgeNodeError when the daemon ends,
    or does not answer within `patience` seconds.
    """
    folder = store / "requests"
    name = new_id()
    asked = folder / f"{name}.json"
    answered = folder / f"{name}.answer"
    with disk.writing(folder):
        folder.mkdir(exist_ok=True, mode=0o700)
        disk.replace_bytes(asked, msgspec.json.encode(request), mode=0o600)
    deadline = time.monotonic() + patience
    try:
        while not answered.exists():
            if time.monotonic() >= deadline or not is_alive():
                raise EdgeNodeError(
                    "the line's daemon has not answered",
                    "look into its log; edge-node bundle list shows what it serves",
                )
            time.sleep(_PAUSE)
        return msgspec.json.decode(disk.read_regular(answered), type=Answer)
    finally:
        asked.unlink(missing_ok=True)
        answered.unlink(missing_ok=True)


class RequestQueue:
    """The daemon's end of the exchange. Requests from before it was created are discarded."""

    def __init__(self, store: Path) -> None:
        self._folder = store / "requests"
        with disk.writing(self._folder):
            self._folder.mkdir(exist_ok=True, mode=0o700)
            for path in self._folder.iterdir():
                path.unlink()

    def pending(self) -> Iterator[tuple[Path, Request]]:
        """Each new request once; an unreadable one is logged."""
        for path in sorted(self._folder.glob("*.json")):
            try:
                request = msgspec.json.decode(disk.read_regular(path), type=Request)
            except FileNotFoundError:  # the command has given up
                continue
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
                _log.error("a request in %s cannot be read: %s", path, error)
                path.unlink(missing_ok=True)
                continue
            path.unlink(missing_ok=True)
            yield path, request

    def respond(self, path: Path, answer: Answer) -> None:
        """Write the answer to a request; EdgeNodeError when that fails."""
        with disk.writing(self._folder):
            disk.replace_bytes(path.with_suffix(".answer"), msgspec.json.encode(answer), mode=0o600)


def apply_offline(store: BundleStore, request: Request, verifier: "Verifier | None") -> Answer:
    """Change what the next daemon serves first, after all checks that need no running model.

    EdgeNodeError when a bundle must not or cannot be served.
    """
    from edge.inference.served_model import load_model  # noqa: PLC0415  (loads onnxruntime)

    state = store.state()
    is_rollback = request.action == "rollback"
    digest = state.previous if is_rollback else request.bundle
    if not digest:
        raise UsageError(
            "there is no bundle to go back to", "edge-node bundle list shows what there is"
        )
    if not request.force and not is_rollback:
        _check_candidate(store, digest)
    if verifier and is_rollback:
        verifier = verifier._replace(accept_older=True)
    bundle = read_bundle(store.path(digest))
    ModelTrial().check(bundle)
    store.record_trial(bundle.digest)
    model = load_model(store.path(digest), verifier)
    if is_rollback:
        store.record_rollback(request.by, "on purpose", failed=False)
    else:
        store.record_activation(digest, request.by)
    checked = (
        "its signature is right" if verifier else "its signature is looked at when the line starts"
    )
    return Answer(
        done=True,
        text=f"{model.manifest.id} ({digest}) is served when the line starts: edge-node serve",
        findings=(f"{checked}, and its golden image comes out as promised",),
    )


def _check_candidate(store: BundleStore, digest: str) -> None:
    """UsageError for a bundle that has failed in service,
    or has other classes than the active one.
    """
    from edge.registry.pre_rollout_checks import describe_classes  # noqa: PLC0415  (loads numpy)

    state = store.state()
    remedy = store.force_command(digest)
    if how := state.bad.get(digest):
        raise UsageError(f"the bundle {digest} has failed in service: {how}", remedy)
    if state.active:
        new = store.manifest(digest).classes
        old = store.manifest(state.active).classes
        if set(new) != set(old):
            raise UsageError(describe_classes(new, old), remedy)
