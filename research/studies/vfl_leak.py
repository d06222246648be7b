"""Leakage between sensors and head: samples from embeddings, labels from gradients.

    python -m research.studies.vfl_leak --drawn --cmapss FOLDER --out leak.jsonl
    python -m research.studies.vfl_leak --table --out leak.jsonl

A vertical federation is simulated, then attacked. The attacker knows half of the last round's
products (1,000 of them): their samples and messages; it is judged on the other half.

- Samples from embeddings: ridge regression and a network of 128 hidden units, the better of the
  two; the share of the samples' variance that it explains (R2, 0 for nothing). By the head, from a
  sensor's embeddings as they arrived in the last round, and from their mean over all rounds of the
  window; by another sensor, from the denoised embeddings that all get; and, for comparison, by that
  sensor from its own samples alone.
- Labels from gradients, with `labels = server`: the class of the product whose gradient points
  nearest to this one's; for comparison, that of the product whose own embedding is nearest.
"""

import argparse
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import sqrt
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from edge_node.extensions.vfl import cmapss
from edge_node.extensions.vfl.channel_noise import parse_channel
from edge_node.extensions.vfl.drawn_products import DrawnStations
from edge_node.extensions.vfl.messages import Denoising, Privacy, Recipe, VflSpec, Window
from edge_node.extensions.vfl.privacy import count_releases, spent_epsilon
from edge_node.extensions.vfl.simulation import Simulation, Stream, release
from research.dao_vfl import data

ROUNDS, DELTA = 60, 1e-5
WINDOW = Window(start=1000, chunk=200, size=1000)


class Setting(NamedTuple):
    """Protection of the embeddings that sensors send."""

    noise: str
    privacy: Privacy
    denoising: Denoising


SETTINGS = (
    Setting("clean", Privacy(), Denoising()),
    Setting("levels=16", Privacy(), Denoising()),
    Setting("levels=3", Privacy(), Denoising(rounds=30)),
    *(
        Setting("clean", Privacy(clip=2, multiplier=each), Denoising())
        for each in (0.03, 0.1, 0.3, 1.0, 3.0)
    ),
    Setting("clean", Privacy(clip=2, multiplier=0.3), Denoising(rounds=30, target="noisy")),
)


class Pool(NamedTuple):
    """Products, and the settings of training on them."""

    stream: Stream
    held_out: Stream
    network: str
    classes: tuple[str, ...]
    recipe: Recipe


class Leak(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A record in the file. Shares of variance are means over sensors."""

    data: str
    noise: str
    privacy: Privacy
    denoised: bool
    seed: int
    reached: float  # accuracy, or RMSE of remaining useful life, on held-out products
    epsilon: float | None  # of a product at a sensor; None: infinite
    head: float  # R2 of samples, from one round's embeddings
    averaged: float  # and from their mean over the rounds of the window
    sensor: float  # by another sensor, from denoised embeddings and its own samples
    alone: float  # by another sensor, from its own samples


class Labels(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A record in the file: how often a product's label is inferred, mean over sensors."""

    data: str
    round: int
    seed: int
    gradients: float
    embeddings: float


def drawn(seed: int) -> Pool:
    """Three stations and four classes; columns are scaled to mean 0 and deviation 1."""
    products = DrawnStations(3, seed).draw(0, 15_000)
    samples = []
    for rows in products.rows:
        scaled = (rows - rows[:1000].mean(0)) / rows[:1000].std(0)
        samples.append(torch.from_numpy(scaled.astype(np.float32))[:, :, None])
    labels = torch.from_numpy(products.labels)
    stream, held_out = (
        Stream(tuple(each[part] for each in samples), labels[part])
        for part in (slice(13_000), slice(13_000, None))
    )
    return Pool(
        stream, held_out, "dense", DrawnStations(3, seed).classes, Recipe(eta=0.1, batches=10)
    )


def turbofans(folder: Path, seed: int) -> Pool:
    """C-MAPSS FD002; held out are 3,000 samples of the test file."""
    digest, source = data.read("cmapss", folder)
    parts = data.split(data.Split(data="cmapss", digest=digest, order="mixed"), source, seed, 1000)
    chosen = torch.randperm(
        len(parts.held_out.labels), generator=torch.Generator().manual_seed(seed)
    )[:3000]
    held_out = Stream(
        tuple(each[chosen] for each in parts.held_out.samples), parts.held_out.labels[chosen]
    )
    return Pool(parts.stream, held_out, "conv", cmapss.CLASSES, Recipe(eta=0.05, batches=10))


def made(
    pool: Pool, setting: Setting, labels: Literal["shared", "server"], seed: int
) -> Simulation:
    """The federation that is attacked, before its first round."""
    spec = VflSpec(
        federation="leak",
        run="0" * 16,
        software="",
        sensors=tuple(f"s{index}" for index in range(len(pool.stream.samples))),
        network=pool.network,
        classes=pool.classes,
        labels=labels,
        window=WINDOW,
        channel=parse_channel(setting.noise),
        denoising=setting.denoising,
        recipe=pool.recipe,
        privacy=setting.privacy,
        seed=seed,
    )
    return Simulation(spec, pool.stream)


def learnt(name: str, pool: Pool, setting: Setting, seed: int) -> Leak:
    """Simulate a federation whose sensors have the labels, and reconstruct their samples."""
    simulation = made(pool, setting, "shared", seed)
    sensors, rows = range(len(simulation.sensors)), slice(*WINDOW.span(ROUNDS))
    sums = [torch.zeros(ROUNDS * WINDOW.chunk + WINDOW.start, size) for size in sizes(simulation)]
    last: list[Tensor] = []
    for round_ in range(1, ROUNDS + 1):
        if round_ > ROUNDS - WINDOW.size // WINDOW.chunk:
            seen = slice(*WINDOW.span(round_))
            last = [
                release(
                    simulation.spec, simulation.sensors[k], pool.stream.samples[k][seen], round_
                ).received
                for k in sensors
            ]
            for total, each in zip(sums, last, strict=True):
                total[seen] += each
        simulation.step([2] * len(sensors))
    # that each product was in the window
    times = 1 + torch.arange(WINDOW.size - 1, -1, -1)[:, None] // WINDOW.chunk
    samples = [each[rows].flatten(1) for each in pool.stream.samples]
    means, denoised = [total[rows] / times for total in sums], simulation.head.denoiser(last)
    return Leak(
        data=name,
        noise=setting.noise,
        privacy=setting.privacy,
        denoised=bool(setting.denoising.rounds),
        seed=seed,
        reached=reached(simulation, pool),
        epsilon=spent_epsilon(setting.privacy, count_releases(simulation.spec, ROUNDS), DELTA)
        if setting.privacy.clip
        else None,
        head=mean(explained(last[k], samples[k]) for k in sensors),
        averaged=mean(explained(torch.cat([last[k], means[k]], 1), samples[k]) for k in sensors),
        sensor=mean(
            explained(torch.cat([denoised[k], samples[k - 1]], 1), samples[k]) for k in sensors
        ),
        alone=mean(explained(samples[k - 1], samples[k]) for k in sensors),
    )


def graded(name: str, pool: Pool, seed: int) -> list[Labels]:
    """Simulate a federation whose head keeps the labels,
    and infer them at a sensor in some rounds.
    """
    simulation, found = made(pool, Setting("clean", Privacy(), Denoising()), "server", seed), []
    for round_ in range(1, ROUNDS + 1):
        if round_ in (1, 10, ROUNDS):
            rows = slice(*WINDOW.span(round_))
            sent = [
                release(simulation.spec, sensor, each[rows], round_).received
                for sensor, each in zip(simulation.sensors, pool.stream.samples, strict=True)
            ]
            labels = pool.stream.labels[rows]
            gradients = simulation.head.gradients(simulation.head.represent(sent), labels)
            found.append(
                Labels(
                    data=name,
                    round=round_,
                    seed=seed,
                    gradients=mean(nearest(each, labels) for each in gradients),
                    embeddings=mean(nearest(each, labels) for each in sent),
                )
            )
        simulation.step([2] * len(simulation.sensors))
    return found


def explained(seen: Tensor, samples: Tensor) -> float:
    """Share of the variance of half of the samples [N, S] that what was seen [N,
    X] of them explains; at least 0.
    """
    known, asked = slice(0, None, 2), slice(1, None, 2)
    scaled = (seen - seen[known].mean(0)) / seen[known].std(0).clamp_min(1e-6)
    target = samples - samples[known].mean(0)
    linear = torch.cat([scaled, torch.ones(len(seen), 1)], 1)
    inside = linear[known].T @ linear[known] + 10 * torch.eye(linear.shape[1])
    guesses = [
        linear @ torch.linalg.solve(inside, linear[known].T @ target[known]),
        network(scaled, target, known),
    ]
    total = target[asked].square().sum()
    return max(
        0.0, *(1 - float((guess - target)[asked].square().sum() / total) for guess in guesses)
    )


def network(seen: Tensor, target: Tensor, known: slice) -> Tensor:
    """What a small network, trained on the known rows, makes of all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(seen.shape[1], 128), nn.ReLU(), nn.Linear(128, target.shape[1]))
    optimiser = torch.optim.Adam(model.parameters(), 3e-3, weight_decay=1e-3)
    for _ in range(300):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(seen[known]), target[known]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    with torch.no_grad():
        made: Tensor = model(seen)
    return made


def nearest(seen: Tensor, labels: Tensor) -> float:
    """How often the nearest known product, by direction, has the same label."""
    known, asked = slice(0, None, 2), slice(1, None, 2)
    directions = nn.functional.normalize(seen, dim=1)
    best = (directions[asked] @ directions[known].T).argmax(1)
    return mean((labels[known][best] == labels[asked]).float())


def reached(simulation: Simulation, pool: Pool) -> float:
    """Accuracy on held-out products, or the RMSE of the mean over classes that are numbers."""
    logits = simulation.predict(pool.held_out.samples)
    if pool.network == "dense":
        return mean((logits.argmax(1) == pool.held_out.labels).float())
    life = logits.softmax(1) @ torch.tensor([float(name) for name in pool.classes])
    return sqrt(mean((life - pool.held_out.labels).square()))


def sizes(simulation: Simulation) -> list[int]:
    """D_k of each sensor."""
    first = zip(simulation.sensors, simulation.stream.samples, strict=True)
    return [sensor.embed(each[:1]).shape[1] for sensor, each in first]


def mean(values: Iterable[float] | Tensor) -> float:
    """Of some numbers."""
    return float(np.mean(values.numpy() if isinstance(values, Tensor) else list(values)))


def table(lines: Sequence[Leak | Labels]) -> str:
    """Markdown, means over seeds."""
    leaks: dict[tuple[object, ...], list[Leak]] = defaultdict(list)
    labels: dict[tuple[str, int], list[Labels]] = defaultdict(list)
    for each in lines:
        if isinstance(each, Leak):
            leaks[each.data, each.noise, each.privacy.multiplier, each.denoised].append(each)
        else:
            labels[each.data, each.round].append(each)
    text = (
        "| data | channel | protection | denoiser | epsilon | reached | head, a round | head, "
        "all | sensor | alone |\n"
    )
    text += "|---|---|---|---|---|---|---|---|---|---|\n"
    for (name, noise, multiplier, denoised), group in leaks.items():
        epsilon = "infinite" if group[0].epsilon is None else f"{group[0].epsilon:.3g}"
        figures = [
            mean(getattr(each, field) for each in group)
            for field in ("reached", "head", "averaged", "sensor", "alone")
        ]
        cells = [
            name,
            noise,
            f"{multiplier:g}",
            "yes" if denoised else "no",
            epsilon,
            *(f"{each:.3g}" for each in figures),
        ]
        text += f"| {' | '.join(map(str, cells))} |\n"
    text += "\n| data | round | labels from gradients | from own embeddings |\n|---|---|---|---|\n"
    for (name, round_), graded in labels.items():
        figures = [
            mean(getattr(each, field) for each in graded) for field in ("gradients", "embeddings")
        ]
        text += f"| {name} | {round_} | {figures[0]:.3f} | {figures[1]:.3f} |\n"
    return text


def main() -> None:
    """Play what is not in the file yet, or print the tables of what is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drawn", action="store_true")
    parser.add_argument("--cmapss", type=Path, help="folder of NASA's files")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("leak.jsonl"))
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.table:
        lines = given.out.read_bytes().splitlines()
        print(table([msgspec.json.decode(line, type=Leak | Labels) for line in lines]))
        return
    for seed in given.seeds:
        pools = {"drawn": drawn(seed)} if given.drawn else {}
        if given.cmapss:
            pools["cmapss"] = turbofans(given.cmapss, seed)
        for name, pool in pools.items():
            found = itertools.chain(
                (learnt(name, pool, each, seed) for each in SETTINGS), graded(name, pool, seed)
            )
            for each in found:
                with given.out.open("ab") as file:
                    file.write(msgspec.json.encode(each) + b"\n")
                print(each, flush=True)


if __name__ == "__main__":
    main()
