"""Vertical federated learning against one autograd graph over all parties (paper, Algorithm 1, eqs.

1, 4, 5 and 7).
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from broker_config.protocol.errors import EdgeNodeError, UsageError
from edge_node.extensions.vfl.algorithm import Head, Representation, Sensor
from edge_node.extensions.vfl.messages import Channel, Denoising, Recipe, Window
from edge_node.extensions.vfl.networks import HEAD, build_feature_model, embedding_size
from edge_node.extensions.vfl.simulation import Simulation, release, simulate
from tests.support.vfl_simulation import CLASSES, parameters, simulation, values

NOISY = Channel(levels=3, sigma=0.1, loss=0.1)


def joint_loss(simulation: Simulation, first: int, last: int) -> Tensor:
    """Eq. 1: one graph over all parties."""
    embeddings = [
        sensor.model(x[first:last])
        for sensor, x in zip(simulation.sensors, simulation.stream.samples, strict=True)
    ]
    return nn.functional.cross_entropy(
        simulation.head.model(torch.cat(embeddings, 1)), simulation.stream.labels[first:last]
    )


def close(ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float = 1e-6) -> bool:
    return all(
        torch.allclose(*pair, rtol=0, atol=tolerance) for pair in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("network", "sensors"), [("dense", 2), ("dense", 4), ("conv", 3), ("vgg_small", 2)]
)
def test_on_a_clean_channel_rounds_of_one_iteration_are_steps_of_joint_gradient_descent(
    network: str, sensors: int, seed: int
) -> None:
    ours, theirs = simulation(network, sensors, seed), simulation(network, sensors, seed)
    for round_ in (1, 2, 3):  # models are carried over, and the window moves on
        closed = ours.step([1] * sensors)
        loss = joint_loss(theirs, 10 * (round_ - 1), 40 + 10 * (round_ - 1))
        gradients = torch.autograd.grad(loss, parameters(theirs))
        with torch.no_grad():
            for value, gradient in zip(parameters(theirs), gradients, strict=True):
                value.sub_(gradient, alpha=0.1)
        assert closed.loss == pytest.approx(loss.item(), rel=1e-6)
    assert close(values(ours), values(theirs))
    assert not close(values(ours), values(simulation(network, sensors, seed)), 1e-4)


@pytest.mark.parametrize("channel", [NOISY, Channel(levels=2), Channel(sigma=1.0)])
@pytest.mark.parametrize(("network", "sensors"), [("dense", 3), ("conv", 2)])
@pytest.mark.parametrize("head_iterations", [0, 1])
def test_others_are_constants_as_received_and_denoised_and_a_sensors_own_embedding_is_as_now(
    network: str, sensors: int, channel: Channel, head_iterations: int
) -> None:
    """Eq. 5, for sensors that take different numbers of iterations, and for the head."""
    denoising, iterations = Denoising(rounds=2, epochs=5), list(range(1, sensors + 1))
    ours, theirs = (
        simulation(
            network,
            sensors,
            3,
            channel=channel,
            denoising=denoising,
            head_iterations=head_iterations,
        )
        for _ in range(2)
    )
    for each in (ours, theirs):
        list(simulate(each, 3, lambda _: iterations))
    first, last = ours.spec.window.span(4)
    samples, labels = (
        [x[first:last] for x in theirs.stream.samples],
        theirs.stream.labels[first:last],
    )
    noisy = [
        release(theirs.spec, sensor, x, 4).received
        for sensor, x in zip(theirs.sensors, samples, strict=True)
    ]
    held = theirs.head.denoiser(noisy)
    head = [value.detach().clone() for value in theirs.head.model.parameters()]
    ours.step(iterations)
    for index, sensor in enumerate(theirs.sensors):
        mine = list(sensor.model.parameters())
        for _ in range(iterations[index]):
            parts = [*held[:index], sensor.model(samples[index]), *held[index + 1 :]]
            loss = nn.functional.cross_entropy(
                nn.functional.linear(torch.cat(parts, 1), *head), labels
            )
            descend(mine, loss)
    for _ in range(head_iterations or max(iterations)):
        descend(
            list(theirs.head.model.parameters()),
            nn.functional.cross_entropy(theirs.head.model(torch.cat(held, 1)), labels),
        )
    assert close(values(ours), values(theirs))


def descend(mine: list[Tensor], loss: Tensor) -> None:
    gradients = torch.autograd.grad(loss, mine)
    with torch.no_grad():
        for value, gradient in zip(mine, gradients, strict=True):
            value.sub_(gradient, alpha=0.1)


def test_with_batches_an_iteration_takes_every_sample_once_in_an_order_of_its_own() -> None:
    sensor, seen = Sensor(0, "s", "dense", (4, 1), Recipe(batches=4), 0), []
    samples = torch.randn(50, 4, 1)
    sensor.model.register_forward_hook(lambda _, given, __: seen.append(given[0]))
    phi = Representation(
        {"weight": torch.randn(CLASSES, 16), "bias": torch.zeros(CLASSES)}, (torch.zeros(50, 16),)
    )
    _, steps = sensor.train(samples, torch.zeros(50, dtype=torch.long), phi, 2, 1)
    assert [len(part) for part in seen] == [13, 13, 12, 12] * 2
    assert steps == 8
    rows = [torch.cat(part).flatten(1) for part in (seen[:4], seen[4:])]
    for each in rows:
        assert torch.equal(
            each[each[:, 0].argsort()], samples.flatten(1)[samples.flatten(1)[:, 0].argsort()]
        )
    assert not torch.equal(*rows)


def test_the_same_federation_ends_with_the_same_bytes_and_another_seed_with_others() -> None:
    def played(seed: int) -> list[Tensor]:
        made = simulation(
            seed=seed, channel=NOISY, denoising=Denoising(rounds=2), recipe=Recipe(batches=3)
        )
        list(simulate(made, 4, lambda _: (1, 2)))
        return values(made)

    assert all(map(torch.equal, played(0), played(0)))
    assert not close(played(0), played(1), 1e-3)


# Where labels stay at the head.


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("network", ["dense", "conv"])
def test_without_labels_the_first_full_step_is_that_with_labels_if_the_channel_is_clean(
    network: str, seed: int
) -> None:
    with_labels, without = (
        simulation(network, 3, seed),
        simulation(network, 3, seed, labels="server"),
    )
    for each in (with_labels, without):
        each.step((1, 1, 1))
    assert close(values(with_labels), values(without))


@pytest.mark.parametrize("seed", range(4))
def test_the_quadratic_lies_above_the_loss_wherever_an_embedding_moves(seed: int) -> None:
    """Weights from small to large, and moves of all lengths; one sensor moves, as in a round."""
    random = torch.Generator().manual_seed(seed)
    scale = 10.0 ** (seed - 2)
    head = {
        "weight": scale * torch.randn(CLASSES, 12, generator=random),
        "bias": torch.zeros(CLASSES),
    }
    phi = Representation(head, tuple(torch.randn(200, 4, generator=random) for _ in range(3)))
    labels = torch.randint(0, CLASSES, (200,), generator=random)
    before = losses(phi, labels)
    for index, (gradient, curvature) in enumerate(
        zip(Head.gradients(phi, labels), Head.curvatures(phi), strict=True)
    ):
        for length in (0.01, 0.1, 1, 10, 100):
            move = length * torch.randn(200, 4, generator=random)
            moved = list(phi.embeddings)
            moved[index] = moved[index] + move
            bound = before + (gradient * move).sum(1) + curvature / 2 * move.square().sum(1)
            assert (
                losses(Representation(head, tuple(moved)), labels)
                <= bound + 1e-5 * (1 + bound.abs())
            ).all()


def test_no_smaller_curvature_would_do() -> None:
    """Two classes that are equally likely: the loss is curved as much as the bound says,
    whatever they share.
    """
    head = {"weight": torch.tensor([[3.0, 0.0], [1.0, 0.0]]), "bias": torch.zeros(2)}
    (curvature,) = Head.curvatures(Representation(head, (torch.zeros(1, 2),)))
    step, labels = 1e-2, torch.tensor([0])
    left, middle, right = (
        losses(Representation(head, (torch.tensor([[x, 0.0]], dtype=torch.float64),)), labels)
        for x in (-step, 0, step)
    )
    assert curvature == pytest.approx(((left - 2 * middle + right) / step**2).item(), rel=1e-3)


def losses(phi: Representation, labels: Tensor) -> Tensor:
    features = torch.cat(phi.embeddings, 1)
    logits = nn.functional.linear(
        features, phi.head["weight"].to(features), phi.head["bias"].to(features)
    )
    return nn.functional.cross_entropy(logits, labels, reduction="none")


def test_without_labels_a_sensor_descends_that_quadratic() -> None:
    ours, theirs = (Sensor(0, "s", "dense", (4, 1), Recipe(eta=0.1), 0) for _ in range(2))
    samples, gradient = torch.randn(30, 4, 1), torch.randn(30, 16)
    start = theirs.embed(samples)
    ours.train_on_gradients(samples, gradient, 3.0, 4, 1)
    for _ in range(4):
        moved = theirs.model(samples) - start
        quadratic = (gradient * moved).sum(1) + 3.0 / 2 * moved.square().sum(1)
        descend(list(theirs.model.parameters()), quadratic.mean())
    assert close(list(ours.model.parameters()), list(theirs.model.parameters()))


@pytest.mark.parametrize("seed", range(3))
def test_without_labels_every_full_step_lowers_the_quadratic_and_the_loss_stays_below_it(
    seed: int,
) -> None:
    made = simulation("conv", 2, seed, labels="server", recipe=Recipe(eta=0.02))
    sensor, samples, labels = made.sensors[0], made.stream.samples[0][:40], made.stream.labels[:40]
    start = [each.embed(x[:40]) for each, x in zip(made.sensors, made.stream.samples, strict=True)]
    phi = made.head.represent(start)
    gradient, curvature = made.head.gradients(phi, labels)[0], made.head.curvatures(phi)[0]
    first = {name: value.clone() for name, value in sensor.model.state_dict().items()}
    truth, bounds = [losses(phi, labels).mean().item()], [losses(phi, labels).mean().item()]
    for iterations in range(1, 20):
        sensor.model.load_state_dict(first)
        sensor.train_on_gradients(samples, gradient, curvature, iterations, 1)
        moved = sensor.embed(samples) - start[0]
        bounds.append(bounds[0] + ((gradient + curvature / 2 * moved) * moved).sum(1).mean().item())
        truth.append(
            losses(Representation(phi.head, (sensor.embed(samples), start[1])), labels)
            .mean()
            .item()
        )
    assert all(after < before for before, after in pairwise(bounds))
    assert all(loss <= bound + 1e-6 for loss, bound in zip(truth, bounds, strict=True))
    assert truth[-1] < truth[0]


@pytest.mark.slow
@pytest.mark.parametrize("channel", [Channel(), Channel(levels=3), NOISY])
def test_without_labels_nothing_diverges_where_a_linear_function_did(channel: Channel) -> None:
    made = simulation(
        "conv",
        labels="server",
        channel=channel,
        denoising=Denoising(rounds=3 if channel.levels else 0),
        recipe=Recipe(eta=0.05, batches=5),
    )
    closed = list(simulate(made, 40, lambda _: (2, 2)))
    assert all(np.isfinite(each.loss) for each in closed)
    assert np.mean([each.loss for each in closed[-5:]]) < closed[0].loss - 0.1


# What cannot go on.


def test_training_that_diverges_names_the_sensor() -> None:
    made = simulation("conv", recipe=Recipe(eta=1e6))
    with pytest.raises(EdgeNodeError, match=r"of s\d .*diverged"):
        list(simulate(made, 20, lambda _: (2, 2)))


def test_training_that_diverges_names_the_head() -> None:
    head = Head([2], CLASSES, Denoising(), Recipe(eta=1e6), 0)
    phi = head.represent([1e30 * torch.ones(4, 2)])
    with pytest.raises(EdgeNodeError, match=r"head.*diverged"):
        head.train(phi, torch.zeros(4, dtype=torch.long), 5, 1)


def test_samples_that_are_no_numbers_do_not_leave_a_sensor() -> None:
    sensor = Sensor(0, "press", "dense", (4, 1), Recipe(), 0)
    with pytest.raises(EdgeNodeError, match=r"press.*diverged"):
        sensor.embed(torch.full((3, 4, 1), float("nan")))


def test_a_window_that_is_too_short_for_convolutions_and_an_unknown_network_are_refused() -> None:
    assert embedding_size("conv", (6, 15)) == 28
    assert embedding_size("conv", (6, 9)) == 14
    assert embedding_size("dense", (10_000, 10_000)) == 16, (
        "13 GB as a model; a sensor may say that it has such columns"
    )
    with pytest.raises(UsageError, match="too short"):
        build_feature_model("conv", (6, 8), 0, "s")
    with pytest.raises(UsageError, match="feature model"):
        build_feature_model("convolution", (6, 8), 0, "s")


def test_images_keep_their_differences_through_the_papers_thirteen_convolutions() -> None:
    with torch.no_grad():
        embeddings = build_feature_model("vgg13", (3, 16, 16), 0, "s")(torch.rand(4, 3, 16, 16))
    assert embeddings.shape == (4, 4096)
    assert embeddings.std(0).mean() > 0.01 * embeddings.abs().mean() > 0.001


def test_first_values_hang_on_seed_and_party_alone() -> None:
    def first(seed: int, name: str) -> Tensor:
        return next(build_feature_model("dense", (4, 1), seed, name).parameters())

    torch.manual_seed(1)
    once = first(0, "press")
    torch.manual_seed(2)
    assert torch.equal(once, first(0, "press"))
    assert not torch.equal(once, first(1, "press"))
    assert not torch.equal(once, first(0, "oven"))
    assert HEAD == "head"


# Windows.


@given(st.integers(1, 50), st.integers(1, 20), st.integers(0, 80), st.integers(1, 30))
def test_the_window_holds_the_newest_products_of_all_that_have_come(
    start: int, chunk: int, size: int, round_: int
) -> None:
    arrived = list(range(start))
    for _ in range(1, round_):
        arrived += range(len(arrived), len(arrived) + chunk)
    first, last = Window(start=start, chunk=chunk, size=size).span(round_)
    assert list(range(first, last)) == (arrived[-size:] if size else arrived)
