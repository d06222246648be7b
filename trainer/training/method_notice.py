"""A method's notice about a round, for those who run a federation."""

from collections.abc import Mapping

from trainer import progress
from trainer.methods.base import Method, Metrics


class MethodNotice:
    """Reporter of a method's first notice; later ones would repeat it."""

    def __init__(self, method: Method, report: progress.Report):
        self._method = method
        self._report = report
        self._given = False

    def check(self, round_: int, metrics: Mapping[str, Metrics]) -> None:
        """Report the method's notice about the nodes' metrics of a round,
        unless one has been reported.
        """
        text = "" if self._given else self._method.notice(round_, metrics)
        if text:
            self._given = True
            self._report(progress.Note(text=text))
