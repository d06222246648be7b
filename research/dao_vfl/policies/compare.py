"""Comparison of policies on the same timings: latency, accuracy and reward (paper, Figs.

8 to 10).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from edge_node.extensions.vfl.policies.latency import Floats, Ints, disparity
from edge_node.extensions.vfl.policies.policy import Policy, Timing
from research.dao_vfl.policies.learners import Learner
from research.dao_vfl.policies.problem import Game


class Round(NamedTuple):
    """What came of a decision."""

    accuracy: float
    latency: float  # seconds
    disparity: float
    reward: float


class Trajectory(NamedTuple):
    """T rounds of a policy."""

    iterations: Ints  # [T, K]
    accuracy: Floats  # [T], after the round
    latency: Floats  # [T], seconds
    disparity: Floats  # [T]
    reward: Floats  # [T]


def trajectories(game: Game, policies: Mapping[str, Policy], seed: int) -> dict[str, Trajectory]:
    """One episode of each policy, all with the same timings:
    those of `LineEnv`'s first episode with this seed.

    Policies may remember: a new one for each call is safe. Averages over rounds, as in Figs. 9 (c)
    and 10 (c), are `np.cumsum(trajectory.latency) / np.arange(1, T + 1)`.
    """
    timings = game.source.sample(game.rounds, seed, 0)
    return {name: episode(game, policy, timings) for name, policy in policies.items()}


def closed(game: Game, timings: Floats, iterations: Ints, learner: Learner) -> Round:
    """Play one round: timings [3, K], iterations [K]."""
    accuracy = learner(iterations)
    latency, uneven = Timing(*timings).latency(iterations), float(disparity(iterations))
    return Round(accuracy, latency, uneven, game.weights.reward(accuracy, latency, uneven))


def episode(game: Game, policy: Policy, timings: Floats) -> Trajectory:
    """All rounds of `timings` [T, 3, K]."""
    learner, decisions, rounds = game.learner(), [], []
    for index, table in enumerate(timings):
        decisions.append(policy(Timing(*table), index + 1))
        rounds.append(closed(game, table, decisions[-1], learner))
    return Trajectory(np.array(decisions), *np.array(rounds).T)


class Summary(NamedTuple):
    """Means over rounds and seeds."""

    iterations: float  # of a sensor
    latency: float  # seconds of a round
    disparity: float
    accuracy: float
    reward: float


def summary(
    game: Game, policies: Mapping[str, Callable[[], Policy]], seeds: Iterable[int]
) -> dict[str, Summary]:
    """Policies on the same seeds, the best reward first; each is made anew for each seed."""
    found: dict[str, list[list[float]]] = {name: [] for name in policies}
    for seed in seeds:
        for name, each in trajectories(
            game, {name: make() for name, make in policies.items()}, seed
        ).items():
            parts = (each.iterations, each.latency, each.disparity, each.accuracy, each.reward)
            found[name].append([float(part.mean()) for part in parts])
    means = {name: Summary(*map(float, np.mean(rows, axis=0))) for name, rows in found.items()}
    return dict(sorted(means.items(), key=lambda item: -item[1].reward))
