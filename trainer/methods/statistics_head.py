"""The consensus head as part of a method: which sums plants exchange, and the personal model made of their totals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import TensorSpec
from trainer.methods.base import Statistics
from trainer.models.fusion import LENGTH, NORMALISED
from trainer.models.initial_weights import Shape
from trainer.models.named_tensors import Arrays, select
from trainer.statistics import lda_head
from trainer.statistics.sums import Sums, check, collect, directions, specs

if TYPE_CHECKING:
    from trainer.models.network import Network, Tensors
    from trainer.training.training_set import TrainingSet


def statistics_head(dimensions: int = 0) -> Statistics:
    """The exchange of sums of the shared encoder's features, projected to `dimensions` public directions unless 0."""
    return Statistics(
        shapes=lambda broadcast, shape: _specs(shape, dimensions),
        make=lambda network, received, data: _collect(network, received, data, dimensions),
        check=lambda sums, classes: check(sums),
        deploy=lambda network, own, result: _deploy(network, own, result, dimensions),
        fusion=NORMALISED,
    )


def _specs(shape: Shape, dimensions: int) -> dict[str, TensorSpec]:
    if dimensions > shape.features:
        raise UsageError(
            f"features of {shape.features} numbers cannot be projected to {dimensions}",
            f"take --option dimensions=1 to {shape.features}, or 0 for all",
        )
    return specs(shape.classes, dimensions or shape.features)


def _collect(network: Network, received: Tensors, data: TrainingSet, dimensions: int) -> Arrays:
    from trainer.statistics.features import view_features  # noqa: PLC0415  (imports torch)

    features = view_features(network, received, data)
    if dimensions:
        features = features @ directions(features.shape[2], dimensions).T
    return collect(features, data.labels.cpu().numpy(), network.shape.classes).arrays()


def _deploy(network: Network, own: Tensors, result: Tensors, dimensions: int) -> Tensors:
    """The encoder, the length of its features, and the head as their classifier."""
    import torch  # noqa: PLC0415  (the coordinator has none)

    mine, total = (Sums.of({name: value.cpu().numpy() for name, value in each.items()}) for each in (own, result))
    head = lda_head.fit(total, mine)
    encoder = select(result, ("encoder",))
    device = next(iter(encoder.values())).device
    weight = head.weight @ directions(network.shape.features, dimensions) if dimensions else head.weight
    return {
        **encoder,
        "classifier.weight": torch.from_numpy(weight.astype(np.float32)).to(device),
        "classifier.bias": torch.from_numpy(head.bias.astype(np.float32)).to(device),
        LENGTH: torch.ones((), device=device),
    }
