"""Small simulated VFL runs on random products."""

from typing import Literal

import torch
from torch import Tensor, nn

from edge_node.extensions.vfl.messages import Channel, Denoising, Privacy, Recipe, VflSpec, Window
from edge_node.extensions.vfl.simulation import Simulation, Stream

CLASSES = 5
SHAPES = {"conv": (6, 15), "dense": (4, 1), "vgg_small": (3, 8, 8)}


def simulation(
    network: str = "dense",
    sensors: int = 2,
    seed: int = 0,
    *,
    window: Window = Window(start=40, chunk=10, size=40),  # noqa: B008
    labels: Literal["shared", "server"] = "shared",
    channel: Channel = Channel(),  # noqa: B008
    denoising: Denoising = Denoising(),  # noqa: B008
    recipe: Recipe = Recipe(eta=0.1),  # noqa: B008
    privacy: Privacy = Privacy(),  # noqa: B008
    head_iterations: int = 0,
    products: int = 500,
) -> Simulation:
    spec = VflSpec(
        federation="plant",
        run="0" * 16,
        software="",
        sensors=tuple(f"s{index}" for index in range(sensors)),
        network=network,
        classes=tuple(map(str, range(CLASSES))),
        labels=labels,
        window=window,
        channel=channel,
        denoising=denoising,
        recipe=recipe,
        privacy=privacy,
        head_iterations=head_iterations,
        seed=seed,
    )
    random = torch.Generator().manual_seed(seed)
    truth = torch.randint(0, CLASSES, (products,), generator=random)
    shape = (products, *SHAPES[network])
    level = truth.reshape(-1, *[1] * (len(shape) - 1)) / CLASSES
    samples = tuple(
        torch.randn(shape, generator=random) / 2 + level * (index + 1) for index in range(sensors)
    )
    return Simulation(spec, Stream(samples, truth))


def parameters(run: Simulation) -> list[Tensor]:
    return [value for model in models(run) for value in model.parameters()]


def models(run: Simulation) -> list[nn.Module]:
    return [*(sensor.model for sensor in run.sensors), run.head.model]


def values(run: Simulation) -> list[Tensor]:
    return [value.detach().clone() for value in parameters(run)]
