"""What a line's process is doing, as others see it even after it was killed; run as `python -m tests.line_witness`.

It is `edge-node` with a note at each step, in a file that is mapped into memory, so that writing one costs next to
nothing and the kernel keeps the last one. Rounds that were learnt from are appended to a second file.
"""

import functools
import importlib
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge.cli import main

WAITING = "waiting"
STEPS = {  # what is done: by which method
    "reading rows": "edge.vertical.rows:Samples.refresh",
    "reading labels": "trainer.vertical.labels:Labels.refresh",
    "embedding": "trainer.vertical.sensor:_Sensor._embed",
    "representing": "trainer.vertical.server:Server.represent",
    "learning": "trainer.vertical.parties:Sensor.learn",
    "learning as head": "trainer.vertical.parties:Head.learn",
    "writing a checkpoint": "trainer.vertical.checkpoint:Checkpoints.save",
    "reading a checkpoint": "trainer.vertical.checkpoint:Checkpoints.load",
    "writing the journal": "trainer.vertical.journal:Journal.close_rounds",
    "sending": "broker_config.link:Link.publish",
}
STARTING = "starting"
_FOLDER = "LINE_WITNESS"  # environment: where to note
_SIZE = 32


class Witness:
    """One process under observation: its steps from outside."""

    def __init__(self, folder: Path, name: str):
        self._step, self._rounds = folder / f"{name}.step", folder / f"{name}.rounds"
        self._step.write_bytes(STARTING.encode().ljust(_SIZE))
        self._rounds.touch()

    def starts(self) -> None:
        """Before each life."""
        self._step.write_bytes(STARTING.encode().ljust(_SIZE))

    @property
    def step(self) -> str:
        """What the process does now, or did last."""
        return self._step.read_bytes().decode().strip()

    @property
    def last(self) -> int:
        """The round that it has learnt from last; 0: none."""
        with self._rounds.open("rb") as file:
            size = file.seek(0, os.SEEK_END) // 8 * 8
            file.seek(max(0, size - 8))
            return int.from_bytes(file.read(8), "little")

    @property
    def rounds(self) -> list[int]:
        """The rounds that it has learnt from, in order, in all its lives."""
        data = self._rounds.read_bytes()
        return [each for (each,) in struct.iter_unpack("<Q", data[: len(data) // 8 * 8])]


def environment(folder: Path, name: str) -> dict[str, str]:
    """For the process that is to be observed."""
    return {_FOLDER: str(folder / name)}


def _observe() -> None:
    base = os.environ[_FOLDER]
    with Path(f"{base}.step").open("r+b") as file:
        noted = mmap.mmap(file.fileno(), _SIZE)
    rounds = os.open(f"{base}.rounds", os.O_WRONLY | os.O_APPEND)
    noted[:] = WAITING.encode().ljust(_SIZE)

    def wrapped(words: str, method: Callable[..., Any]) -> Callable[..., Any]:
        label = words.encode().ljust(_SIZE)

        @functools.wraps(method)
        def noting(*arguments: Any, **options: Any) -> Any:
            before = bytes(noted)
            noted[:] = label
            try:
                result = method(*arguments, **options)
            finally:
                noted[:] = before
            if words.startswith("learning"):
                os.write(rounds, struct.pack("<Q", arguments[-1]))
            return result

        return noting

    for words, where in STEPS.items():
        module, _, path = where.partition(":")
        owner_name, _, method_name = path.partition(".")
        owner = getattr(importlib.import_module(module), owner_name)
        setattr(owner, method_name, wrapped(words, getattr(owner, method_name)))


if __name__ == "__main__":
    _observe()
    main()
