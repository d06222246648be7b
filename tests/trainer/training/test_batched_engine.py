"""The batched engine trains what the plain one trains, to rounding."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Spec
from tests.trainer.methods.test_method_properties import CASES, CLASSES, drafted, images, shares
from trainer.data.class_folders import Images
from trainer.federation.server.spec import Request, draft
from trainer.methods.base import Metrics
from trainer.models.named_tensors import Arrays, add_prefix, is_trainable
from trainer.models.network import to_arrays
from trainer.training import batched_engine
from trainer.training.participant import Participant
from trainer.training.simulation import Engine, simulate

# Of the distance between two nodes. Rounding alone gives a few 1e-5, since Adam's first steps make whole steps of tiny
# gradients; another node's images, order or augmentation would give about 1.
TOLERANCE = 1e-3


class Ended(NamedTuple):
    """A node after two rounds."""

    tensors: Arrays  # its own, and those that it sent
    metrics: Metrics


def train(spec: Spec, broadcast: Arrays, nodes: dict[str, Images], most: int) -> dict[str, Ended]:
    """Two rounds from the same broadcast, at most so many nodes at once."""
    ended = {}
    for group in batched_engine.group_nodes([Participant(spec, name, share) for name, share in nodes.items()], most):
        states = [Participant(spec, name, nodes[name]).start(broadcast) for name in group.nodes]
        for round_ in (1, 2):
            stage_1 = group.contribute(states, broadcast, round_)
            stage_2 = group.refine([state for state, _, _ in stage_1], broadcast, round_)
            states = [state for state, _ in stage_2]
        for name, (_, sent, first), (state, second) in zip(group.nodes, stage_1, stage_2, strict=True):
            tensors = {**to_arrays(state.tensors), **add_prefix("sent", sent.tensors)}
            ended[name] = Ended(tensors, {**first, **second, "weight": sent.weight})
    return ended


def agree(spec: Spec, broadcast: Arrays, nodes: dict[str, Images]) -> None:
    plain, together = (train(spec, broadcast, nodes, most) for most in (1, batched_engine.MOST))
    for name, other in zip(nodes, reversed(nodes), strict=True):
        assert together[name].metrics == pytest.approx(plain[name].metrics, rel=1e-5)
        for tensor, values in plain[name].tensors.items():
            distance = np.linalg.norm(values - together[name].tensors[tensor])
            last_bit = np.finfo(np.float32).eps  # of a weight of about 1: which are rounded depends on the processor
            assert distance <= TOLERANCE * np.linalg.norm(values - plain[other].tensors[tensor]) + last_bit, tensor


@pytest.mark.parametrize("case", CASES)
def test_every_method_gives_what_it_gives_node_by_node(case: str) -> None:
    agree(*drafted(case), shares(2))


@pytest.mark.parametrize(
    "training", [{"augment": False}, {"batch_size": 4}, {"batch_size": 2, "moments": "reset"}], ids=str
)
def test_every_training_setting_gives_what_it_gives_node_by_node(training: dict[str, Any]) -> None:
    agree(*drafted("afedcl", **training), shares(2))


@pytest.mark.parametrize(("model", "mode"), [("mobilenet_v2", "eval"), ("resnet18", "train")])
def test_batch_norm_has_each_nodes_own_statistics(model: str, mode: str) -> None:
    training = {"batch_norm": mode, "local_epochs": 1, "learning_rate": 1e-4}
    request = Request(method="fedavg", model=model, weights="none", size=32, rounds=2, training=training)
    agree(*draft(request, federation="test", classes=CLASSES, nodes=2), shares(2))


def test_nodes_with_equally_many_images_train_together() -> None:
    spec, _ = drafted("fedavg")
    counts = {"a": 6, "b": 7, "c": 6, "d": 6, "e": 8}
    nodes = [Participant(spec, name, Images(images(1, count), None)) for name, count in counts.items()]
    assert [group.nodes for group in batched_engine.group_nodes(nodes)] == [["a", "c", "d"], ["b"], ["e"]]
    assert [group.nodes for group in batched_engine.group_nodes(nodes, 2)] == [["a", "c"], ["d"], ["b"], ["e"]]
    assert [group.nodes for group in batched_engine.group_nodes(nodes, 1)] == [["a"], ["c"], ["d"], ["b"], ["e"]]


def test_a_federation_of_unequal_nodes_ends_with_the_same_average_and_verdicts() -> None:
    spec, broadcast = drafted("afedcl")
    nodes = {f"plant-{k}": Images(images(k, count), images(k + 100)) for k, count in enumerate((6, 7, 6))}
    plain, together = (simulate(spec, broadcast, nodes, engine=Engine(kind)) for kind in ("plain", "batched"))
    for name in filter(is_trainable, broadcast):
        np.testing.assert_allclose(together.broadcast[name], plain.broadcast[name], rtol=1e-3, atol=1e-5)
    assert plain.models.keys() == together.models.keys()
    for name, model in plain.models.items():
        assert [v.verdict for v in together.models[name].predictions] == [v.verdict for v in model.predictions]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_an_error_with_a_remedy() -> None:
    with pytest.raises(UsageError, match="no GPU"):
        simulate(*drafted("fedavg"), shares(), engine=Engine(device="cuda"))
