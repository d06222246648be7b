"""A line's outcomes for tests: made in numbers, and put by a process that can be killed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from edge.inference.outcomes import Outcome, Verdict, current_time, new_id
from edge.sinks.sink import Item

_PROCESS = """
import contextlib, json, logging, sys, time
from pathlib import Path
from edge.config.instance import Instance
from edge.daemon.dispatcher import Dispatcher
from edge.daemon.line_settings import parse
from tests.support.numbered_outcomes import verdict
logging.basicConfig(format="%(message)s")
tables, state, first, count, pause = json.loads(sys.argv[1])
settings = parse(tables, Path(state) / "line.toml")
with contextlib.closing(Dispatcher(Instance("line-1", Path(state)), settings.spool)) as box:
    box.apply(box.prepare(settings.sinks))
    for number in range(first, first + count):
        box.put(verdict(number))
        sys.stdout.write(f"{number}\\n")
        sys.stdout.flush()
        time.sleep(pause)
    print("all", flush=True)
    sys.stdin.read()
"""


def verdict(number: int) -> Verdict:
    """An outcome with a number for a name."""
    return Verdict(
        image=str(number),
        label=("scratches", "inclusion")[number % 2],
        confidence=0.9,
        probabilities={"scratches": 0.9, "inclusion": 0.1},
        bundle="press-3@30",
        milliseconds=7.5,
        time=current_time(),
        id=new_id(),
    )


def item(seq: int, outcome: Outcome | None = None) -> Item:
    return Item(seq, outcome or verdict(seq), replayed=False)


def items(first: int, last: int) -> list[Item]:
    return [item(seq) for seq in range(first, last + 1)]


class OutcomeProcess:
    """A process that puts outcomes from number `first` on, one every `pause` seconds,
    and waits to be ended.
    """

    def __init__(
        self,
        sinks: list[dict[str, Any]],
        state: Path,
        *,
        first: int = 0,
        count: int = 1000,
        pause: float = 0.0,
        spool: dict[str, int] | None = None,
        before: str = "",
    ) -> None:
        tables = {"sinks": sinks, "spool": spool or {}}
        state.mkdir(exist_ok=True)
        self.log = state / f"log-{first}"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    before + _PROCESS,
                    json.dumps([tables, str(state), first, count, pause]),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.put: list[int] = []  # what was put for sure

    def until(self, count: int | None = None) -> Self:
        """Wait until so many were put since the last time, or all."""
        assert self.process.stdout
        for line in self.process.stdout:
            if line == "all\n":
                break
            self.put.append(int(line))
            if count is not None and (count := count - 1) <= 0:
                break
        else:
            raise AssertionError(self.log.read_text())
        return self

    def kill(self) -> list[int]:
        """Kill -9; returns what was put for sure."""
        self.process.kill()
        assert self.process.stdout
        self.put += [
            int(line) for line in self.process.stdout.read().split("\n")[:-1] if line != "all"
        ]
        self.process.wait()
        return self.put

    def end(self) -> str:
        """End it in order; returns what it has logged."""
        assert self.process.stdin
        self.process.stdin.close()
        assert self.process.wait(60) == 0, self.log.read_text()
        return self.log.read_text()


def numbers(found: list[dict[str, Any]]) -> list[int]:
    """Which outcomes these are; they must be in order, their `seq` without a gap."""
    assert [each["seq"] for each in found] == list(
        range(found[0]["seq"], found[0]["seq"] + len(found))
    )
    return [int(each["image"]) for each in found]
