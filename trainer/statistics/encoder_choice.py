"""Choice of the encoder that suits all plants best,
by what leaving out their images one by one costs.
"""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from broker_config.protocol.errors import UsageError
from broker_config.storage import disk
from trainer.methods import PREVIEW
from trainer.models.catalogue import FEATURES
from trainer.models.initial_weights import choose_weights
from trainer.progress import AnyEvent, Gathering, Measured, Note, Report
from trainer.statistics.sums import MAX_IMAGES

AUTO = "auto"
"""The value of `--weights` that asks for this choice."""
FILE = "encoders.json"
# metrics that nodes tell the coordinator
_LOSS = "leave-one-out loss "
_IMAGES = "images left out"


def to_metrics(losses: Mapping[str, float], images: int) -> dict[str, float]:
    """What a node tells: what each model's encoder costs, all of its images together,
    and how many these are.
    """
    return {f"{_LOSS}{model}": loss for model, loss in losses.items()} | {_IMAGES: float(images)}


class NodeLosses(msgspec.Struct, frozen=True, kw_only=True):
    """What one node has told."""

    images: Annotated[int, msgspec.Meta(ge=1, le=MAX_IMAGES)]
    # of all images together, by model
    losses: dict[str, Annotated[float, msgspec.Meta(ge=0, le=1e6)]]


class EncoderLosses(msgspec.Struct, kw_only=True):
    """What the nodes of a run have told, in a file of the coordinator's state folder."""

    run: str
    weights: dict[str, str]  # what the federation's own encoder began with, by its model
    size: int = 0  # pixels of the images that were compared; 0 from earlier versions
    nodes: dict[str, NodeLosses] = {}

    def costs(self) -> dict[str, float]:
        """What each model's encoder costs an image, the best first;
        of models that all nodes have told of.
        """
        images = sum(told.images for told in self.nodes.values())
        models = (
            set.intersection(*(set(told.losses) for told in self.nodes.values()))
            if self.nodes
            else set[str]()
        )
        sums = {}
        for model in models:
            sums[model] = sum(told.losses[model] for told in self.nodes.values()) / images
        return dict(sorted(sums.items(), key=lambda each: (each[1], each[0])))

    @staticmethod
    def load(folder: Path) -> "EncoderLosses | None":
        """What was written down in a coordinator's state folder; None if there is nothing,
        or it is damaged.
        """
        try:
            return msgspec.json.decode(disk.read_regular(folder / FILE), type=EncoderLosses)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None


def read_metrics(metrics: Mapping[str, float], models: Collection[str], classes: int) -> NodeLosses:
    """What a node has told of all `models`; an image counts for no more than a guess among the
    classes costs.

    Raises:
        ValueError: no honest node can have told it.
    """
    given = {name.removeprefix(_LOSS): loss for name, loss in metrics.items() if name != _IMAGES}
    images = metrics[_IMAGES]
    if not (1 <= images <= MAX_IMAGES and images == int(images)):
        raise ValueError(f"it cannot have left out {images:g} images")
    if given.keys() != set(models) or not all(loss >= 0 for loss in given.values()):
        raise ValueError("it must tell of each encoder once, and a cross-entropy is not negative")
    most = images * math.log(classes)
    return NodeLosses(
        images=int(images), losses={model: min(loss, most) for model, loss in given.items()}
    )


def write_down(
    report: Report,
    folder: Path,
    weights: Mapping[str, str],
    models: Collection[str],
    classes: int,
    size: int,
) -> Report:
    """`report`, which also writes down in `folder` what the nodes of a run tell of encoders.

    Args:
        report: told everything.
        folder: the coordinator's state folder.
        weights: what the federation's own encoder began with, by its model.
        models: of all encoders whose features nodes sum.
        classes: of the federation, how many.
        size: pixels of the images.
    """
    told = EncoderLosses(run="", weights=dict(weights), size=size)

    def observe(event: AnyEvent) -> None:
        nonlocal told
        if len(models) < 2:
            pass  # nothing to compare: what an earlier run has told stands
        elif isinstance(event, Gathering):
            earlier = EncoderLosses.load(folder)
            told = (
                earlier
                if earlier and earlier.run == event.run
                else EncoderLosses(run=event.run, weights=told.weights, size=size)
            )
        elif isinstance(event, Measured) and _IMAGES in event.metrics:
            try:
                told.nodes[event.node] = read_metrics(event.metrics, models, classes)
            except ValueError as error:
                report(Note(text=f"what {event.node} says of encoders does not count: {error}"))
                return
            disk.replace_bytes(folder / FILE, msgspec.json.format(msgspec.json.encode(told)))
        report(event)

    return observe


class Choice(NamedTuple):
    """What suits the plants of an earlier preview best."""

    model: str
    weights: str
    size: int  # pixels of the images that were compared; 0 if an earlier version compared them


def choose(folder: Path) -> Choice:
    """Return the encoder that costs the plants of an earlier preview least.

    Raises:
        UsageError: there was no preview with this state folder.
    """
    told = EncoderLosses.load(folder)
    costs_or_empty = told.costs() if told else {}
    costs = [model for model in costs_or_empty if model in FEATURES]
    if told is None or not costs:
        raise UsageError(
            f"no plant has said in {folder} which encoder suits it",
            f"run edge-node coordinate --method {PREVIEW} --option others=mobilenet_v2_mid "
            "with this --state first, and edge-node preview at each plant; then --new --weights "
            "auto here",
        )
    weights = told.weights.get(costs[0]) or choose_weights(costs[0])
    return Choice(costs[0], weights, told.size)
