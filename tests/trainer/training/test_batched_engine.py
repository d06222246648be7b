"""The batched engine trains what the plain one trains, to rounding."""

from typing import Any

import numpy as np
import pytest
import torch

from broker_config.protocol.errors import UsageError
from tests.support.engine_agreement import assert_engines_agree
from tests.support.method_cases import CASES, CLASSES, drafted, images, shares, slow_except
from trainer.data.class_folders import Images
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import Engine, simulate
from trainer.models.named_tensors import is_trainable
from trainer.training import batched_engine
from trainer.training.participant import Participant


@pytest.mark.parametrize(
    "case", slow_except(("fedavg", "afedcl", "afedcl_plus", "scaffold", "gaussian"), CASES)
)
def test_every_method_gives_what_it_gives_node_by_node(case: str) -> None:
    assert_engines_agree(*drafted(case), shares(2))


@pytest.mark.parametrize(
    "training",
    [
        {"augment": False},
        {"batch_size": 4},
        {"batch_size": 2, "moments": "reset"},
        {"optimizer": "sgd"},
    ],
    ids=str,
)
def test_every_training_setting_gives_what_it_gives_node_by_node(training: dict[str, Any]) -> None:
    assert_engines_agree(*drafted("afedcl", **training), shares(2))


@pytest.mark.parametrize(
    ("model", "mode"),
    [
        ("mobilenet_v2", "eval"),
        pytest.param("efficientnet_lite0", "eval", marks=pytest.mark.slow),
        ("efficientnet_lite0_mid", "eval"),
        pytest.param("resnet18", "train", marks=pytest.mark.slow),
    ],
)
def test_batch_norm_has_each_nodes_own_statistics(model: str, mode: str) -> None:
    training = {"batch_norm": mode, "local_epochs": 1, "learning_rate": 1e-4}
    request = Request(
        method="fedavg", model=model, weights="none", size=32, rounds=2, training=training
    )
    assert_engines_agree(*draft(request, federation="test", classes=CLASSES, nodes=2), shares(2))


def test_nodes_with_equally_many_images_train_together() -> None:
    spec, _ = drafted("fedavg")
    counts = {"a": 6, "b": 7, "c": 6, "d": 6, "e": 8}
    nodes = [
        Participant(spec, name, Images(images(1, count), None)) for name, count in counts.items()
    ]
    assert [group.nodes for group in batched_engine.group_nodes(nodes)] == [
        ["a", "c", "d"],
        ["b"],
        ["e"],
    ]
    assert [group.nodes for group in batched_engine.group_nodes(nodes, 2)] == [
        ["a", "c"],
        ["d"],
        ["b"],
        ["e"],
    ]
    assert [group.nodes for group in batched_engine.group_nodes(nodes, 1)] == [
        ["a"],
        ["c"],
        ["d"],
        ["b"],
        ["e"],
    ]


def test_a_federation_of_unequal_nodes_ends_with_the_same_average_and_verdicts() -> None:
    spec, broadcast = drafted("afedcl")
    nodes = {
        f"plant-{k}": Images(images(k, count), images(k + 100)) for k, count in enumerate((6, 7, 6))
    }
    plain, together = (
        simulate(spec, broadcast, nodes, engine=Engine(kind)) for kind in ("plain", "batched")
    )
    for name in filter(is_trainable, broadcast):
        np.testing.assert_allclose(
            together.broadcast[name], plain.broadcast[name], rtol=1e-3, atol=1e-5
        )
    assert plain.models.keys() == together.models.keys()
    for name, model in plain.models.items():
        assert [v.verdict for v in together.models[name].predictions] == [
            v.verdict for v in model.predictions
        ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("kind", ["plain", "batched"])
@pytest.mark.parametrize("case", [*CASES, "mobilenet_v2"])
def test_a_gpu_trains_what_the_processor_trains_and_gives_models_that_need_none(
    case: str, kind: Any, monkeypatch
) -> None:
    # ten bits of a mantissa, by default
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    if case in CASES:
        spec, broadcast = drafted(case)
    else:
        training = {"batch_norm": "eval", "local_epochs": 1, "learning_rate": 1e-4}
        request = Request(
            method="fedavg", model=case, weights="none", size=32, rounds=2, training=training
        )
        spec, broadcast = draft(request, federation="test", classes=CLASSES, nodes=2)
    here, there = (
        simulate(spec, broadcast, shares(2), engine=each)
        for each in (Engine(), Engine(kind, "cuda"))
    )
    for name in filter(is_trainable, here.broadcast):
        one, other = (each.broadcast[name].astype(np.float64) for each in (here, there))
        assert np.linalg.norm(other - one) <= 1e-2 * np.linalg.norm(one) + 1e-4, name
    for name, model in here.models.items():
        moved = there.models[name]
        assert {
            value.device.type for value in (*moved.tensors.values(), *moved.shared.values())
        } == {"cpu"}
        assert moved.tensors.keys() == model.tensors.keys()
        assert [v.verdict for v in moved.predictions] == [v.verdict for v in model.predictions]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_an_error_with_a_remedy() -> None:
    with pytest.raises(UsageError, match="no GPU"):
        simulate(*drafted("fedavg"), shares(), engine=Engine(device="cuda"))
