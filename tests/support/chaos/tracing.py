"""An `edge-node` process of a chaos run: the command itself,
whose durable steps leave a trace and can be made deadly.

The product knows nothing of this: the steps are wrapped here, after the fork and before the command
begins.
"""

import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from broker_config.security.secret_environment import PASSPHRASE
from edge_node.cli import main
from trainer.federation.client import checkpoint, training_thread
from trainer.federation.server import journal
from trainer.federation.server.coordinator import process as coordinator
from trainer.training import personal_model

When = Literal["before", "after"]


class Moment(msgspec.Struct, frozen=True):
    """A line of a process's trace: a durable step is about to be made, or has been made."""

    time: float  # monotonic
    when: When
    kind: str
    round: int = 0
    digest: str = ""  # of a node's contribution


class StepTracer:
    """Writes a process's trace, and kills it where a fault is armed."""

    def __init__(self, folder: Path, name: str):
        self._trace, self._folder, self._name = folder / f"{name}.trace", folder, name

    def watch(self, owner: object, method: str, describe: Callable[..., dict[str, Any]]) -> None:
        """Let a step tell when it begins and ends; `describe` makes the moment's fields of its
        arguments.
        """
        step = getattr(owner, method)

        @functools.wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            fields = describe(*args, **kwargs)
            self._pass("before", fields)
            result = step(*args, **kwargs)
            self._pass("after", fields)
            return result

        setattr(owner, method, watched)

    def _pass(self, when: When, fields: dict[str, Any]) -> None:
        moment = Moment(time.monotonic(), when, **fields)
        with self._trace.open("ab", buffering=0) as file:  # what is written survives us
            file.write(msgspec.json.encode(moment) + b"\n")
        armed = fault(self._folder, self._name, when, moment.kind)
        if not armed.exists():
            return
        if spared := int(armed.read_text() or 0):
            armed.write_text(str(spared - 1))
            return
        armed.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def fault(folder: Path, name: str, when: When, kind: str) -> Path:
    """The file whose presence kills the process `name` right before or after its next step of
    this kind.

    It may hold how many such steps are spared first.
    """
    return folder / f"{name}.{when}-{kind}.fault"


def read(folder: Path, name: str, when: When | None = None) -> list[Moment]:
    """The trace of all processes that have had this name; its moments before or after, or both."""
    path = folder / f"{name}.trace"
    lines = path.read_bytes().splitlines() if path.exists() else []
    moments = [msgspec.json.decode(line, type=Moment) for line in lines]
    return [moment for moment in moments if when in (None, moment.when)]


def live(arguments: Sequence[str], folder: Path, name: str, passphrase: str, chunk: int) -> None:
    """Be the process `edge-node ARGUMENTS`, with its output appended to `folder/name.log`.

    Its kit opens with the passphrase, and a coordinator cuts its broadcasts into chunks of so many
    KiB.
    """
    coordinator.CHUNK = 1024 * chunk
    os.environ[PASSPHRASE] = passphrase
    log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["edge-node", *arguments]
    tracer = StepTracer(folder, name)
    tracer.watch(journal.Journal, "_commit", lambda _self, kind, *_args, **_fields: {"kind": kind})
    tracer.watch(
        training_thread.Worker,
        "_stage_1",
        lambda _self, manifest: {"kind": "training", "round": manifest.round},
    )
    tracer.watch(training_thread.Worker, "_save", lambda _self, _state, progress: _saved(progress))
    tracer.watch(
        checkpoint,
        "save_masks",
        lambda _folder, record: {"kind": "kept masks", "round": record.round},
    )
    tracer.watch(personal_model, "save", lambda *_: {"kind": "personal"})
    main.main()


def _saved(progress: training_thread.Progress) -> dict[str, Any]:
    return {
        "kind": progress.stage,
        "round": progress.round,
        "digest": progress.blob.digest if progress.blob else "",
    }
