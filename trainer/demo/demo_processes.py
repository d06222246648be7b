"""Child processes of a demo: `edge-node` commands with their logs,
and the folder that they leave.
"""

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
from broker_config.security.secret_environment import environment_without_secrets
from trainer import progress

_TERMINATION_TIMEOUT = 10.0  # seconds
_READY_TIMEOUT = 60.0  # seconds
_MARK = ".edge-node-demo"


def clear_folder(out: Path) -> None:
    """Make `out` an empty folder; only the folder of an earlier demo is cleared."""
    if out.exists() and any(out.iterdir()):
        if not (out / _MARK).exists():
            raise UsageError(
                f"{out} is not empty and not of an earlier demo", "name another folder"
            )
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / _MARK).touch()


class Process:
    """A running `edge-node` command with its log; its events, if they are read,
    go to a JSON file beside that.
    """

    def __init__(self, name: str, log: Path, arguments: Sequence[str], events: bool):
        self.name = name
        self.log = log
        with log.open("wb") as file:
            stdout = subprocess.PIPE if events else file
            self.popen = subprocess.Popen(
                # -P: a folder named edge here is not ours
                [sys.executable, "-P", "-m", "edge_node", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=file,
                env={**environment_without_secrets(), "PYTHONUNBUFFERED": "1"},
                # Ctrl-C in the terminal reaches only us; we stop the others in order
                start_new_session=True,
            )

    def failure(self) -> EdgeNodeError:
        """The error of a process that failed, with the end of its log."""
        code = self.popen.returncode
        what = (
            f"{self.name} was killed by signal {-code}"
            if code < 0
            else f"{self.name} ended with exit code {code}"
        )
        tail = self.log.read_text(errors="replace").strip().splitlines()[-8:]
        return EdgeNodeError(what + "".join(f"\n    {line}" for line in tail), f"see {self.log}")


class Processes:
    """The demo's child processes. However the block ends, none of them is left running."""

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
        for child in psutil.wait_procs(children, _TERMINATION_TIMEOUT)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    def start(self, name: str, *arguments: str, events: bool = False) -> Process:
        """Start a command; with `events`, `read_events` can read its events."""
        return Process(name, self._logs / f"{name}.log", arguments, events)

    def wait(self, process: Process) -> None:
        """Wait until it ends; raises if it failed."""
        if process.popen.wait() != 0:
            raise process.failure()

    def stop(self, process: Process) -> None:
        """Terminate it and wait; raises if it failed."""
        process.popen.terminate()
        self.wait(process)

    def read_events(self, *processes: Process) -> Iterator[tuple[Process, progress.AnyEvent]]:
        """Events of the processes as they come, until all have ended; raises if one fails."""
        lines: queue.Queue[tuple[Process, bytes]] = queue.Queue()
        for process in processes:
            threading.Thread(target=_forward_events, args=(process, lines), daemon=True).start()
        running = set(processes)
        while running:
            process, line = lines.get()
            if line:
                yield process, progress.parse_event(line)
            else:
                self.wait(process)
                running.remove(process)

    def wait_until_ready(self, daemon: Process) -> str:
        """Wait until a daemon answers; returns its URL."""
        deadline = time.monotonic() + _READY_TIMEOUT
        while time.monotonic() < deadline and daemon.popen.poll() is None:
            for line in daemon.log.read_text().splitlines():
                if line.startswith("ready "):
                    return line.removeprefix("ready ").strip()
            time.sleep(0.05)
        daemon.popen.poll()
        failure = (
            daemon.failure()
            if daemon.popen.returncode
            else EdgeNodeError("the daemon is not ready", f"see {daemon.log}")
        )
        raise failure


def _forward_events(process: Process, lines: "queue.Queue[tuple[Process, bytes]]") -> None:
    """Write its events to the queue and to `NAME.jsonl`;
    an empty line in the queue marks its end.
    """
    assert process.popen.stdout is not None
    with process.log.with_suffix(".jsonl").open("wb") as file:
        for line in process.popen.stdout:
            file.write(line)
            lines.put((process, line))
    lines.put((process, b""))
