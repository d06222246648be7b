"""Attacks on a model that a plant has trained: they tell what can be told,
and nothing where nothing is left.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from edge_node.extensions.audit import model_attacks
from edge_node.extensions.audit.contributions import observe
from edge_node.extensions.audit.exposure import Exposure, Found
from edge_node.extensions.audit.observation import Observation
from edge_node.extensions.audit.parts import Parts
from tests.support.audited_plant import drafted, striped
from trainer.data.class_folders import LabelledImages
from trainer.models.named_tensors import is_trainable
from trainer.models.network import Tensors

COUNTS = [6, 3, 0]


def parted(seed: int) -> Parts:
    return Parts(striped(COUNTS, seed), striped(COUNTS, seed + 100), striped([3, 3, 3], seed + 200))


def attacked(method: str, seed: int, **changes: Any) -> tuple[Observation, Found]:
    spec, broadcast = drafted(method, **changes)
    parts = parted(seed)
    seen = observe(spec, broadcast, parts.sent, seed, lambda: None)[-1]
    return seen, model_attacks.attack(seen, parts, seed, lambda: None)


def by_attack(found: Found) -> dict[str, Exposure]:
    return {each.attack: each for each in found.exposures}


@pytest.fixture(scope="module", params=[0, pytest.param(1, marks=pytest.mark.slow)])
def by_heart(request: pytest.FixtureRequest) -> dict[str, Exposure]:
    """Attacks on a model that can only have learnt its images by heart:
    their labels mean nothing.
    """

    def images(seed: int) -> LabelledImages:
        return striped([12, 0, 0], seed)._replace(labels=np.arange(12) % 2)

    training = {"local_epochs": 20, "augment": "false", "batch_size": 8, "learning_rate": 3e-3}
    spec, broadcast = drafted("fedavg", training=training)
    parts = Parts(
        images(request.param), images(request.param + 100), striped([3, 3, 3], request.param + 200)
    )
    (seen,) = observe(spec, broadcast, parts.sent, request.param, lambda: None)
    return by_attack(model_attacks.attack(seen, parts, request.param, lambda: None))


def test_biases_tell_which_classes_there_are(by_heart: dict[str, Exposure]) -> None:
    assert by_heart["biases that have grown"].value > 0.8
    assert by_heart["biases that have grown"].chance == pytest.approx(1 - (2 / 3) ** 3)


@pytest.mark.parametrize("attack", ["loss", "gradient", "moved features"])
def test_a_model_that_knows_its_images_by_heart_tells_which_they_were(
    attack: str, by_heart: dict[str, Exposure]
) -> None:
    assert by_heart[attack].value > 0.65


@pytest.mark.slow
def test_where_noise_hides_each_image_none_is_told() -> None:
    areas = [
        by_attack(
            attacked("fedavg", seed, privacy={"epsilon": "0.1"}, training={"batch_norm": "eval"})[1]
        )
        for seed in range(3)
    ]
    assert np.mean([each["loss"].value for each in areas]) < 0.7
    assert np.mean([each["gradient"].value for each in areas]) < 0.7


def test_where_no_classifier_leaves_no_attack_on_counts_is_claimed() -> None:
    _, found = attacked("afedcl", 0)
    assert {each.what for each in found.exposures} == {"membership", "pictures"}
    assert found.notes == ("no classifier leaves the plant, and no attack on counts was tried",)


def test_the_search_finds_images_whose_gradient_is_that_of_the_plants_image() -> None:
    """One plain gradient of one image, which nobody sends:
    the search must get near what it looks for.
    """
    spec, broadcast = drafted("fedavg", training={"batch_norm": "eval"})
    image = striped([1, 0, 0], 3)
    (seen,) = observe(spec, broadcast, image, 0, lambda: None)
    tensors = {
        name: value.clone().requires_grad_(is_trainable(name))
        for name, value in seen.received.items()
    }
    names = [name for name, value in tensors.items() if value.requires_grad]

    def gradient(pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mean, std = (
            torch.tensor(each)[:, None, None]
            for each in (spec.preprocessing.mean, spec.preprocessing.std)
        )
        network = seen.network.mapped()
        logits = network.linear(
            tensors, "classifier", network.encode(tensors, (pixels - mean) / std)
        )
        found = torch.autograd.grad(
            functional.cross_entropy(logits, labels), [tensors[name] for name in names]
        )
        return torch.cat([each.flatten() for each in found])

    pixels = torch.from_numpy(image.images).permute(0, 3, 1, 2) / 255
    wanted = gradient(pixels, torch.tensor([0]))
    update: Tensors = {}
    for name in names:
        size = tensors[name].numel()
        start = sum(tensors[each].numel() for each in names[: names.index(name)])
        update[name] = -wanted[start : start + size].view_as(tensors[name])
    blind = torch.full((3, 32, 32), 0.5)
    steps: list[int] = []
    made = torch.stack(
        model_attacks.search(seen, update, blind, 0, lambda: steps.append(1), is_gray=True)
    )
    assert len(steps) == model_attacks.STEPS

    def likeness(images: torch.Tensor) -> float:
        labels = torch.zeros(len(images), dtype=torch.int64)
        return float(functional.cosine_similarity(gradient(images, labels), wanted, dim=0))

    assert likeness(made) > max(0.7, likeness(blind[None]) + 0.2)
