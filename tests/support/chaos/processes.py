"""`edge-node` processes that can be killed; a fork server starts them in milliseconds."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.chaos import tracing
from tests.support.forked_process import CONTEXT


class EdgeNode:
    """An `edge-node` process under a name, started again and again;
    `ended` is its exit code when it is not running.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        arguments: Sequence[object],
        passphrase: str = "",
        chunk: int = 256,
    ):
        self.name, self._folder, self._arguments = name, folder, [str(each) for each in arguments]
        self._passphrase, self._chunk = passphrase, chunk
        self._process: Any = None
        self.started = 0.0  # seconds, of the monotonic clock

    def twin(self, name: str) -> "EdgeNode":
        """The same command on a state folder of another name."""
        ours, theirs = str(self._folder / self.name), str(self._folder / name)
        arguments = [theirs if each == ours else each for each in self._arguments]
        return EdgeNode(self._folder, name, arguments, self._passphrase, self._chunk)

    def start(self) -> None:
        """Start it, for the first time or again."""
        self.started = time.monotonic()
        its = (self._arguments, self._folder, self.name, self._passphrase, self._chunk)
        self._process = CONTEXT.Process(target=tracing.live, args=its)
        self._process.start()

    @property
    def sentinel(self) -> int:
        """Becomes ready when the process ends."""
        handle: int = self._process.sentinel
        return handle

    @property
    def ended(self) -> int | None:
        """The exit code; minus the signal that ended it."""
        code: int | None = self._process.exitcode
        return code

    def kill(self) -> None:
        """Kill -9, and wait until it is dead."""
        self._process.kill()
        self._process.join()
