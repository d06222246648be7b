"""Whether what nodes exchange beside the average has reached their images, for those who run a federation."""

from collections.abc import Mapping

from edge.terminal.formatting import format_names
from trainer import progress
from trainer.methods.base import PATCHED, Metrics


class Exchange:
    """Says once that it has not: such nodes have trained as without an exchange. In round 1 there is nothing yet."""

    def __init__(self, report: progress.Report):
        self._report, self._said = report, False

    def take(self, round_: int, metrics: Mapping[str, Metrics]) -> None:
        """What nodes measured in a round."""
        alone = [node for node, measured in metrics.items() if measured.get(PATCHED) == 0]
        if alone and round_ > 1 and not self._said:
            self._said = True
            self._report(
                progress.Note(
                    text=f"round {round_}: no patches of others fit the images of {format_names(alone)}: "
                    "the exchange teaches nothing there while patched is 0; "
                    "each label must be with two plants at least, with as many images at each as --option mix"
                )
            )
