"""Small plants for tests: folders of images, and real `edge-node` processes that work on them."""

import contextlib
import functools
import io
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image
from safetensors.numpy import save_file

from broker_config.protocol.messages import Spec
from edge_node.cli.main import app as edge_node
from edge_node.cli.main import run as run_app
from tests.support.forked_process import Forked
from tests.support.waiting import PATIENCE, wait_until
from trainer.data import class_folders
from trainer.data.checks.check_run import load_checked
from trainer.data.class_folders import Images
from trainer.federation.client.plant_images import suited_hold_out
from trainer.methods import make
from trainer.models.initial_weights import initial_encoder
from trainer.models.named_tensors import strip_prefix

CLASSES = ("inclusion", "patches", "scratches")
FEDERATION = (
    "--method",
    "afedcl",
    "--model",
    "small",
    "--size",
    "32",
    "--rounds",
    "2",
    "--seed",
    "7",
)


def draw(
    folder: Path, per_class: int, seed: int, classes: Sequence[str] = CLASSES, size: int = 32
) -> Path:
    """Images that differ by class: brightness and stripes under noise."""
    random = np.random.default_rng(seed)
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for index in range(per_class):
            pixels = random.normal(80 + 40 * number, 25, (size, size, 3))
            pixels[:: number + 2] += 60
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(
                folder / name / f"{seed}-{index}.png"
            )
    return folder


def load_images(spec: Spec, folder: Path) -> Images:
    """A plant's images as `join` loads them without a test folder."""
    size = spec.preprocessing.size
    method = make(spec.method, spec.training, spec.options, spec.head, spec.privacy)
    return load_checked(
        class_folders.scan(folder),
        None,
        spec.classes,
        size,
        spec.seed,
        hold_out=suited_hold_out(spec, method),
    )[0]


Process = subprocess.Popen[bytes] | Forked


def start(
    *arguments: object,
    log: Path,
    module: str = "edge_node",
    anew: bool = False,
    **environment: str,
) -> Process:
    """An `edge-node` process, its output in `log`; what takes long to start is forked,
    unless `anew`.
    """
    words = [str(each) for each in arguments]
    command = next(word for word in words if not word.startswith("--"))
    draws = command == "coordinate" and "--weights" not in words  # which imports torch
    if (draws or command in ("join", "preview", "serve")) and module == "edge_node" and not anew:
        return Forked(words, log, environment)
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )


def run(
    *arguments: object, timeout: float = PATIENCE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """An `edge-node` command, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "edge_node", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
        check=False,
    )


def here(
    *words: object, app: typer.Typer = edge_node, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """As `run`, but in this process: none has to start and import torch."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    arguments, sys.argv = sys.argv, ["edge-node", *map(str, words)]
    typed, sys.stdin = sys.stdin, io.StringIO(stdin)
    out, err = io.StringIO(), io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as end,
        ):
            run_app(app)
    finally:
        sys.argv, sys.stdin = arguments, typed
        for number, handler in handlers.items():
            signal.signal(number, handler)
    code = int(end.value.code or 0)
    return subprocess.CompletedProcess(list(map(str, words)), code, out.getvalue(), err.getvalue())


def wait_for(log: Path, text: str, seconds: float = PATIENCE) -> str:
    """What the log holds once it holds the text. AssertionError if it does not come."""

    def found() -> str:
        said = log.read_text() if log.exists() else ""
        return said if text in said else ""

    return wait_until(
        found, said=lambda: f"{text!r} is not in {log}:\n{log.read_text()}", seconds=seconds
    )


@functools.cache
def drawn_weights() -> Path:
    """What FEDERATION's seed draws, as a file: with it a coordinator needs no torch,
    and starts at once.
    """
    path = Path(tempfile.mkdtemp()) / "small.safetensors"
    save_file(strip_prefix("encoder", initial_encoder("small", "none", 7)), path)
    return path


def federation_of(
    url: str, plants: dict[str, Path], folder: Path, *flags: str, **join: Sequence[str]
) -> dict[str, Process]:
    """Start a federation of the plants' processes; state folders are `folder/coordinator` and
    `folder/NAME`, logs beside them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    processes = {
        "coordinator": start(
            "coordinate",
            url,
            "--classes",
            ",".join(CLASSES),
            "--nodes",
            len(plants),
            *FEDERATION,
            "--weights",
            drawn_weights(),
            *flags,
            "--state",
            folder / "coordinator",
            log=folder / "coordinator.log",
        )
    }
    for name, images in plants.items():
        processes[name] = start(
            "join",
            url,
            "--name",
            name,
            "--data",
            images,
            "--state",
            folder / name,
            *join.get(name, ()),
            log=folder / f"{name}.log",
        )
    return processes


def federate(
    url: str, plants: dict[str, Path], folder: Path, *flags: str, **join: Sequence[str]
) -> None:
    """Run such a federation to its end.

    AssertionError with the logs if a process fails.
    """
    processes = federation_of(url, plants, folder, *flags, **join)
    try:
        codes = {name: process.wait(120) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
    logs = "\n".join(f"== {name}\n{(folder / f'{name}.log').read_text()}" for name in processes)
    assert set(codes.values()) == {0}, f"{codes}\n{logs}"
