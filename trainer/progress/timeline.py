"""Timeline of a node's activities: spans of wall clock time, one JSON line each,
in its state folder.

A span is written when it has ended, so a killed node leaves no partial span, but a gap until it is
back.
"""

import contextlib
import time
from pathlib import Path
from typing import Literal

import msgspec

from broker_config.protocol.messages import Round, RunId

FILE = "timeline.jsonl"
_MIN_WAITING = 1e-3  # seconds; spans of work are recorded however short they are

Activity = Literal["waiting", "receiving", "training", "sending", "refining"]
"""For the next round; for its broadcast; stage 1; from the offer to Accepted; stage 2,
beside the sending.
"""


class Span(msgspec.Struct, frozen=True):
    """One stretch of one activity; `begin` and `end` in seconds since 1970."""

    run: RunId
    round: Round
    activity: Activity
    begin: float
    end: float


class Timeline:
    """Recorder of the spans of one run in `folder`; those of earlier runs are dropped.

    Used by one thread.
    """

    def __init__(self, folder: Path, run: str, most: int = 10_000):
        """The newest `most` spans are kept: about 1 MB and 2,000 rounds."""
        self._path = folder / FILE
        self._run = run
        self._most = most
        self._begun: dict[Activity, tuple[int, float]] = {}
        # The wall clock is read once: if it is set while we run, no span ends before it began.
        self._epoch = time.time() - time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        self._compact()

    def begin(self, activity: Activity, round_: int) -> None:
        """An activity begins now, unless it has already begun for this round."""
        if activity not in self._begun or self._begun[activity][0] != round_:
            self._begun[activity] = (round_, self._now())

    def end(self, activity: Activity) -> None:
        """An activity ends now, if it has begun."""
        if activity in self._begun:
            (round_, begin) = self._begun.pop(activity)
            end = self._now()
            if activity != "waiting" or end - begin >= _MIN_WAITING:
                self._append(Span(self._run, round_, activity, round(begin, 3), round(end, 3)))

    def _now(self) -> float:
        return self._epoch + time.monotonic()

    def _append(self, span: Span) -> None:
        # Not synced, and errors such as a full disk are ignored: no round depends on it.
        with contextlib.suppress(OSError), self._path.open("ab") as file:
            file.write(msgspec.json.encode(span) + b"\n")
            self._count += 1
        if self._count >= 2 * self._most:
            self._compact()

    def _compact(self) -> None:
        """Keep the newest spans of this run, without damaged lines."""
        spans = read_spans(self._path.parent, self._run)[-self._most :]
        self._count = len(spans)
        scratch = self._path.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            scratch.write_bytes(b"".join(msgspec.json.encode(span) + b"\n" for span in spans))
            scratch.replace(self._path)


def read_spans(folder: Path, run: str) -> list[Span]:
    """A run's spans in a node's state folder, ordered by their end; truncated lines are skipped."""
    return [span for span in _all(folder) if span.run == run]


def newest_run(folder: Path) -> str | None:
    """The run that the node took part in last; None if there is no span."""
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
