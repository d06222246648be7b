"""Processes that answer requests of bytes, one at a time, and that can be killed:
for work that may hang or crash.
"""

import atexit
import contextlib
import os
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence

from broker_config.security.secret_environment import environment_without_secrets

_REQUEST = struct.Struct("=dQ")  # seconds of the processor that it may take; bytes that follow
_REPLY = struct.Struct("=Q")  # bytes that follow
_MEMORY = 2 << 30  # bytes of addresses


class WorkerEndedError(Exception):
    """A worker process has ended before it answered."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the process ended with {code}")
        self.is_late = code == -signal.SIGPROF


class WorkerProcesses:
    """Processes `python -P -m MODULE`, started when they are needed and kept for later;
    for any number of threads.

    MODULE calls `serve_requests`.
    """

    def __init__(self, module: str) -> None:
        self._command = [sys.executable, "-P", "-m", module]
        self._idle: list[subprocess.Popen[bytes]] = []
        self._busy: set[subprocess.Popen[bytes]] = set()
        self._is_killed = False
        os.register_at_fork(after_in_child=self._idle.clear)  # two processes must not share one
        atexit.register(self.close)

    def ask(self, request: Sequence[bytes], seconds: float) -> bytes:
        """The answer to a request, which may come in parts.

        WorkerEndedError when it takes more than `seconds` of the processor's time, however busy
        that is otherwise, or the process dies; OSError when none can be started.
        """
        process = self._take()
        self._busy.add(process)
        if self._is_killed:
            process.kill()
        assert process.stdin
        assert process.stdout
        try:
            process.stdin.write(_REQUEST.pack(seconds, sum(map(len, request))))
            process.stdin.writelines(request)
            process.stdin.flush()
            (size,) = _REPLY.unpack(process.stdout.read(_REPLY.size))
            answer = process.stdout.read(size)
        except (BrokenPipeError, struct.error):
            raise WorkerEndedError(_end(process)) from None
        except BaseException:
            _end(process)
            raise
        finally:
            self._busy.discard(process)
        self._idle.append(process)
        return answer

    def close(self) -> None:
        """End the processes that are idle."""
        while self._idle:
            _end(self._idle.pop())

    def kill(self) -> None:
        """Kill the processes that answer at the moment, and each that is asked from now on:
        whoever asks gets WorkerEndedError.
        """
        self._is_killed = True
        for process in [*self._busy]:
            process.kill()

    def _take(self) -> subprocess.Popen[bytes]:
        with contextlib.suppress(IndexError):
            while True:
                process = self._idle.pop()
                if process.poll() is None:
                    return process
                _end(process)
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # libraries grumble about damaged files
            env=environment_without_secrets() | {"OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for us
        )


def _end(process: subprocess.Popen[bytes]) -> int:
    """Kill it, unless it has ended; its exit code."""
    process.kill()
    for pipe in filter(None, (process.stdin, process.stdout)):
        with contextlib.suppress(OSError):  # what was not sent is lost
            pipe.close()
    return process.wait()


def serve_requests(answer: Callable[[bytes], Sequence[bytes]]) -> None:
    """Answer requests until standard input ends;
    what takes too long is ended by the system, whatever it does.

    So a process outlives its parent by one request at most.
    """
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not answer
    # a service manager's, for all processes: work in hand is finished
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for kind, most in ((resource.RLIMIT_AS, _MEMORY), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # a service may be forbidden to set them
            resource.setrlimit(kind, (most, most))
    while head := requests.read(_REQUEST.size):
        seconds, size = _REQUEST.unpack(head)
        request = requests.read(size)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        reply = answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(_REPLY.pack(sum(map(len, reply))))
        replies.writelines(reply)
        replies.flush()
