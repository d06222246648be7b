"""A cell's run: all rounds of a vertical federation in one process,
with measurements in between.
"""

import math
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor, nn

from broker_config.protocol.errors import EdgeNodeError
from edge_node.extensions.vfl.messages import VflSpec
from edge_node.extensions.vfl.policies.iteration_rules import RULES
from edge_node.extensions.vfl.policies.latency import (
    Floats,
    Ints,
    SimulatedTimings,
    disparity,
    latencies,
)
from edge_node.extensions.vfl.policies.policy import Policy, Timing
from edge_node.extensions.vfl.policies.selection import OnnxAgent
from edge_node.extensions.vfl.simulation import Simulation, Stream
from research.dao_vfl.cell import Cell, Finished, Point
from research.dao_vfl.data import SUBSETS, Inputs, Parts, split
from research.dao_vfl.reference import Central, Fixed
from research.runner.machine import check_torch, machine

Player = Simulation | Central | Fixed
AGENT = "agent "  # before the digest of a trained policy


def run_cell(cell: Cell, inputs: Inputs) -> Finished:
    """Play all rounds, measuring now and then.

    Raises:
        EdgeNodeError: another torch is installed here, or the products do not last.
    """
    check_torch(cell.torch)
    started = time.monotonic()
    parts = split(cell.split, inputs.sources[cell.split.digest], cell.seed, cell.window.start)
    timings = SimulatedTimings(len(cell.iterations)).sample(cell.rounds, cell.seed, 0)
    decided = _decisions(cell, inputs, timings)
    curve, losses, diverged = _play(
        cell, _player(cell, spec(cell, parts), parts.stream), parts.held_out, decided
    )
    return Finished(
        key=cell.key,
        cell=cell,
        curve=curve,
        losses=losses,
        diverged=diverged,
        latency=latencies(timings, decided).round(3).tolist() if cell.policy else [],
        disparity=disparity(decided).round(3).tolist() if cell.policy else [],
        seconds=round(time.monotonic() - started, 1),
        machine=machine(),
    )


def _decisions(cell: Cell, inputs: Inputs, timings: Floats) -> Ints:
    """E_{t,k} [T, K]: policies know the timings of their round, not what is learnt."""
    most = np.array(cell.iterations)
    if not cell.policy:
        return np.tile(most, (cell.rounds, 1))
    policy = _policy(cell.policy, int(most.max()), inputs)
    return np.array([policy(Timing(*each), round_) for round_, each in enumerate(timings, 1)])


def _policy(name: str, most: int, inputs: Inputs) -> Policy:
    if not name.startswith(AGENT):
        return RULES[name](most)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "agent.onnx"
        file.write_bytes(inputs.agents[name.removeprefix(AGENT)])
        return OnnxAgent(file)


def _play(
    cell: Cell, player: Player, held_out: Stream, decided: Ints
) -> tuple[list[Point], list[float | None], int]:
    """Measurements, losses, and the round that diverged (0: none)."""
    curve: list[Point] = []
    losses: list[float | None] = []
    for round_, iterations in enumerate(decided.tolist(), 1):
        try:
            losses.append(_finite(player.step(iterations).loss))
            if round_ % cell.every == 0 or round_ in (1, cell.rounds):
                curve.append(
                    _point(player, _tested(cell, held_out, round_), round_, numbers=_numbers(cell))
                )
        except EdgeNodeError:  # the one reason that a player has
            return curve, losses, round_
    return curve, losses, 0


def _player(cell: Cell, spec: VflSpec, stream: Stream) -> Player:
    if cell.kind == "line":
        return Simulation(spec, stream)
    return Central(spec, stream) if cell.kind == "central" else Fixed(spec, stream, cell.rounds)


def spec(cell: Cell, parts: Parts) -> VflSpec:
    """Spec of the federation that a cell simulates.

    Raises:
        EdgeNodeError: there are too few products for its rounds.
    """
    needed, there = cell.window.span(cell.rounds)[1], len(parts.stream.labels)
    if needed > there:
        most = max(0, 1 + (there - cell.window.start) // cell.window.chunk)
        raise EdgeNodeError(
            f"{cell.rounds} rounds need {needed} products, of which {there} are there",
            f"play {most} at most: --rounds",
        )
    classes = 1 + int(max(parts.stream.labels.max(), parts.held_out.labels.max()))
    return VflSpec(
        federation="experiment",
        run=cell.key,
        software="",
        sensors=tuple(f"s{number}" for number in range(1, len(parts.stream.samples) + 1)),
        network=cell.network,
        classes=tuple(map(str, range(classes))),
        reading="expectation" if _numbers(cell) else "class",
        window=cell.window,
        channel=cell.channel,
        denoising=cell.denoising,
        recipe=cell.recipe,
        iterations=max(cell.iterations),
        head_iterations=cell.head_iterations or 0,
        seed=cell.seed,
    )


def _numbers(cell: Cell) -> bool:
    """Whether classes are numbers: remaining cycles."""
    return cell.split.data in SUBSETS


def _tested(cell: Cell, held_out: Stream, round_: int) -> Stream:
    """Where the training set slides, so does half of the held-out products,
    from first to last (paper VII-B).
    """
    if not cell.window.size or round_ == cell.rounds:  # final figures are of all
        return held_out
    count = len(held_out.labels)
    first = (round_ - 1) * (count - count // 2) // cell.rounds
    rows = slice(first, first + count // 2)
    return Stream(tuple(each[rows] for each in held_out.samples), held_out.labels[rows])


def _point(player: Player, held_out: Stream, round_: int, *, numbers: bool) -> Point:
    logits, labels = player.predict(held_out.samples), held_out.labels
    likeliest = logits.argmax(1)
    point = Point(
        round=round_,
        loss=_finite(nn.functional.cross_entropy(logits, labels).item()),
        accuracy=round((likeliest == labels).double().mean().item(), 4),
    )
    if not numbers:
        return point
    expected = logits.softmax(1) @ torch.arange(logits.shape[1], dtype=logits.dtype)
    return Point(
        round=round_,
        loss=point.loss,
        accuracy=point.accuracy,
        rmse=_finite(_rmse(expected, labels)),
        rmse_likeliest=_finite(_rmse(likeliest, labels)),
    )


def _rmse(found: Tensor, labels: Tensor) -> float:
    return (found - labels).double().square().mean().sqrt().item()


def _finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
