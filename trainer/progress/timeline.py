"""What a node did when: spans of wall clock time, a JSON line each, in its state folder.

A span is written when it has ended: a killed node leaves no half of one, and the time until it is back is a gap.
"""

import contextlib
import time
from pathlib import Path
from typing import Literal

import msgspec

from broker_config.protocol.messages import Round, RunId

FILE = "timeline.jsonl"
_MOST = 10_000  # spans kept, the newest; about 1 MB and 2,000 rounds
_SHORTEST = 1e-3  # seconds of waiting; work counts however soon it is done, or seen to be

Activity = Literal["waiting", "receiving", "training", "sending", "refining"]
"""For the next round; for its broadcast; stage 1; from the offer to Accepted; stage 2, beside the sending."""


class Span(msgspec.Struct, frozen=True):
    """One stretch of one activity; `begin` and `end` in seconds since 1970."""

    run: RunId
    round: Round
    activity: Activity
    begin: float
    end: float


class Timeline:
    """Records the spans of one run in `folder`; those of earlier runs are forgotten. Used by one thread."""

    def __init__(self, folder: Path, run: str):
        self._path, self._run = folder / FILE, run
        self._begun: dict[Activity, tuple[int, float]] = {}
        # The clock is read once: when it is set while we run, no span ends before it began.
        self._epoch = time.time() - time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        self._compact()

    def begin(self, activity: Activity, round_: int) -> None:
        """From now on; nothing changes when it has begun for this round already."""
        if activity not in self._begun or self._begun[activity][0] != round_:
            self._begun[activity] = (round_, self._now())

    def end(self, activity: Activity) -> None:
        """Until now; nothing happens when it has not begun."""
        if activity in self._begun:
            (round_, begin), end = self._begun.pop(activity), self._now()
            if activity != "waiting" or end - begin >= _SHORTEST:
                self._append(Span(self._run, round_, activity, round(begin, 3), round(end, 3)))

    def _now(self) -> float:
        return self._epoch + time.monotonic()

    def _append(self, span: Span) -> None:
        # Not synced, and a full disk is no reason to stop here: no round depends on it.
        with contextlib.suppress(OSError), self._path.open("ab") as file:
            file.write(msgspec.json.encode(span) + b"\n")
            self._count += 1
        if self._count >= 2 * _MOST:
            self._compact()

    def _compact(self) -> None:
        """Keep this run's newest spans, in whole lines."""
        spans = read(self._path.parent, self._run)[-_MOST:]
        self._count = len(spans)
        scratch = self._path.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            scratch.write_bytes(b"".join(msgspec.json.encode(span) + b"\n" for span in spans))
            scratch.replace(self._path)


def read(folder: Path, run: str) -> list[Span]:
    """A run's spans in a node's state folder, in the order of their ends; lines that were cut short are passed by."""
    return [span for span in _all(folder) if span.run == run]


def newest_run(folder: Path) -> str | None:
    """The run that the node took part in last; None if it has not done so for long."""
    return next((span.run for span in reversed(_all(folder))), None)


def _all(folder: Path) -> list[Span]:
    try:
        lines = (folder / FILE).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    spans = []
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError):
            spans.append(msgspec.json.decode(line, type=Span))
    return [span for span in spans if span.end >= span.begin]
