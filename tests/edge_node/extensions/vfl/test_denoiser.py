"""Denoising autoencoders (paper IV-2, eq. 3), and what they can learn without clean embeddings."""

import copy
from functools import cache
from itertools import pairwise
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edge_node.extensions.vfl.channel_noise import measure_extent, transmit
from edge_node.extensions.vfl.denoiser import Denoiser
from edge_node.extensions.vfl.messages import Channel, Denoising, Privacy
from edge_node.extensions.vfl.privacy import protect
from edge_node.extensions.vfl.simulation import release, simulate
from tests.support.vfl_simulation import simulation, values

SIZE = 28
ROUNDS = 25  # of 20 steps each
DITHERED = Channel(levels=3, dither=True)


def embeddings(seed: int, products: int = 200) -> Tensor:
    """They lie near a curve, as embeddings of a state of wear do."""
    random = np.random.default_rng(seed)
    directions = random.normal(size=(3, SIZE))
    state = random.uniform(0, 1, (products, 1))
    curve = np.concatenate([state, np.sin(3 * state), state**2], 1) @ directions
    return torch.from_numpy(np.maximum(0, curve).astype(np.float32))


def arrives(channel: Channel, clean: Tensor, seed: int) -> Tensor:
    return torch.from_numpy(
        transmit(channel, clean.numpy(), np.random.default_rng(seed), measure_extent(clean.numpy()))
    )


def error(made: Tensor, clean: Tensor) -> float:
    """Mean square, as a share of the embeddings' variance."""
    return ((made - clean).square().mean() / clean.var(0).mean()).item()


@cache
def learnt(channel: Channel, target: Literal["clean", "noisy"], seed: int) -> tuple[float, float]:
    """Error as received and after denoising, with noise that is new."""
    denoiser, clean = (
        Denoiser(Denoising(rounds=ROUNDS, target=target), [SIZE], seed),
        embeddings(seed),
    )
    for round_ in range(ROUNDS):
        noisy = arrives(channel, clean, 1000 + round_)
        denoiser.train(
            [noisy], [clean if target == "clean" else arrives(channel, clean, 2000 + round_)]
        )
    noisy = arrives(channel, clean, 1)
    return error(noisy, clean), error(denoiser([noisy])[0], clean)


def own_units(model: nn.Module, noisy: Tensor, clean: Tensor) -> Tensor:
    return model((noisy - noisy.mean()) / noisy.std()) * clean.std() + clean.mean()


def test_a_round_descends_eq_3_over_all_pairs_with_adam() -> None:
    ours = Denoiser(Denoising(rounds=1, epochs=3, shared=False), [SIZE, SIZE], 0)
    theirs = copy.deepcopy(ours.module)
    optimiser = torch.optim.Adam(theirs.parameters(), 1e-2)
    clean = [embeddings(1), embeddings(2)]
    noisy = [arrives(Channel(levels=3), each, 1) for each in clean]
    for _ in range(3):
        optimiser.zero_grad()
        loss = (
            sum(
                (own_units(theirs[str(k)], noisy[k], clean[k]) - clean[k]).square().mean()
                for k in range(2)
            )
            / 2
        )
        loss.backward()
        optimiser.step()
    assert ours.train(noisy, clean) == pytest.approx(loss.item(), rel=1e-5)
    assert all(
        torch.allclose(*pair, atol=1e-6)
        for pair in zip(ours.module.parameters(), theirs.parameters(), strict=True)
    )


def test_there_are_three_layers_each_way_and_the_papers_bottleneck() -> None:
    def widths(size: int, bottleneck: int = 0) -> list[int]:
        (model,) = Denoiser(Denoising(rounds=1, bottleneck=bottleneck), [size], 0).module.values()
        layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
        return [layers[0].in_features, *(layer.out_features for layer in layers)]

    assert widths(28) == [28, 13, 6, 3, 6, 13, 28]
    assert widths(4096) == [4096, 2048, 1024, 512, 1024, 2048, 4096]
    assert widths(16, bottleneck=4)[3] == 4


def test_one_autoencoder_serves_all_sensors_of_a_size_or_each_has_its_own() -> None:
    one, each = (
        Denoiser(Denoising(rounds=1, shared=shared), [28, 28, 16], 0) for shared in (True, False)
    )
    assert (len(one.module), len(each.module)) == (2, 3)
    clean = [embeddings(1), embeddings(2), embeddings(3)[:, :16]]
    for denoiser in (one, each):
        assert all(map(torch.equal, denoiser(clean), clean))  # nothing learnt yet: as received
        assert denoiser.plain_layers(0) is None
        denoiser.train(clean, clean)
    assert torch.equal(one.plain_layers(0)[2].weight, one.plain_layers(1)[2].weight)
    assert not torch.equal(each.plain_layers(0)[2].weight, each.plain_layers(1)[2].weight)


def test_what_is_exported_does_what_the_denoiser_does_to_each_sensors_embeddings() -> None:
    denoiser = Denoiser(Denoising(rounds=1), [SIZE, SIZE], 0)
    noisy, clean = [embeddings(1), 100 - 7 * embeddings(2)], [embeddings(1), embeddings(3)]
    denoiser.train(noisy, clean)
    for sensor, denoised in enumerate(denoiser(noisy)):
        assert torch.allclose(
            denoiser.plain_layers(sensor)(noisy[sensor]), denoised, rtol=1e-4, atol=1e-4
        )


def test_embeddings_of_any_scale_are_denoised_alike() -> None:
    clean = embeddings(1)
    noisy = arrives(Channel(levels=3), clean, 1)
    small, large = (Denoiser(Denoising(rounds=1), [SIZE], 0) for _ in range(2))
    small.train([noisy], [clean])
    large.train([1000 * noisy + 50], [1000 * clean + 50])
    denoised = (large([1000 * noisy + 50])[0] - 50) / 1000
    assert error(denoised, small([noisy])[0]) < 0.01


def test_after_its_rounds_it_is_frozen_and_sensors_send_one_copy() -> None:
    made = simulation("conv", channel=Channel(levels=3), denoising=Denoising(rounds=3))
    states = []
    for _ in simulate(made, 5, lambda _: (1, 1)):
        states.append({name: value.clone() for name, value in made.head.denoiser.state().items()})
    same = [
        all(torch.equal(before[name], after[name]) for name in before)
        for before, after in pairwise(states)
    ]
    assert same == [False, False, True, True]
    samples = made.stream.samples[0][:20]
    clean = made.sensors[0].embed(samples)
    second = release(made.spec, made.sensors[0], samples, 3).second
    assert second is not None
    assert torch.equal(second, clean)
    assert release(made.spec, made.sensors[0], samples, 4).second is None


def test_a_federation_that_comes_back_from_a_checkpoint_ends_with_the_same_bytes() -> None:
    first, second = (
        simulation("conv", channel=Channel(levels=3), denoising=Denoising(rounds=5))
        for _ in range(2)
    )
    list(simulate(first, 3, lambda _: (1, 2)))
    saved = {name: value.clone() for name, value in first.head.denoiser.state().items()}
    second.head.denoiser.restore(saved)
    second.round = first.round
    for ours, theirs in zip(
        [*second.sensors, second.head], [*first.sensors, first.head], strict=True
    ):
        ours.model.load_state_dict(theirs.model.state_dict())
    for each in (first, second):
        list(simulate(each, 4, lambda _: (1, 2)))
    assert all(map(torch.equal, values(first), values(second)))
    assert all(
        torch.equal(value, second.head.denoiser.state()[n])
        for n, value in first.head.denoiser.state().items()
    )


def test_it_can_go_back_to_before_it_had_learnt_anything() -> None:
    denoiser, clean = Denoiser(Denoising(rounds=2), [SIZE], 0), [embeddings(1)]
    start = {name: value.clone() for name, value in denoiser.state().items()}
    once = denoiser.train(clean, clean)
    denoiser.restore(start)
    assert torch.equal(denoiser(clean)[0], clean[0])
    assert denoiser.train(clean, clean) == once


# What it learns.


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("channel", [Channel(levels=3), DITHERED, Channel(sigma=1.0)])
def test_with_clean_embeddings_most_of_the_noise_goes(channel: Channel, seed: int) -> None:
    received, denoised = learnt(channel, "clean", seed)
    assert denoised < received / 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("channel", [DITHERED, Channel(sigma=1.0)])
def test_without_clean_embeddings_as_well_where_the_noise_has_mean_zero(
    channel: Channel, seed: int
) -> None:
    received, denoised = learnt(channel, "noisy", seed)
    assert denoised < received / 2
    assert denoised < learnt(channel, "clean", seed)[1] + 0.1


def test_two_copies_behind_a_quantiser_without_dither_teach_nothing() -> None:
    """They are the same, so that what is learnt is to give the noisy embedding back."""
    channel, clean = Channel(levels=3), embeddings(0)
    assert torch.equal(arrives(channel, clean, 1), arrives(channel, clean, 2))
    assert learnt(channel, "noisy", 0)[1] > 2 * learnt(channel, "clean", 0)[1]


def test_lost_copies_do_not_draw_the_rest_to_zero() -> None:
    """With a third lost, the mean of what arrives is two thirds of the embedding."""
    channel, clean = Channel(sigma=0.2, loss=0.33), embeddings(0)
    denoiser = Denoiser(Denoising(rounds=ROUNDS, target="noisy"), [SIZE], 0)
    for round_ in range(ROUNDS):
        denoiser.train([arrives(channel, clean, round_)], [arrives(channel, clean, 1000 + round_)])
    noisy = arrives(Channel(sigma=0.2), clean, 5000)
    assert (denoiser([noisy])[0].mean() / clean.mean()).item() == pytest.approx(1, abs=0.05)


def test_a_round_whose_second_copies_are_all_lost_breaks_nothing() -> None:
    denoiser, clean = Denoiser(Denoising(rounds=1, target="noisy"), [SIZE], 0), embeddings(0)
    assert denoiser.train([clean], [torch.zeros_like(clean)]) == 0
    assert denoiser([clean])[0].isfinite().all()


def test_the_noise_of_protection_goes_too_if_the_copies_have_noise_of_their_own() -> None:
    privacy, clean, secret = (
        Privacy(clip=2, multiplier=0.3),
        embeddings(0).numpy(),
        b"0123456789abcdef",
    )
    cut = torch.from_numpy(clean * np.minimum(1, 2 / np.linalg.norm(clean, axis=1, keepdims=True)))
    denoiser = Denoiser(Denoising(rounds=ROUNDS, target="noisy"), [SIZE], 0)
    for round_ in range(ROUNDS):
        key = secret + bytes([round_])
        copies = [torch.from_numpy(protect(privacy, clean, key, number)) for number in (0, 1)]
        denoiser.train(copies[:1], copies[1:])
    noisy = torch.from_numpy(protect(privacy, clean, b"another secret!!"))
    assert error(denoiser([noisy])[0], cut) < error(noisy, cut) / 4
