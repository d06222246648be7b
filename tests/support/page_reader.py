"""A reader who types a page's commands, one after the other,
and opens another terminal for each that stays.
"""

import contextlib
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from broker_config.broker.embedded import find_mosquitto
from tests.support.forked_process import Forked
from tests.support.paths import REPOSITORY
from tests.support.plants import Process
from tests.support.waiting import wait_until

COORDINATORS = {"coordinate", "vfl coordinate"}
# These end with their federation; all but other members, and who watches, waits for that.
MEMBERS = {"join", "vfl join"}
WATCHES = {"doctor", "status"}
STAYS = COORDINATORS | MEMBERS | {"broker", "console", "mosquitto", "serve", "vfl serve"}
# What it says when others may use it; of all others the first words.
READY = {"serve": "ready http", "coordinate": "waiting for", "console": "console http"}
SECONDS = 300


class Terminal(NamedTuple):
    """A command that was started."""

    kind: str
    line: str
    process: Process
    log: Path

    def describe(self, why: str) -> str:
        """Why it fails, and what it has said."""
        return f"{why}: {self.line}\n{self.log.read_text(errors='replace')}"

    def fail(self, why: str) -> None:
        """AssertionError with what the command has said."""
        raise AssertionError(self.describe(why))


class Reader:
    """Works in `folder`/here. AssertionError names the first command that fails."""

    def __init__(self, folder: Path, environment: dict[str, str]):
        self.folder = folder / "here"
        self._programs, self._logs = folder / "bin", folder / "logs"
        for each in (self.folder, self._programs, self._logs):
            each.mkdir()
        self._program("edge-node", f'exec {sys.executable} -m edge_node "$@"')
        self._program("python", f'exec {sys.executable} "$@"')
        if os.geteuid() == 0:  # it would become a user who may not read what pytest's folders hold
            as_root = '(cat "$2"; grep -q "^user " "$2" || echo user root) >"$2.root"'
            self._program("mosquitto", f'{as_root}\nexec {find_mosquitto()} -c "$2.root"')
        self._environment = {
            **os.environ,
            "PATH": f"{self._programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "XDG_STATE_HOME": str(folder / "state"),
            **environment,
        }
        self._terminals: list[Terminal] = []

    def _program(self, name: str, script: str) -> None:
        (self._programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (self._programs / name).chmod(0o755)

    def type(self, block: str) -> None:
        """A block: its commands one by one or, where it says itself what runs beside what,
        as one script.
        """
        typed = [block] if "$!" in block else list(lines(block))
        self._end({kind_of(line) for line in typed} & STAYS)
        for line in typed:
            self._run(line)
        self._wait_for_members()
        self._end(STAYS - {"serve"})  # a line goes on until another takes its place

    def python(self, block: str) -> None:
        """A block of Python."""
        (self.folder / "block.py").write_text(block)
        self._run("python block.py")

    def _run(self, line: str) -> None:
        kind = kind_of(line)
        if kind not in MEMBERS | WATCHES:
            self._wait_for_members()
        if kind in COORDINATORS | {"abort"}:
            self._end(COORDINATORS)
        terminal = Terminal(kind, line, *self._start(line))
        self._terminals.append(terminal)
        if kind not in STAYS:
            self._wait_for(terminal)
            return
        wait_until(
            lambda: (
                terminal.process.poll() is not None
                or READY.get(kind, "\n") in terminal.log.read_text()
            ),
            said=lambda: terminal.describe("it never became ready"),
            seconds=SECONDS,
        )

    def _start(self, line: str) -> tuple[Process, Path]:
        log = self._logs / f"{len(list(self._logs.iterdir()))}.log"
        assigned, words = split(shell_words(line))
        if words[0] == "edge-node" and not any(
            set(word) <= set("();<>|&") or "$" in word for word in words
        ):
            return Forked(words[1:], log, self._environment | assigned, self.folder), log
        script = f"exec {line}" if kind_of(line) in STAYS else line
        with log.open("wb") as output:
            return subprocess.Popen(
                ["sh", "-euc", script],
                cwd=self.folder,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ), log

    def _wait_for(self, terminal: Terminal) -> None:
        try:
            code = terminal.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            terminal.fail("it does not end")
        if code:
            terminal.fail(f"it ended with {code}")
        self._terminals.remove(terminal)

    def _wait_for_members(self) -> None:
        for terminal in [each for each in self._terminals if each.kind in MEMBERS]:
            self._wait_for(terminal)

    def _end(self, kinds: set[str]) -> None:
        """What still runs, runs as it should, and ends when it is asked to."""
        for terminal in [each for each in reversed(self._terminals) if each.kind in kinds]:
            running = terminal.process.poll() is None
            if running:
                terminal.process.send_signal(signal.SIGTERM)
            code = terminal.process.wait(SECONDS)
            if code not in ((0, 128 + signal.SIGINT, -signal.SIGTERM) if running else (0,)):
                terminal.fail(f"it ended with {code}")
            self._terminals.remove(terminal)

    def end(self) -> None:
        """The end of the page."""
        self._end(STAYS)

    def leave(self) -> None:
        """Kill what runs, should the page have failed;
        of a script also what it has left in the background.
        """
        for process in (each.process for each in self._terminals):
            if isinstance(process, Forked):
                process.kill()
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def lines(block: str) -> Iterator[str]:
    """The commands of a block, a loop being one."""
    loop = ""
    for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines():
        loop += f"{line}\n" if loop or line.startswith("for ") else ""
        if loop and line == "done":
            yield loop
            loop = ""
        elif not loop and shell_words(line):
            yield line


def shell_words(line: str) -> list[str]:
    """A command's words and operators, without its comment."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def split(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Variables that are set for a command, and the command."""
    assigned = list(itertools.takewhile(re.compile("[A-Z_]+=").match, words))
    return dict(word.split("=", 1) for word in assigned), words[len(assigned) :]


def kind_of(line: str) -> str:
    """What a line starts: `join`, `vfl join`, `mosquitto`; of all else the first word."""
    _, words = split(shell_words(line))
    if words[0] != "edge-node" or "$!" in line:
        return words[0]
    return " ".join(words[1:3] if words[1] == "vfl" else words[1:2])
