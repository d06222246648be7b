"""What a model saw where: class activation maps that add up to its verdict, and the pictures made of them."""

import numpy as np
import pytest
import torch

from trainer import backbones
from trainer.network import Network, to_tensors
from trainer.page.examine import _pick_right, _pick_wrong, heat
from trainer.personal import Verdict
from trainer.tree import Arrays


def personal(model: str, *, fused: bool) -> tuple[Network, dict[str, torch.Tensor]]:
    network = Network(model, 3)
    random = np.random.default_rng(0)
    arrays: Arrays = {f"encoder.{name}": value for name, value in backbones.draw(model, 0).items()}
    arrays["classifier.weight"] = random.normal(size=(3, network.shape.features)).astype(np.float32)
    arrays["classifier.bias"] = random.normal(size=3).astype(np.float32)
    if fused:
        arrays |= {f"received.{name}": value for name, value in backbones.draw(model, 1).items()}
        arrays["fusion"] = np.asarray(0.3, np.float32)
    return network, to_tensors(arrays)


@pytest.mark.parametrize("fused", [False, True], ids=["one encoder", "two encoders, fused"])
@pytest.mark.parametrize("model", ["small", "mobilenet_v2", "resnet18"])
def test_a_classs_map_averages_to_its_logit_less_the_bias(model: str, fused: bool) -> None:
    network, tree = personal(model, fused=fused)
    images = torch.randn((2, 3, 64, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features, maps = network.evidence(tree, images)
        logits = network.judge(tree, images)
    assert maps.shape[:2] == (2, 3)
    assert min(maps.shape[2:]) > 1
    assert torch.allclose(maps.mean((2, 3)) + tree["classifier.bias"], logits, rtol=1e-4, atol=1e-4)
    assert torch.allclose(network.linear(tree, "classifier", features), logits, rtol=1e-4, atol=1e-4)


GRAY = np.full((40, 40, 3), 100, np.uint8)


def test_the_heat_is_where_the_evidence_is() -> None:
    evidence = np.zeros((4, 4), np.float32)
    evidence[0, 3] = 2.0
    changed = np.abs(heat(GRAY, evidence).astype(int) - 100).sum(2)
    assert changed[5, 35] > 100
    assert changed[30, 5] == 0


def test_evidence_against_a_class_leaves_the_image_as_it_is() -> None:
    assert np.array_equal(heat(GRAY, np.full((4, 4), -3.0, np.float32)), GRAY)


def verdicts(*told: tuple[str, str, float]) -> list[Verdict]:
    return [
        Verdict(path=f"/{number}.png", digest=f"{number:064x}", label=label, verdict=verdict, confidence=confidence)
        for number, (label, verdict, confidence) in enumerate(told)
    ]


def test_the_wrong_ones_that_are_shown_are_the_surest_and_the_right_ones_are_of_every_class() -> None:
    judged = verdicts(
        ("a", "a", 0.9), ("a", "a", 0.5), ("a", "a", 0.7), ("a", "a", 0.8), ("b", "b", 0.4),
        ("a", "b", 0.6), ("b", "a", 0.99), ("b", "a", 0.5), ("a", "c", 0.7), ("a", "b", 0.3),
    )  # fmt: skip
    assert [verdict.confidence for verdict in _pick_wrong(judged)] == [0.99, 0.7, 0.6, 0.5]
    assert [(v.label, v.confidence) for v in _pick_right(judged)] == [("a", 0.9), ("b", 0.4), ("a", 0.5), ("a", 0.7)]
