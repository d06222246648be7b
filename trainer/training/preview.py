"""Forecasts of what joining would give a plant,
from one message of sums and leaving out its images one by one.
"""

from collections.abc import Mapping
from functools import reduce

import msgspec
import numpy as np

from broker_config.protocol.messages import Preprocessing, Spec
from trainer.data.class_folders import LabelledImages
from trainer.data.training_set import TrainingSet
from trainer.methods.statistics_head import list_encoders, take_below
from trainer.models.catalogue import FEATURES
from trainer.models.named_tensors import Arrays, select
from trainer.models.network import Network, to_tensors
from trainer.statistics.encoder_choice import to_metrics
from trainer.statistics.features import projected_features
from trainer.statistics.label_doubts import (
    Doubt,
    describe_doubts,
    find_doubts,
    find_judged,
    log_softmax,
)
from trainer.statistics.lda_head import fit_scale, leave_one_out
from trainer.statistics.sums import Sums, choose_images, collect
from trainer.training.evaluation import accuracy, predict_among


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What the consensus head would reach on one encoder's features,
    on images left out one by one; shares in 0..1.
    """

    model: str
    # that are judged: of whose class something is left without them and their look-alikes
    images: int
    loss: float  # cross-entropy of these together
    # accuracy where the plant's classes are the candidates; None without such images
    own: float | None
    all: float | None  # accuracy where all classes are
    alone: float | None  # as `own`, by the plant's sums alone


class ClassShare(msgspec.Struct, frozen=True, kw_only=True):
    """How many images of a class there are."""

    name: str
    own: int
    others: int  # images of other plants
    plants: int  # other plants that have it


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """What a plant is told before it trains."""

    node: str
    federation: str
    forecasts: list[Forecast]  # the encoder of the federation first
    classes: list[ClassShare]
    doubts: list[Doubt]
    # of the model that one message gives, as its plant is told it: accuracy on a line with its
    # 95 % interval; None without images that can judge
    accuracy: float | None = None
    accuracy_low: float | None = None
    accuracy_high: float | None = None

    def describe(self) -> list[str]:
        """What a person wants to know of it, line by line."""
        first = min(self.forecasts, key=lambda each: each.loss)
        own = [share.name for share in self.classes if share.own]
        lines = [
            (
                "no forecast: no plant has another image of the classes of these, by which they "
                "could be judged"
            )
        ]
        if first.own is not None and first.all is not None:
            alone = f" ({first.alone:.0%} without the others)" if first.alone is not None else ""
            lines = [
                f"forecast with {first.model}, {first.images} images, each left out in turn: "
                f"{first.own:.0%} right among its own {len(own)} classes{alone}, {first.all:.0%} "
                f"among all {len(self.classes)}",
            ]
            if first.all < 1:
                lines.append(
                    "where a class has few images this is pessimistic: on photographs of steel 8 "
                    "points more is reached"
                )
        if self.accuracy is not None:
            lines.append(
                f"the model that is made of these sums: accuracy {self.accuracy:.1%} "
                f"({self.accuracy_low:.0%} to {self.accuracy_high:.0%}, 95 % interval), as a line "
                "judges"
            )
        if taught := [share for share in self.classes if share.others and not share.own]:
            names = ", ".join(
                f"{share.name} ({share.others} images at {share.plants} of them)"
                for share in taught
            )
            lines.append(f"classes that only other plants have images of: {names}")
        if missing := [share.name for share in self.classes if not share.own + share.others]:
            lines.append(f"classes that nobody has an image of: {', '.join(missing)}")
        if len(self.forecasts) > 1 and first.images:
            losses = ", ".join(
                f"{each.model} {each.loss / each.images:.3f}" for each in self.forecasts
            )
            lines.append(f"cross-entropy an image, by encoder (less is better): {losses}")
        lines += describe_doubts(self.doubts, "preview.json")
        return lines

    def metrics(self) -> dict[str, float]:
        """What the coordinator needs to compare encoders: each one's loss, and their images."""
        losses = {each.model: each.loss for each in self.forecasts}
        return to_metrics(losses, self.forecasts[0].images)


def preview(
    spec: Spec,
    node: str,
    result: Arrays,
    images: LabelledImages,
    metrics: Mapping[str, float] = {},
) -> Preview:
    """Forecast what joining gives a node.

    Args:
        spec: of a federation that exchanges statistics.
        node: its name.
        result: of the run: encoders, and totals of the other nodes.
        images: of the node, as they are now.
        metrics: of the model that the node would have, as `conclude` gives them.
    """
    images = images.take(choose_images(images.labels))  # those that the sums are of
    forecasts: list[Forecast] = []
    doubts: list[Doubt] = []
    for model, prefix in list_encoders(spec.model, result):
        others = Sums.of(take_below(prefix, result))
        dimensions = others.dimensions if others.dimensions < FEATURES[model] else 0
        views = _views(model, take_below(prefix, result), spec.preprocessing, images, dimensions)
        mine = collect(views, images.labels, len(spec.classes))
        total = others.combine(mine, np.add)
        logits, cosines = leave_one_out(total, mine, views, images.labels, images.sets)
        judged = find_judged(total, images.labels, images.sets)
        if not forecasts:
            looked_at = images.take(judged)
            doubts = find_doubts(
                logits[judged], cosines[judged], looked_at.labels, looked_at.paths, spec.classes
            )
        forecasts.append(_forecast(model, logits, judged, mine, views, images.labels, images.sets))
    classes = [
        ClassShare(name=name, own=int(here), others=int(there), plants=int(plants))
        for name, here, there, plants in zip(
            spec.classes, mine.images, others.images, others.holders, strict=True
        )
    ]
    return Preview(
        node=node,
        federation=spec.federation,
        forecasts=forecasts,
        classes=classes,
        doubts=doubts,
        accuracy=metrics.get("accuracy"),
        accuracy_low=metrics.get("accuracy_low"),
        accuracy_high=metrics.get("accuracy_high"),
    )


def _views(
    model: str,
    tensors: Arrays,
    preprocessing: Preprocessing,
    images: LabelledImages,
    dimensions: int = 0,
) -> np.ndarray:
    encoder = to_tensors(select(tensors, ("encoder",)), "cpu")
    return projected_features(
        Network(model, 2), encoder, TrainingSet.of(images, preprocessing), dimensions
    )


def _forecast(
    model: str,
    logits: np.ndarray,
    judged: np.ndarray,
    mine: Sums,
    views: np.ndarray,
    labels: np.ndarray,
    groups: list[list[int]],
) -> Forecast:
    own = np.flatnonzero(mine.images).tolist()
    repeated = find_judged(mine, labels, groups)
    alone = None
    if len(repeated):
        by_itself, _ = leave_one_out(mine, mine, views, labels, groups)
        alone = accuracy(predict_among(by_itself[repeated], own), labels[repeated])
    logits = logits[judged]
    labels = labels[judged]
    accuracy_own = accuracy(predict_among(logits, own), labels) if len(judged) else None
    all_ = accuracy(logits.argmax(1), labels) if len(judged) else None
    return Forecast(
        model=model,
        images=len(judged),
        loss=cross_entropy(logits, labels),
        own=accuracy_own,
        all=all_,
        alone=alone,
    )


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    """The sum over images of what logits [n, C] cost,
    each scaled by the factor that fits all of them best.
    """
    log_probabilities = log_softmax(logits * fit_scale(logits, labels))
    return -float(log_probabilities[np.arange(len(labels)), labels].sum())


def compute_loss(spec: Spec, broadcast: Arrays, shares: Mapping[str, LabelledImages]) -> float:
    """What leaving out their images one by one costs all nodes together, for each image that is
    judged, on the features of a broadcast's encoder.

    Args:
        spec: of the federation.
        broadcast: its first one.
        shares: each node's training images.
    """
    views = {
        node: _views(spec.model, broadcast, spec.preprocessing, images)
        for node, images in shares.items()
    }
    sums = {
        node: collect(each, shares[node].labels, len(spec.classes)) for node, each in views.items()
    }
    total = reduce(lambda left, right: left.combine(right, np.add), sums.values())
    loss = 0.0
    count = 0
    for (node, each), images in zip(views.items(), shares.values(), strict=True):
        logits, _ = leave_one_out(total, sums[node], each, images.labels, images.sets)
        judged = find_judged(total, images.labels, images.sets)
        loss += cross_entropy(logits[judged], images.labels[judged])
        count += len(judged)
    return loss / max(1, count)
