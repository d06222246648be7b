"""What the engine's passes over many images promise."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from broker_config.protocol.messages import Preprocessing, Training
from trainer.data.class_folders import LabelledImages
from trainer.data.training_set import TrainingSet, encode_all
from trainer.methods.base import Batch, Encode, Phase, Step
from trainer.models.initial_weights import initial_encoder
from trainer.models.network import Network, Tensors, to_tensors
from trainer.training.engine import run_phase


class Watched(Network):
    """A network that writes down how many images it is given at once."""

    def __init__(self) -> None:
        super().__init__("small", 2)
        self.given: list[int] = []

    def encode(self, tensors: Tensors, inputs: Tensor, **how: Any) -> Tensor:
        self.given.append(len(inputs))
        return super().encode(tensors, inputs, **how)


@pytest.mark.parametrize(
    ("count", "size", "batches"),
    [
        (1, 64, [1]),
        (64, 64, [64]),
        (65, 64, [32, 33]),  # not 64 and 1
        (33, 128, [11, 11, 11]),
        (2, 640, [1, 1]),  # one of them is more than a batch should have
    ],
)
def test_features_are_those_of_each_image_and_larger_images_come_in_smaller_batches(
    count: int, size: int, batches: list[int]
) -> None:
    random = np.random.default_rng(count)
    pixels = random.integers(0, 256, (count, size, size, 3), np.uint8)
    images = LabelledImages(pixels, np.zeros(count, int), ("",) * count, ())
    data = TrainingSet.of(
        images, Preprocessing(size=size, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    )
    network, tensors = Watched(), to_tensors(initial_encoder("small", "none", count))
    found = encode_all(network, tensors, data)
    assert network.given == batches
    with torch.no_grad():
        alone = [
            network.encode(tensors, data.network_input(slice(k, k + 1)))[0].numpy()
            for k in range(count)
        ]
    np.testing.assert_allclose(found, alone, rtol=1e-4, atol=1e-5)


def test_sgd_has_momentum_and_weight_decay_and_begins_at_rest() -> None:
    """By hand, for a loss whose gradient is the tensor itself."""

    def squares(
        network: Network, tensors: Tensors, batch: Batch, encode: Encode
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss = tensors["classifier.weight"].square().sum() / 2
        return loss, {"L_C": loss}

    data = TrainingSet.of(
        LabelledImages(np.zeros((4, 16, 16, 3), np.uint8), np.zeros(4, int), ("",) * 4, ()),
        Preprocessing(size=16),
    )
    phase = Phase("train", (Step(("classifier",), squares),), epochs=3)
    training = Training(learning_rate=0.1, optimizer="sgd", augment=False)
    value = 2.0
    for _ in range(2):  # rounds
        tensors, moments, _ = run_phase(
            Network("small", 2),
            phase,
            {"classifier.weight": torch.tensor(value)},
            {},
            {},
            data,
            training,
            seed=1,
        )
        speed = 0.0
        for _ in range(3):
            speed = 0.9 * speed + value * (1 + 1e-4)
            value = value - 0.1 * speed
        assert float(tensors["classifier.weight"]) == pytest.approx(value, rel=1e-6)
        assert moments == {}
