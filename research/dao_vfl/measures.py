"""Measures that tables and figures show of finished cells, and their curves over rounds."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge.terminal.formatting import pluralize
from edge_node.extensions.vfl.policies.latency import SimulatedTimings
from research.dao_vfl import reported
from research.dao_vfl.cell import Cell, Finished
from research.dao_vfl.data import SUBSETS
from research.dao_vfl.grids import FIXED
from research.dao_vfl.policies.problem import balanced
from research.dao_vfl.presets import WORTH
from research.runner.panels import Panel

Curve = dict[int, float]  # a value by round
_CLASSES = 131  # of C-MAPSS


class Measure(NamedTuple):
    """A quantity over rounds."""

    name: str  # as an axis has it
    key: str
    scale: float = 1.0


def shown(name: str, data: str) -> list[Measure]:
    """What a figure shows of a data set, from top to bottom;
    the last is what its table is about.
    """
    if name == "fig9":
        return [
            Measure("latency of a round, s", "latency"),
            Measure("mean latency so far, s", "mean latency"),
        ]
    if name == "fig10":
        return [
            Measure("reward of a round", "reward"),
            Measure("mean reward so far", "mean reward"),
        ]
    if name == "regret":
        return [Measure("regret", "regret")]
    numbers = Measure("RMSE, cycles", "rmse")
    right = Measure("accuracy, %", "accuracy", 100)
    return [Measure("loss", "loss"), numbers if data in SUBSETS else right]


def curves(panel: Panel[Finished], measure: Measure, variant: str) -> dict[int, Curve]:
    """A measure of a variant by seed, then by round; without what is not finite,
    or cannot be had.
    """
    fixed = panel.variants.get(FIXED, {})
    found = {
        seed: _curve(each, measure.key, fixed.get(seed))
        for seed, each in panel.variants[variant].items()
    }
    return {
        seed: {at: measure.scale * value for at, value in curve.items()}
        for seed, curve in found.items()
        if curve
    }


def _curve(result: Finished, key: str, fixed: Finished | None) -> Curve:
    if key.startswith("mean "):
        return _averaged(_curve(result, key.removeprefix("mean "), fixed))
    if key == "latency":
        return dict(enumerate(result.latency, 1))
    if key == "reward":
        return rewards(result)
    if key == "regret":
        return (
            dict(enumerate(regret(result.losses, fixed.losses), 1))
            if fixed and fixed is not result
            else {}
        )
    values = {point.round: getattr(point, key) for point in result.curve}
    return {round_: value for round_, value in values.items() if value is not None}


def regret(losses: Sequence[float | None], fixed: Sequence[float | None]) -> list[float]:
    """Sum over rounds of F_t(Theta^{t,0}) - F_t(Theta*), up to each round;
    ends where a loss is not finite.
    """
    differences = []
    for mine, best in zip(losses, fixed, strict=False):
        if mine is None or best is None:
            break
        differences.append(mine - best)
    return list(accumulate(differences))


def rewards(result: Finished) -> Curve:
    """Eq. 19 of each round whose accuracy was measured."""
    cell = result.cell
    worth = WORTH[cell.split.data, cell.recipe.batches]
    weights = balanced(
        SimulatedTimings(len(cell.iterations)), max(cell.iterations), cell.rounds, worth
    )
    return {
        round_: weights.reward(accuracy, result.latency[round_ - 1], result.disparity[round_ - 1])
        for round_, accuracy in reached(result).items()
    }


def reached(result: Finished) -> Curve:
    """The accuracy that rewards are about: where classes are numbers, 1 - RMSE / 130."""
    if result.cell.split.data not in SUBSETS:
        return {point.round: point.accuracy for point in result.curve}
    return {point.round: 1 - (point.rmse or _CLASSES) / (_CLASSES - 1) for point in result.curve}


def _averaged(curve: Curve) -> Curve:
    sums = accumulate(curve.values())
    return {
        round_: total / count
        for count, (round_, total) in enumerate(zip(curve, sums, strict=True), 1)
    }


def common(curves: Iterable[Curve]) -> tuple[list[int], NDArray[np.float64]]:
    """Rounds that all curves have, and their values [curves, rounds]."""
    curves = list(curves)
    rounds = [at for at in (curves[0] if curves else {}) if all(at in curve for curve in curves)]
    return rounds, np.array([[curve[at] for at in rounds] for curve in curves]).reshape(
        len(curves), len(rounds)
    )


def conditions(cells: Iterable[Cell]) -> str:
    """What cells have in common, in a line."""
    cells = list(cells)
    told = []
    for data in dict.fromkeys(cell.split.data for cell in cells):
        own = [cell for cell in cells if cell.split.data == data]
        etas = [f"{eta:g}" for eta in sorted({cell.recipe.eta for cell in own})]
        recipes = sorted({f"{pluralize(cell.recipe.batches, 'step')} an iteration" for cell in own})
        noise = sorted({str(cell.channel.levels) for cell in own if cell.channel.levels})
        seeds, rounds = len({cell.seed for cell in own}), sorted({cell.rounds for cell in own})
        pool = (
            "test file" if own[0].split.pool == "report" else "held-out part of the training file"
        )
        told.append(
            f"{reported.DATASETS[data]}: {pluralize(seeds, 'seed')}, "
            f"{', '.join(map(str, rounds))} rounds, {own[0].network}, eta {', '.join(etas)}, "
            f"{', '.join(recipes)}, quantiser of {', '.join(noise) or 'no'} levels, "
            f"{pool}."
        )
    return " ".join(
        [*told, f"torch {', '.join(sorted({cell.torch for cell in cells}))}." if cells else ""]
    )
