"""Reporters of rounds and activities: they add durations and traffic, and leave out repetitions."""

import time
from collections.abc import Callable, Mapping, Sequence

from trainer.progress.events import Activity, Note, Report, RoundClosed, RoundOpened
from trainer.progress.remaining_time import Clock

_TRANSFER_INTERVAL = 1.0  # seconds between two events that differ in their bytes only
_TOLD = {
    "weight": 0.9,
    "update": 0.5,
}  # shares that are told if less counts: half of all are above the median, by little


class RoundReporter:
    """Reports when rounds open and close; `traffic` returns the bytes sent up and down so far."""

    def __init__(self, report: Report, traffic: Callable[[], tuple[int, int]]):
        self._report = report
        self._traffic = traffic
        self.open_round = 0  # 0 when none is
        self._opened = 0.0
        self._sums = False
        self._reported_traffic = (0, 0)  # when the last round was closed
        self._told_limited: set[str] = set()  # nodes

    def open(self, round_: int, *, sums: bool = False) -> None:
        """A round begins, in which nodes train or contribute `sums`."""
        self.open_round = round_
        self._opened = time.monotonic()
        self._sums = sums
        self._report(RoundOpened(round=round_))

    def close(
        self,
        contributors: Sequence[str],
        missing: Sequence[str] = (),
        limited: Mapping[str, dict[str, float]] = {},
    ) -> None:
        """The open round, if there is one, has ended without the nodes that are `missing`.

        `limited` has, by node, how much counts of what the rule of aggregation has limited. The
        first time that it is much of the node's weight, or most of its update, that is also told in
        words.
        """
        if self.open_round:
            before = self._reported_traffic
            self._reported_traffic = self._traffic()
            up, down = (
                now - then for now, then in zip(self._reported_traffic, before, strict=True)
            )
            self._report(
                RoundClosed(
                    round=self.open_round,
                    contributors=list(contributors),
                    missing=list(missing),
                    sums=self._sums,
                    limited=dict(limited),
                    seconds=time.monotonic() - self._opened,
                    bytes_up=up,
                    bytes_down=down,
                )
            )
            for node, counted in sorted(limited.items()):
                if node not in self._told_limited and any(
                    counted[each] < most for each, most in _TOLD.items()
                ):
                    self._told_limited.add(node)
                    text = (
                        f"round {self.open_round}: {counted['weight']:.0%} of the weight of "
                        f"{node} counts, and {counted['update']:.0%} of its update: both are "
                        "limited to the median of all nodes"
                    )
                    self._report(Note(text=text))
        self.open_round = 0


class ActivityReporter:
    """Reports what nodes do: each change at once,
    the progress of a transfer once a second, repetitions never.
    """

    def __init__(self, report: Report, clock: Clock = time.monotonic):
        self._report = report
        self._clock = clock
        self._last: dict[str, tuple[Activity, float]] = {}

    def report(self, activity: Activity) -> None:
        """Pass an activity on if it is due."""
        last, when = self._last.get(activity.node, (None, 0.0))
        changed = last is None or (activity.round, activity.what) != (last.round, last.what)
        if changed or (activity != last and self._clock() - when >= _TRANSFER_INTERVAL):
            self._last[activity.node] = activity, self._clock()
            self._report(activity)

    def reset(self, node: str) -> None:
        """The node is gone: its next activity is a change."""
        self._last.pop(node, None)
