"""Runs a command until standard input closes: on purpose, or because the parent died, however it died.

`python -m broker_config.broker.supervisor COMMAND...`; should the keeper itself be killed, Linux kills the command.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

PATIENCE = 3.0  # seconds between asking the command to end and killing it
PR_SET_PDEATHSIG = 1


def keep(command: list[str]) -> int:
    """Run `command`; return its exit status."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_keeper())  # noqa: PLW1509 (no threads yet)
    threading.Thread(target=_end_with_input, args=(child,), daemon=True).start()
    return child.wait()


def _end_with_input(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):  # not sys.stdin, whose lock must be free when the interpreter ends
        pass
    child.terminate()
    try:
        child.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()


def _die_with_keeper() -> Callable[[], object] | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1:]))
