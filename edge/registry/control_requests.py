"""How a command asks the running daemon: files in the store's folder, whose owner alone can write there.

`requests/ID.json` is a request, `requests/ID.answer` what became of it.
"""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from broker_config.protocol.errors import EdgeNodeError
from broker_config.storage import disk
from edge.inference.verdict import new_id

_PAUSE = 0.05  # seconds between two looks for an answer

_log = logging.getLogger(__name__)


class Request(Struct, frozen=True, kw_only=True):
    """What somebody wants of the daemon."""

    action: Literal["activate", "rollback"]
    by: str
    bundle: str = ""  # digits
    force: bool = False  # whatever the gate says
    accept_older: bool = False


class Answer(Struct, frozen=True, kw_only=True):
    """What became of it."""

    done: bool
    text: str
    remedy: str = ""
    findings: tuple[str, ...] = ()


def ask(store: Path, request: Request, patience: float, alive: Callable[[], bool]) -> Answer:
    """Ask the daemon of this store; EdgeNodeError when it ends, or does not answer within `patience` seconds."""
    folder = store / "requests"
    name = new_id()
    asked, answered = folder / f"{name}.json", folder / f"{name}.answer"
    with disk.writing(folder):
        folder.mkdir(exist_ok=True, mode=0o700)
        disk.replace_bytes(asked, msgspec.json.encode(request), mode=0o600)
    deadline = time.monotonic() + patience
    try:
        while not answered.exists():
            if time.monotonic() >= deadline or not alive():
                raise EdgeNodeError(
                    "the line's daemon has not answered",
                    "look into its log; edge-node bundle list shows what it serves",
                )
            time.sleep(_PAUSE)
        return msgspec.json.decode(answered.read_bytes(), type=Answer)
    finally:
        asked.unlink(missing_ok=True)
        answered.unlink(missing_ok=True)


class RequestQueue:
    """Where the daemon finds requests. Those that were left before it began are void."""

    def __init__(self, store: Path) -> None:
        self._folder = store / "requests"
        with disk.writing(self._folder):
            self._folder.mkdir(exist_ok=True, mode=0o700)
            for path in self._folder.iterdir():
                path.unlink()

    def requests(self) -> Iterator[tuple[Path, Request]]:
        """Those that are there, each once; one that cannot be read is logged."""
        for path in sorted(self._folder.glob("*.json")):
            try:
                request = msgspec.json.decode(path.read_bytes(), type=Request)
            except FileNotFoundError:  # whoever asked has given up
                continue
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
                _log.error("a request in %s cannot be read: %s", path, error)
                path.unlink(missing_ok=True)
                continue
            path.unlink(missing_ok=True)
            yield path, request

    def answer(self, path: Path, answer: Answer) -> None:
        """Tell whoever asked; EdgeNodeError when the disk does not take it."""
        with disk.writing(self._folder):
            disk.replace_bytes(path.with_suffix(".answer"), msgspec.json.encode(answer), mode=0o600)
