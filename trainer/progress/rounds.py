"""When rounds open and close, and how many bytes travel in between."""

import time
from collections.abc import Callable, Sequence

from trainer.progress.events import Report, RoundClosed, RoundOpened


class Rounds:
    """Tells `report` of one round after another; `traffic` says how many bytes have gone up and down so far."""

    def __init__(self, report: Report, traffic: Callable[[], tuple[int, int]]):
        self._report, self._traffic = report, traffic
        self.open_round = 0  # 0 when none is
        self._since = 0.0
        self._moved = (0, 0)  # when the last round was closed

    def open(self, round_: int) -> None:
        """A round begins."""
        self.open_round, self._since = round_, time.monotonic()
        self._report(RoundOpened(round=round_))

    def close(self, contributors: Sequence[str], missing: Sequence[str] = ()) -> None:
        """The open round is over, without those that are `missing`; nothing happens if none is."""
        if self.open_round:
            before, self._moved = self._moved, self._traffic()
            up, down = (now - then for now, then in zip(self._moved, before, strict=True))
            self._report(
                RoundClosed(
                    round=self.open_round,
                    contributors=list(contributors),
                    missing=list(missing),
                    seconds=time.monotonic() - self._since,
                    bytes_up=up,
                    bytes_down=down,
                )
            )
        self.open_round = 0
