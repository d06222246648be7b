"""Commands as processes of their own, for a demo that tells the whole story, and the folder that it leaves."""

import contextlib
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import psutil

from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.security.secret_environment import without_secrets
from trainer import progress

_GRACE = 10.0  # seconds for a process to end by itself
_READY = 60.0  # seconds for a daemon to be ready
_MARK = ".edge-node-demo"


def fresh(out: Path) -> None:
    """Make `out` a fresh folder; only one that an earlier demo made is emptied."""
    if out.exists() and any(out.iterdir()):
        if not (out / _MARK).exists():
            raise UsageError(f"{out} is not empty and not of an earlier demo", "name another folder")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / _MARK).touch()


class Process:
    """A running `edge-node` command. What it says goes to its log; its events, if they are read, beside it as JSON."""

    def __init__(self, name: str, log: Path, arguments: Sequence[str], events: bool):
        self.name, self.log = name, log
        with log.open("wb") as file:
            self.popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "edge.cli.main", *arguments],  # -P: a folder named edge here is not ours
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if events else file,
                stderr=file,
                env={**without_secrets(), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # the terminal's Ctrl-C reaches only us; we end the others in order
            )

    def failure(self) -> EdgeNodeError:
        """What to tell about a process that ended badly."""
        code = self.popen.returncode
        what = f"{self.name} was killed by signal {-code}" if code < 0 else f"{self.name} ended with exit code {code}"
        tail = self.log.read_text(errors="replace").strip().splitlines()[-8:]
        return EdgeNodeError(what + "".join(f"\n    {line}" for line in tail), f"see {self.log}")


class Processes:
    """The demo's child processes. However the block is left, none of them is left behind."""

    def __init__(self, logs: Path):
        logs.mkdir()
        self._logs = logs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        children = psutil.Process().children(recursive=True)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate()
        for child in psutil.wait_procs(children, _GRACE)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    def start(self, name: str, *arguments: str, events: bool = False) -> Process:
        """Run a command; its events are read by `events`, if they are asked for."""
        return Process(name, self._logs / f"{name}.log", arguments, events)

    def wait(self, process: Process) -> None:
        """Until it ends; raises if it failed."""
        if process.popen.wait() != 0:
            raise process.failure()

    def end(self, process: Process) -> None:
        """Ask it to end, and wait; raises if it failed."""
        process.popen.terminate()
        self.wait(process)

    def events(self, *processes: Process) -> Iterator[tuple[Process, progress.AnyEvent]]:
        """The events that processes print, as they come, until all have ended; raises when one fails."""
        lines: queue.Queue[tuple[Process, bytes]] = queue.Queue()
        for process in processes:
            threading.Thread(target=_pump, args=(process, lines), daemon=True).start()
        running = set(processes)
        while running:
            process, line = lines.get()
            if line:
                yield process, progress.parse_event(line)
            else:
                self.wait(process)
                running.remove(process)

    def ready(self, daemon: Process) -> str:
        """The URL of a daemon, once it answers."""
        deadline = time.monotonic() + _READY
        while time.monotonic() < deadline and daemon.popen.poll() is None:
            for line in daemon.log.read_text().splitlines():
                if line.startswith("ready "):
                    return line.removeprefix("ready ").strip()
            time.sleep(0.05)
        daemon.popen.poll()
        raise (
            daemon.failure()
            if daemon.popen.returncode
            else EdgeNodeError("the daemon is not ready", f"see {daemon.log}")
        )


def _pump(process: Process, lines: "queue.Queue[tuple[Process, bytes]]") -> None:
    """Its events into the queue and into `NAME.jsonl`; an empty one when it has ended."""
    assert process.popen.stdout is not None
    with process.log.with_suffix(".jsonl").open("wb") as file:
        for line in process.popen.stdout:
            file.write(line)
            lines.put((process, line))
    lines.put((process, b""))
