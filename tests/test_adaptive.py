"""Local iterations: the paper's latency model, rules, the optimum, the environment, and agents in a live head."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st

from broker_config.errors import UsageError
from broker_config.vertical import LineSpec, Window
from tests.plants import run
from trainer.vertical.adaptive import latency, live, ppo
from trainer.vertical.adaptive.compare import summary, trajectories
from trainer.vertical.adaptive.curve import FD002, Curve, Run, fit
from trainer.vertical.adaptive.env import LineEnv
from trainer.vertical.adaptive.game import Game, simulated
from trainer.vertical.adaptive.latency import Setting, Simulated, Weights, disparity
from trainer.vertical.adaptive.learners import Played, Surrogate
from trainer.vertical.adaptive.measured import Measured
from trainer.vertical.adaptive.optimum import Optimum
from trainer.vertical.adaptive.policy import Timing
from trainer.vertical.adaptive.rules import RULES, Deadline
from trainer.vertical.simulate import Line, Stream

ROUNDS = 40
SEEDS = range(500, 510)

seconds = st.floats(0.001, 1000)
lines = st.integers(1, 6).flatmap(
    lambda sensors: st.lists(st.lists(seconds, min_size=sensors, max_size=sensors), min_size=3, max_size=3)
)


@pytest.fixture(scope="module")
def game() -> Game:
    """Two sensors, a short episode."""
    return simulated(2, 5, ROUNDS, FD002)


@pytest.fixture(scope="module")
def trained(game: Game, tmp_path_factory: pytest.TempPathFactory) -> tuple[ppo.Agent, Path]:
    """An agent that has learnt a little, and its file."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("agent")
    agent = ppo.learn(game, 12_000, 3, folder / "agent.zip", lambda done, earned: None)
    ppo.export(agent, game, folder / "agent.onnx")
    return agent, folder / "agent.onnx"


def policy(name: str, most: int = 5, said: list[str] | None = None) -> live.Guarded:
    return live.make(name, most, 2, (said if said is not None else []).append)


# The model


def test_latencies_are_those_of_the_paper_by_hand() -> None:
    setting, ones = Setting(), np.ones(2)
    assert latency.collection(setting, np.array([3.0]), 3).tolist() == [5, 8, 11]  # 3 k + 2
    # 1e7 / 2 log2(1 + 1e-4 / 0.05) = 5e6 x 0.0028825 = 14412 a second
    assert latency.communication(setting, 1e-4 * ones, 2) == pytest.approx([6.938, 6.938], abs=1e-3)
    assert latency.iteration(setting, np.array([2e7, 5e7])).tolist() == [25, 10]  # 1000 x 5e5 / f
    timing = Timing(np.array([5.0, 8.0]), np.array([7.0, 10.0]), np.array([25.0, 10.0]))
    assert timing.latency(np.array([2, 5])) == 68  # max(5 + 7 + 50, 8 + 10 + 50)


def test_all_parts_of_a_latency_have_the_same_order_of_magnitude() -> None:
    parts = Simulated(2).sample(2000, 1, 0).mean((0, 2))
    assert (parts > 5).all()
    assert (parts < 50).all()


def test_disparity_and_reward_are_those_of_the_paper_by_hand() -> None:
    assert disparity(np.array([[5, 1], [3, 3], [1, 2]])).tolist() == [4, 0, 1]
    assert disparity(np.array([4, 1, 1, 2])) == 4  # |2| + |1| + |1| + |0|
    assert Weights(10.0, 0.01, 0.5).reward(0.8, 100.0, 4.0) == pytest.approx(8 - 1 - 2)


def test_what_is_drawn_stays_within_the_ranges_and_the_last_sensor_is_a_slow_one() -> None:
    for sensors in (2, 4):
        source = Simulated(sensors)
        low, high = source.ranges
        drawn = source.sample(3000, 2, 0)
        assert (low <= drawn).all()
        assert (drawn <= high).all()
        assert (drawn.max(0) - low > 0.9 * (high - low)).all()
        assert drawn[:, 2, -1].mean() > 1.2 * drawn[:, 2, 0].mean()


def test_timings_are_a_function_of_seed_and_episode() -> None:
    source = Simulated(2)
    first = source.sample(5, 7, 3)
    assert (first == source.sample(5, 7, 3)).all()
    assert (first != source.sample(5, 7, 4))[:, 1:].all()
    assert (first != source.sample(5, 8, 3))[:, 1:].all()


def test_measured_rounds_are_drawn_whole() -> None:
    table = np.arange(60.0).reshape(10, 3, 2) + 1
    drawn = Measured(table).sample(200, 1, 0)
    assert {tuple(each.ravel()) for each in drawn} == {tuple(each.ravel()) for each in table}


def test_the_weights_make_neither_extreme_better_than_the_other() -> None:
    for sensors, most in ((2, 5), (4, 10)):
        game = simulated(sensors, most, 200, FD002)
        found = summary(game, {name: lambda rule=RULES[name]: rule(most) for name in ("all", "least", "one")}, SEEDS)
        assert found["all"].reward == pytest.approx(found["least"].reward, abs=0.02)
        assert game.weights.latency * found["all"].latency == pytest.approx(1, rel=0.05)
        assert game.weights.disparity * found["one"].disparity == pytest.approx(0.25)


# The learning curve


def test_a_curve_that_made_the_runs_is_found_again() -> None:
    truth = Curve((0.5, 0.5, 0.0), (0.0, 50.0, 400.0), (0.5, 0.7, 0.8))
    decisions = [np.tile(each, (60, 1)) for each in ((1, 1), (5, 1), (2, 4), (6, 6), (3, 1))]
    found, error = fit([Run(each, truth(np.cumsum(truth.step(each)))) for each in decisions])
    assert found.shares == truth.shares
    assert error < 0.005


def test_a_real_line_teaches_the_environment_as_a_surrogate_does() -> None:
    random = torch.Generator().manual_seed(4)
    samples = torch.randn(600, 6, generator=random)
    labels = (samples.sum(1) > 0).long()
    parts = (samples[:, :3], samples[:, 3:])
    spec = LineSpec(
        federation="f", run="r", software="s", sensors=("a", "b"), network="dense", classes=("good", "bad"),
        window=Window(start=100, chunk=10, size=100), recipe={"eta": 0.1}, seed=1,
    )  # fmt: skip
