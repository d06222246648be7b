"""`edge-node` processes of a VFL run that can be killed, and what they were doing then.

Each notes its steps in a file that is mapped into memory: that costs next to nothing, and the
kernel keeps the last note. Rounds that were learnt from are appended to a second file. A fork
server starts the processes in milliseconds.
"""

import functools
import importlib
import mmap
import multiprocessing
import os
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edge_node.cli.main import main

WAITING = "waiting"
STEPS = {  # what is done: by which method
    "reading rows": "edge_node.extensions.vfl.line.sensor_rows:Samples.refresh",
    "reading labels": "edge_node.extensions.vfl.server.labels:Labels.refresh",
    "embedding": "edge_node.extensions.vfl.client.sensor_trainer:SensorTrainer.start_round",
    "representing": "edge_node.extensions.vfl.server.head_model:HeadModel.represent",
    "learning": "edge_node.extensions.vfl.algorithm:Sensor.train",
    "learning as head": "edge_node.extensions.vfl.algorithm:Head.train",
    "writing a checkpoint": "edge_node.extensions.vfl.checkpoint:Checkpoints.save",
    "reading a checkpoint": "edge_node.extensions.vfl.checkpoint:Checkpoints.load",
    "writing the journal": "edge_node.extensions.vfl.server.journal:Journal.close_rounds",
    "sending": "broker_config.mqtt.client:MqttClient.publish",
}
STARTING = "starting"
_SIZE = 32  # bytes of a note
# whose children need not import all of this each for itself
FORK: Any = multiprocessing.get_context("forkserver")
_VFL = "edge_node.extensions.vfl"
_SLOW = (f"{_VFL}.commands", f"{_VFL}.party_export", "torch._dynamo", f"{_VFL}.client.discovery")
FORK.set_forkserver_preload(["tests.support.vfl_processes", *_SLOW, f"{_VFL}.client.session"])


class WatchedProcess:
    """One process, started again and again. It is watched from outside."""

    def __init__(self, folder: Path, name: str):
        self.log = folder / f"{name}.log"
        self._step, self._rounds = folder / f"{name}.step", folder / f"{name}.rounds"
        self._rounds.touch()
        self._process: Any = None

    def start(self, words: Sequence[object]) -> None:
        """Start it, for the first time or again."""
        self._step.write_bytes(STARTING.encode().ljust(_SIZE))
        self._process = FORK.Process(
            target=_live, args=([str(each) for each in words], *self._paths)
        )
        self._process.start()

    @property
    def _paths(self) -> tuple[Path, Path, Path]:
        return self.log, self._step, self._rounds

    @property
    def pid(self) -> int:
        """Of its present life."""
        number: int = self._process.pid
        return number

    @property
    def ended(self) -> int | None:
        """The exit code; minus the signal that ended it; None while it runs."""
        code: int | None = self._process.exitcode
        return code

    def kill(self) -> None:
        """Kill -9, and wait until it is dead."""
        self._process.kill()
        self._process.join()

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


def _live(words: Sequence[str], log: Path, step: Path, learnt: Path) -> None:
    """The process: `edge-node` with these words."""
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.argv = ["edge-node", *words]
    _observe(step, learnt)
    main()


def _observe(step: Path, learnt: Path) -> None:
    with step.open("r+b") as file:
        noted = mmap.mmap(file.fileno(), _SIZE)
    rounds = os.open(learnt, os.O_WRONLY | os.O_APPEND)
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
