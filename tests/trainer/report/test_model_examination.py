"""What a model's verdict hangs on, and the pictures made of it."""

import numpy as np
import pytest
import torch

from trainer.models import backbones
from trainer.models.fusion import LENGTH
from trainer.models.named_tensors import Arrays
from trainer.models.network import Network, to_tensors
from trainer.report.model_examination import (
    _pick_correct,
    _pick_wrong,
    occlusion_map,
    overlay_heatmap,
)
from trainer.training.personal_model import HeldOutPrediction


def personal(model: str, kind: str) -> tuple[Network, dict[str, torch.Tensor]]:
    network = Network(model, 3)
    random = np.random.default_rng(0)
    arrays: Arrays = {f"encoder.{name}": value for name, value in backbones.draw(model, 0).items()}
    arrays["classifier.weight"] = random.normal(size=(3, network.shape.features)).astype(np.float32)
    arrays["classifier.bias"] = random.normal(size=3).astype(np.float32)
    if kind == "normalised":
        arrays[LENGTH] = np.asarray(7.5, np.float32)
    if kind == "two encoders, fused":
        arrays |= {f"received.{name}": value for name, value in backbones.draw(model, 1).items()}
        arrays["fusion"] = np.asarray(0.3, np.float32)
    return network, to_tensors(arrays)


@pytest.mark.parametrize("kind", ["one encoder", "two encoders, fused", "normalised"])
@pytest.mark.parametrize("model", ["small", "mobilenet_v2", "efficientnet_lite0_mid", "resnet18"])
def test_logits_are_linear_in_what_a_personal_model_sees(model: str, kind: str) -> None:
    network, tensors = personal(model, kind)
    images = torch.randn((2, 3, 64, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features, logits = network.features(tensors, images), network.predict(tensors, images)
    assert torch.allclose(
        network.linear(tensors, "classifier", features), logits, rtol=1e-4, atol=1e-4
    )


class Corner:
    """A network whose first class is the brightness of the upper right corner,
    and whose second is nothing.
    """

    def predict(self, _: object, images: torch.Tensor) -> torch.Tensor:
        corner = images[:, 0, :8, -8:].mean((1, 2))
        return torch.stack([corner, torch.zeros_like(corner)], 1)


@pytest.mark.parametrize("label", [0, 1])
def test_what_a_verdict_hangs_on_is_where_hiding_hurts_it(label: int) -> None:
    image = torch.zeros(3, 48, 48)
    image[:, :8, -8:] = 1.0
    with torch.no_grad():
        found = occlusion_map(Corner(), {}, image, label)  # type: ignore[arg-type]
    assert found.shape == (6, 6)
    strongest = np.unravel_index(np.abs(found).argmax(), found.shape)
    assert strongest == (0, 5)
    assert (found[0, 5] > 0.2) == (label == 0)
    assert np.abs(found[3:, :3]).max() < 0.01


GRAY = np.full((40, 40, 3), 100, np.uint8)


def test_the_heat_is_where_the_evidence_is() -> None:
    evidence = np.zeros((4, 4), np.float32)
    evidence[0, 3] = 2.0
    changed = np.abs(overlay_heatmap(GRAY, evidence).astype(int) - 100).sum(2)
    assert changed[5, 35] > 100
    assert changed[30, 5] == 0


def test_evidence_against_a_class_leaves_the_image_as_it_is() -> None:
    assert np.array_equal(overlay_heatmap(GRAY, np.full((4, 4), -3.0, np.float32)), GRAY)


def verdicts(*told: tuple[str, str, float]) -> list[HeldOutPrediction]:
    return [
        HeldOutPrediction(
            path=f"/{number}.png",
            digest=f"{number:064x}",
            label=label,
            verdict=verdict,
            confidence=confidence,
        )
        for number, (label, verdict, confidence) in enumerate(told)
    ]


def test_the_wrong_ones_that_are_shown_are_the_surest_and_the_right_ones_of_every_class() -> None:
    judged = verdicts(
        ("a", "a", 0.9),
        ("a", "a", 0.5),
        ("a", "a", 0.7),
        ("a", "a", 0.8),
        ("b", "b", 0.4),
        ("a", "b", 0.6),
        ("b", "a", 0.99),
        ("b", "a", 0.5),
        ("a", "c", 0.7),
        ("a", "b", 0.3),
    )
    assert [verdict.confidence for verdict in _pick_wrong(judged)] == [0.99, 0.7, 0.6, 0.5]
    assert [(v.label, v.confidence) for v in _pick_correct(judged)] == [
        ("a", 0.9),
        ("b", 0.4),
        ("a", 0.5),
        ("a", 0.7),
    ]
