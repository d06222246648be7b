"""Terminals of any size: a command in a pseudo-terminal, and what rich renders."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time

import pyte
from rich.console import Console, RenderableType

from tests.support.waiting import PATIENCE


class Terminal:
    """A command in a pseudo-terminal, and the screen that its user sees."""

    def __init__(self, columns: int, *arguments: object, lines: int = 24, **environment: str):
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self._fd, terminal = pty.openpty()
        self._set_size(columns, lines)
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "edge_node", *map(str, arguments)],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={**inherited, "TERM": "xterm", **environment},
            start_new_session=True,
        )
        os.close(terminal)
        self.sent = b""

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def resize(self, columns: int) -> None:
        self._set_size(columns, self.screen.lines)
        self.screen.resize(self.screen.lines, columns)

    def type(self, line: str) -> None:
        os.write(self._fd, f"{line}\n".encode())

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def read_until(self, pattern: str, seconds: float = PATIENCE) -> re.Match[str]:
        """The match, once the screen shows it."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text, re.MULTILINE)):
            assert time.monotonic() < deadline, f"{pattern!r} is not on the screen:\n{self.text}"
            self._read()
        return found

    def read_until_round(self, number: int) -> int:
        """The round that the board shows, once it is this one or a later one."""
        while (
            not (found := re.search(r"^round (\d+) of", self.text, re.MULTILINE))
            or int(found[1]) < number
        ):
            self._read()
        return int(found[1])

    def read_to_end(self) -> int:
        """Exit code."""
        try:
            while True:
                self._read()
        except OSError:  # the other side is closed
            return self.process.wait(60)

    def _read(self) -> None:
        data = os.read(self._fd, 65536)
        self.sent += data
        self._stream.feed(data)


def console(width: int, height: int = 24) -> Console:
    """A console of this size that writes into memory."""
    return Console(file=io.StringIO(), width=width, height=height, color_system=None)


def text_lines(renderable: RenderableType, width: int, height: int = 24) -> list[str]:
    """What a terminal of this size shows, line by line, without styles."""
    lines = console(width, height).render_lines(renderable, pad=False)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]
