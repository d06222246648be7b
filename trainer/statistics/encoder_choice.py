"""Choice of the encoder that suits all plants best, by what leaving out their images one by one costs."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec

from broker_config.protocol.errors import UsageError
from broker_config.storage import disk
from trainer.models.initial_weights import choose_weights
from trainer.progress import AnyEvent, Gathering, Measured, Report

AUTO = "auto"
"""The value of `--weights` that asks for this choice."""
FILE = "encoders.json"
_LOSS, _IMAGES = "leave-one-out loss ", "images left out"  # metrics that nodes tell the coordinator


def to_metrics(losses: Mapping[str, float], images: int) -> dict[str, float]:
    """What a node tells: what each model's encoder costs, all of its images together, and how many these are."""
    return {f"{_LOSS}{model}": loss for model, loss in losses.items()} | {_IMAGES: float(images)}


class EncoderLosses(msgspec.Struct, kw_only=True):
    """What the nodes of a run have told, in a file of the coordinator's state folder."""

    run: str
    weights: dict[str, str]  # what the federation's own encoder began with, by its model
    nodes: dict[str, dict[str, float]] = {}  # what each has told, as `to_metrics` says

    def losses(self) -> dict[str, float]:
        """What each model's encoder costs an image, the best first."""
        images = sum(told[_IMAGES] for told in self.nodes.values())
        sums = Counter[str]()
        for told in self.nodes.values():
            sums.update({name.removeprefix(_LOSS): loss for name, loss in told.items() if name.startswith(_LOSS)})
        return {model: total / images for model, total in sorted(sums.items(), key=lambda each: each[1])}

    @staticmethod
    def load(folder: Path) -> "EncoderLosses | None":
        """What was written down in a coordinator's state folder; None if there is nothing, or it is damaged."""
        try:
            return msgspec.json.decode((folder / FILE).read_bytes(), type=EncoderLosses)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None


def write_down(report: Report, folder: Path, weights: Mapping[str, str]) -> Report:
    """`report`, which also writes down in `folder` what the nodes of a run tell of encoders.

    Args:
        report: told everything.
        folder: the coordinator's state folder.
        weights: what the federation's own encoder began with, by its model.
    """
    told = EncoderLosses(run="", weights=dict(weights))

    def observe(event: AnyEvent) -> None:
        nonlocal told
        if isinstance(event, Gathering):
            earlier = EncoderLosses.load(folder)
            told = (
                earlier if earlier and earlier.run == event.run else EncoderLosses(run=event.run, weights=told.weights)
            )
        elif isinstance(event, Measured) and _IMAGES in event.metrics:
            told.nodes[event.node] = event.metrics
            disk.replace_bytes(folder / FILE, msgspec.json.format(msgspec.json.encode(told)))
        report(event)

    return observe


def choose(folder: Path) -> tuple[str, str]:
    """Model and weights that suit the plants of an earlier preview best.

    Raises:
        UsageError: there was no preview with this state folder.
    """
    told = EncoderLosses.load(folder)
    losses = told.losses() if told else {}
    if told is None or not losses:
        raise UsageError(
            f"no plant has said in {folder} which encoder suits it",
            "run edge-node coordinate --method gaussian --option others=efficientnet_lite0 with this --state first, "
            "and edge-node preview at each plant; then --new --weights auto here",
        )
    best = next(iter(losses))
    return best, told.weights.get(best) or choose_weights(best)
