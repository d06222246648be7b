"""`edge-node` processes that a fork server starts in milliseconds: it has imported torch,
once for all of them.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_node.cli import main

CONTEXT: Any = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "tests.support.chaos.tracing", "tests.support.forked_process", "pytest"]
)


def as_it_is() -> None:
    """Change nothing in a new process."""


class Forked:
    """A running `edge-node ARGUMENTS`, with what tests ask of a `subprocess.Popen`;
    its output goes to `log`.

    It calls `prepare`, a function of a module, before it does anything else.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        cwd: Path | None = None,
        prepare: Callable[[], None] = as_it_is,
    ):
        log.write_bytes(b"")
        self._process: Any = CONTEXT.Process(
            target=_live,
            args=(arguments, log, {**os.environ, **environment}, cwd or Path.cwd(), prepare),
        )
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """The exit code once it has ended; minus the signal that ended it."""
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. TimeoutExpired if it still runs after so many seconds."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """If it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill -9."""
        self.send_signal(signal.SIGKILL)


def _live(
    arguments: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    cwd: Path,
    prepare: Callable[[], None],
) -> None:
    """Be the process, in the starter's environment and folder of now:
    the fork server has those of its own start.
    """
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["edge-node", *arguments]
    prepare()
    main.main()
