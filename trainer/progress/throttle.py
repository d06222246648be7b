"""What a node does, told when it changes."""

import time

from trainer.progress.events import Activity, Report
from trainer.progress.remaining_time import Clock

_EVERY = 1.0  # seconds between two events that differ in their bytes only


class Throttle:
    """Passes activities on to `report`: each change at once, bytes that travel once a second, repetitions never."""

    def __init__(self, report: Report, clock: Clock = time.monotonic):
        self._report, self._clock = report, clock
        self._told: dict[str, tuple[Activity, float]] = {}

    def tell(self, activity: Activity) -> None:
        """Pass it on, or not."""
        last, when = self._told.get(activity.node, (None, 0.0))
        changed = last is None or (activity.round, activity.what) != (last.round, last.what)
        if changed or (activity != last and self._clock() - when >= _EVERY):
            self._told[activity.node] = activity, self._clock()
            self._report(activity)

    def forget(self, node: str) -> None:
        """The node is gone; whatever it does next is a change."""
        self._told.pop(node, None)
