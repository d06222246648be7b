"""A method of class means, computed from statistics that nodes contribute;
before that they may train as in FedAvg.
"""

import msgspec
import numpy as np
import pytest
import torch

from broker_config.protocol.messages import TensorSpec, Training
from trainer.data.training_set import TrainingSet
from trainer.methods import METHODS, Entry
from trainer.methods.base import Method, OneStage, Statistics, send_prefixes
from trainer.methods.fedavg import fedavg
from trainer.models.fusion import LENGTH, NORMALISED
from trainer.models.initial_weights import Shape
from trainer.models.named_tensors import Arrays, select
from trainer.models.network import Network, Tensors
from trainer.training import alone

NAME, COUNTS, FEATURES = "class_sums", "statistics.counts", "statistics.features"
GRID = 20  # binary exponent of the features' grid
MAX_IMAGES = 4096


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether there are rounds of training before the one for statistics."""

    trained: bool = False


def make_method(training: Training, options: Options) -> Method:
    """The method as a value."""
    statistics = Statistics(
        shapes=shapes,
        features=features,
        make=make,
        check=check,
        check_totals=lambda *_: None,
        deploy=deploy,
        fusion=NORMALISED,
    )
    if options.trained:
        return fedavg(training, OneStage())._replace(statistics=statistics)
    return Method(train=(), sends=send_prefixes(), statistics=statistics, metrics=())


def shapes(broadcast: Arrays, shape: Shape) -> dict[str, TensorSpec]:
    return {
        COUNTS: TensorSpec((shape.classes,), 0, "int64"),
        FEATURES: TensorSpec((shape.classes, shape.features), GRID, "int64"),
    }


def features(network: Network, received: Tensors, data: TrainingSet) -> Arrays:
    with torch.no_grad():
        each = network.encode(received, data.encoder_input(network, received, slice(None))).double()
    return {FEATURES: torch.round(torch.nn.functional.normalize(each) * 2**GRID).long().numpy()}


def make(rows: Arrays, labels: np.ndarray, classes: int) -> Arrays:
    members = np.eye(classes, dtype=np.int64)[labels]
    return {COUNTS: members.sum(0), FEATURES: members.T @ rows[FEATURES]}


def check(sums: Arrays, classes: int) -> None:
    counts = sums[COUNTS]
    if counts.min() < 0 or counts.sum() > MAX_IMAGES:
        raise ValueError(f"a node cannot have {counts.sum()} images")
    if (np.abs(sums[FEATURES]) > counts[:, None] * 2**GRID).any():
        raise ValueError("features are longer than 1")


def deploy(network: Network, own: Tensors, received: Tensors, served: bool) -> Tensors:
    """The nearest class mean.

    What others have is never negative: the totals have held the node's own sums.
    """
    assert (received[COUNTS] >= 0).all()
    counts, summed = (own[name] + received[name] for name in (COUNTS, FEATURES))
    means = (summed / counts[:, None].clamp(min=1) / 2**GRID).float()
    return {
        **select(received, ("encoder",)),
        "classifier.weight": means,
        "classifier.bias": -(means * means).sum(1) / 2,
        LENGTH: torch.tensor(1.0),
    }


def register(monkeypatch: pytest.MonkeyPatch) -> str:
    """Make the method known by its name, which is returned, as long as a test runs;
    what trains alone is brief.
    """
    monkeypatch.setattr(alone, "ROUNDS", 2)
    monkeypatch.setitem(METHODS, NAME, Entry(Options, make_method))
    return NAME
