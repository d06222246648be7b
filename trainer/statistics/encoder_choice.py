"""Choice of the encoder and the input size that suit all plants best,
by what leaving out their images one by one costs.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from broker_config.storage import disk
from trainer.models.catalogue import MILLISECONDS
from trainer.progress import AnyEvent, Gathering, Measured, Note, Report
from trainer.statistics.sums import MAX_IMAGES

AUTO = "auto"
"""The value of `--weights` that asks for this choice."""
FILE = "encoders.json"
# metrics that nodes tell the coordinator
_LOSS = "leave-one-out loss "
_IMAGES = "images left out"


class Cost(NamedTuple):
    """What one encoder costs on images of one size."""

    model: str
    weights: str  # what the encoder begins with
    size: int  # pixels
    loss: float  # cross-entropy of an image that is left out


def choose(costs: Sequence[Cost]) -> Cost:
    """Return what costs least; of equals the first."""
    return min(costs, key=lambda each: each.loss)


def describe(costs: Sequence[Cost], chosen: Cost) -> list[str]:
    """Return a line for each of the `costs`: the loss, the time an image takes,
    and which was chosen.
    """
    lines: list[str] = []
    for each in costs:
        known = MILLISECONDS.get((each.model, each.size))
        time = f", about {known:g} ms an image" if known else ""
        mark = " <- chosen" if each == chosen else ""
        lines.append(
            f"{each.model} at {each.size} px: cross-entropy {each.loss:.3f} an image left out"
            f"{time}{mark}"
        )
    return lines


def to_metrics(losses: Mapping[str, float], images: int) -> dict[str, float]:
    """What a node tells: what each model's encoder costs, all of its images together,
    and how many these are.
    """
    return {f"{_LOSS}{model}": loss for model, loss in losses.items()} | {_IMAGES: float(images)}


class NodeLosses(msgspec.Struct, frozen=True, kw_only=True):
    """What one node has told."""

    images: Annotated[int, msgspec.Meta(ge=0, le=MAX_IMAGES)]
    # of all images together, by model
    losses: dict[str, Annotated[float, msgspec.Meta(ge=0, le=1e6)]]


class RunLosses(msgspec.Struct, kw_only=True):
    """What the nodes of one choosing run have told."""

    run: str
    size: int  # pixels of the images that were compared
    weights: dict[str, str]  # what each encoder begins with, by its model
    nodes: dict[str, NodeLosses] = {}
    ended: bool = False  # nobody tells more


class EncoderLosses(msgspec.Struct, kw_only=True):
    """What nodes have told in the choosing runs since a choice began,
    in a file of the coordinator's state folder.
    """

    runs: list[RunLosses] = []

    def find(self, run: str) -> RunLosses | None:
        """Return what was told in this run; None if nothing is known of it."""
        return next((each for each in self.runs if each.run == run), None)

    def left(self, sizes: Sequence[int]) -> list[int]:
        """Return the sizes of which no run has ended."""
        ended = {each.size for each in self.runs if each.ended}
        return [size for size in sizes if size not in ended]

    def costs(self, sizes: Collection[int]) -> list[Cost]:
        """Return what each encoder costs on images of these sizes,
        over the nodes that have told of all.

        Empty if no node had an image to leave out.
        """
        compared = [each for each in self.runs if each.ended and each.size in sizes]
        if not compared:
            return []
        nodes = sorted(set.intersection(*(set(each.nodes) for each in compared)))
        costs: list[Cost] = []
        for each in compared:
            told = [each.nodes[node] for node in nodes]
            images = sum(node.images for node in told)
            if not images:
                return []
            for model, weights in each.weights.items():
                loss = sum(node.losses[model] for node in told) / images
                costs.append(Cost(model, weights, each.size, loss))
        return costs

    @staticmethod
    def load(folder: Path) -> "EncoderLosses":
        """Read what was written down in a coordinator's state folder; empty if there is nothing,
        or it is damaged.
        """
        try:
            return msgspec.json.decode(disk.read_regular(folder / FILE), type=EncoderLosses)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return EncoderLosses()

    def save(self, folder: Path) -> None:
        """Write it down; it is on disk when this returns."""
        with disk.writing(folder):
            disk.replace_bytes(folder / FILE, msgspec.json.format(msgspec.json.encode(self)))


def read_metrics(metrics: Mapping[str, float], models: Collection[str], classes: int) -> NodeLosses:
    """What a node has told of all `models`; an image counts for no more than a guess among the
    classes costs.

    Raises:
        ValueError: no honest node can have told it.
    """
    given = {name.removeprefix(_LOSS): loss for name, loss in metrics.items() if name != _IMAGES}
    images = metrics[_IMAGES]
    if not (0 <= images <= MAX_IMAGES and images == int(images)):
        raise ValueError(f"it cannot have left out {images:g} images")
    if given.keys() != set(models) or not all(loss >= 0 for loss in given.values()):
        raise ValueError("it must tell of each encoder once, and a cross-entropy is not negative")
    most = images * math.log(classes)
    return NodeLosses(
        images=int(images), losses={model: min(loss, most) for model, loss in given.items()}
    )


def write_down(
    report: Report, folder: Path, weights: Mapping[str, str], classes: int, size: int
) -> Report:
    """`report`, which also writes down in `folder` what the nodes of a choosing run tell.

    What a node tells is on disk when `report` returns.

    Args:
        report: told everything.
        folder: the coordinator's state folder.
        weights: what each encoder that is compared begins with, by its model.
        classes: of the federation, how many.
        size: pixels of the images.
    """
    told = RunLosses(run="", size=size, weights=dict(weights))

    def observe(event: AnyEvent) -> None:
        nonlocal told
        if isinstance(event, Gathering):
            earlier = EncoderLosses.load(folder).find(event.run)
            told = earlier or RunLosses(run=event.run, size=size, weights=dict(weights))
            _replace(folder, told)
        elif isinstance(event, Measured) and _IMAGES in event.metrics:
            try:
                told.nodes[event.node] = read_metrics(event.metrics, weights, classes)
            except ValueError as error:
                report(Note(text=f"what {event.node} says of encoders does not count: {error}"))
                return
            _replace(folder, told)
            # not the event: these are no metrics of a round
            report(Note(text=f"{event.node} has compared the encoders"))
            return
        report(event)

    return observe


def end(folder: Path, run: str) -> None:
    """Write down that nobody tells more in a choosing run."""
    told = EncoderLosses.load(folder).find(run)
    if told is not None:
        told.ended = True
        _replace(folder, told)


def _replace(folder: Path, told: RunLosses) -> None:
    known = EncoderLosses.load(folder)
    others = [each for each in known.runs if each.run != told.run]
    EncoderLosses(runs=[*others, told]).save(folder)
