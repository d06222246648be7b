"""Supervisor of a child process: runs a command until standard input closes,
which also happens if the parent dies.

`python -m broker_config.broker.supervisor COMMAND...`; if the supervisor itself is killed, Linux
kills the command.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

PATIENCE = 3.0  # seconds between asking the command to terminate and killing it
PR_SET_PDEATHSIG = 1


def supervise(command: list[str]) -> int:
    """Run `command`; return its exit status."""
    # No threads yet
    before_start = _die_with_supervisor()
    # No thread runs yet.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=before_start)  # noqa: PLW1509
    threading.Thread(target=_terminate_when_input_closes, args=(child,), daemon=True).start()
    return child.wait()


def _terminate_when_input_closes(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):  # not sys.stdin, whose lock must be free when the interpreter ends
        pass
    child.terminate()
    try:
        child.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()


def _die_with_supervisor() -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    supervisor = os.getpid()

    def in_child() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # it died between the fork and our asking
            os._exit(1)

    return in_child


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1:]))
