"""Private gradients: what one image can do is bounded, and noise is what the account is told."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from broker_config.protocol.messages import ImagePrivacy, Training
from trainer.data.training_set import TrainingSet
from trainer.methods.base import Batch, Encode, classification_loss, plain_phase
from trainer.models.initial_weights import init_linear, initial_encoder
from trainer.models.named_tensors import is_trainable
from trainer.models.network import Network, Tensors, to_tensors
from trainer.training.engine import run_phase
from trainer.training.private_gradients import PrivateGradients, _whole

SECRET, BASIS = "ab" * 32, "of a round"
NETWORK = Network("small", 3)
MAPPED = NETWORK.mapped()


def tensors() -> Tensors:
    encoder = initial_encoder("small", "none", 0)
    return to_tensors(
        {
            **encoder,
            **init_linear("classifier", NETWORK.shape.features, 3, np.random.default_rng(0)),
        }
    )


def images(count: int = 5, seed: int = 0) -> TrainingSet:
    random = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, 3, 16, 16), generator=random, dtype=torch.uint8)
    return TrainingSet(
        pixels, torch.arange(count) % 3, torch.full((3, 1, 1), 0.5), torch.full((3, 1, 1), 0.25)
    )


def encode(tensors: Tensors, inputs: Tensor, prefix: str = "encoder") -> Tensor:
    return MAPPED.encode(tensors, inputs, prefix=prefix)


def reader(data: TrainingSet) -> Callable[[slice], Batch]:
    return lambda part: Batch(data.network_input(part), data.labels[part], None, {})


def gradients(
    data: TrainingSet,
    privacy: ImagePrivacy,
    *,
    secret: str = SECRET,
    basis: str = BASIS,
    phase: str = "train",
) -> tuple[Tensors, dict[str, Tensor]]:
    moved = {name: value for name, value in tensors().items() if is_trainable(name)}
    private = PrivateGradients(privacy, secret, basis, phase)
    return private.compute(
        classification_loss, NETWORK, tensors(), moved, encode, len(data.labels), reader(data)
    )


def flat(found: Tensors) -> Tensor:
    return torch.cat([found[name].double().flatten() for name in sorted(found)])


LOUD, SILENT = ImagePrivacy(clip=1e3, noise=0.0), ImagePrivacy(clip=0.01, noise=0.0)


def test_without_a_bound_and_noise_it_is_the_ordinary_gradient() -> None:
    data, own = (
        images(11),
        {name: value.requires_grad_() for name, value in tensors().items() if is_trainable(name)},
    )
    found, reported = gradients(data, LOUD)
    loss, _ = classification_loss(NETWORK, {**tensors(), **own}, reader(data)(slice(None)), encode)
    loss.backward()
    for name, value in own.items():
        assert value.grad is not None
        torch.testing.assert_close(found[name], value.grad, rtol=1e-3, atol=1e-5)
    assert float(reported["L_C"]) == pytest.approx(float(loss.detach()), rel=1e-5)


@pytest.mark.parametrize("clip", [1.0, 0.01])
def test_an_image_that_is_replaced_moves_the_sum_by_twice_the_clip_at_most(clip: float) -> None:
    data = images(5)
    for seed in range(6):
        changed = data.images.clone()
        changed[2] = images(1, 100 + seed).images[0]
        labels = data.labels.clone()
        labels[2] = seed % 3
        replaced = data._replace(images=changed, labels=labels)
        one, other = (gradients(each, ImagePrivacy(clip=clip)) for each in (data, replaced))
        assert (flat(one[0]) - flat(other[0])).norm() * 5 <= 2 * clip


def test_each_image_has_its_part_of_the_clip() -> None:
    """All gradients here are longer: the sum of one image's is as long as the clip."""
    found, _ = gradients(images(1), SILENT)
    assert float(flat(found).norm()) == pytest.approx(0.01, rel=1e-3)
    assert flat(found).norm() <= 0.01


def test_noise_has_the_deviation_that_the_account_is_told() -> None:
    """In lengths of the clip, of the sum over images: the gradient is its mean."""
    for count in (3, 7):
        bare, noisy = (
            gradients(images(count), ImagePrivacy(clip=0.5, noise=noise))[0] for noise in (0.0, 4.0)
        )
        drawn = (flat(noisy) - flat(bare)) * count
        assert float(drawn.std()) == pytest.approx(4.0 * 0.5, rel=0.02)
        assert abs(float(drawn.mean())) < 0.1
        assert float((drawn.abs() > 4).double().mean()) == pytest.approx(0.0455, rel=0.15)


def test_noise_is_whole_steps_added_to_whole_steps() -> None:
    """So what it does to the last digits tells nothing of what it was added to."""
    private = PrivateGradients(ImagePrivacy(clip=0.5, noise=4.0), SECRET, BASIS, "train")
    noisy = private._add_noise({"w": torch.arange(1000, dtype=torch.float64)})["w"]
    assert torch.equal(noisy, noisy.round())
    assert float(noisy.std()) == pytest.approx(4.0 * 2**28, rel=0.1)
    gradient = {"w": torch.linspace(-1, 1, 12).view(3, 4)}
    assert torch.equal(_whole(gradient, 0.5)["w"], _whole(gradient, 0.5)["w"].round())


def test_a_step_made_again_is_the_same_to_the_byte_and_others_have_their_own_noise() -> None:
    privacy = ImagePrivacy(clip=0.5, noise=4.0)
    first = flat(gradients(images(), privacy)[0])
    assert torch.equal(first, flat(gradients(images(), privacy)[0]))
    changed = images()
    changed.images[0, 0, 0, 0] ^= 1
    for other in (
        gradients(images(), privacy, secret="cd" * 32),
        gradients(images(), privacy, basis="of another round"),
        gradients(images(), privacy, phase="another"),
        gradients(changed, privacy),
    ):
        assert float((first - flat(other[0])).std()) == pytest.approx(
            4.0 * 0.5 / 5 * 2**0.5, rel=0.03
        )


def test_steps_of_a_phase_have_noise_of_their_own() -> None:
    private, data = (
        PrivateGradients(ImagePrivacy(clip=1e-6, noise=1e6), SECRET, BASIS, "train"),
        images(),
    )
    moved = {name: value for name, value in tensors().items() if is_trainable(name)}
    one, other = (
        flat(
            private.compute(
                classification_loss, NETWORK, tensors(), moved, encode, 5, reader(data)
            )[0]
        )
        for _ in range(2)
    )
    assert abs(float(np.corrcoef(one, other)[0, 1])) < 0.05


def test_an_image_whose_gradient_is_not_finite_counts_as_none() -> None:
    def broken(
        network: Network, tensors: Tensors, batch: Batch, encode: Encode
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, reported = classification_loss(network, tensors, batch, encode)
        return torch.where(batch.labels[0] == 0, torch.inf, 1.0) * loss, reported

    data = images(3)  # of which the first is broken
    moved = {name: value for name, value in tensors().items() if is_trainable(name)}
    found, _ = PrivateGradients(SILENT, SECRET, BASIS, "train").compute(
        broken, NETWORK, tensors(), moved, encode, 3, reader(data)
    )
    rest = data._replace(images=data.images[1:], labels=data.labels[1:])
    torch.testing.assert_close(
        flat(found) * 3, flat(gradients(rest, SILENT)[0]) * 2, rtol=1e-6, atol=1e-9
    )


def test_a_phase_takes_one_step_an_epoch_that_sees_all_images() -> None:
    seen: list[int] = []

    def counting(
        network: Network, tensors: Tensors, batch: Batch, encode: Encode
    ) -> tuple[Tensor, dict[str, Tensor]]:
        seen.append(len(batch.labels))
        return classification_loss(network, tensors, batch, encode)

    training = Training(local_epochs=3, batch_size=4, batch_norm="eval")
    private = PrivateGradients(ImagePrivacy(clip=1.0, noise=1.0), SECRET, BASIS, "train")
    phase = plain_phase(training, loss=counting)
    _, moments, _ = run_phase(
        NETWORK, phase, tensors(), {}, {}, images(19), training, 0, private=private
    )
    assert float(moments["classifier.bias/step"]) == 3
    assert len(seen) == 3 * 3, "19 images, some at a time"
