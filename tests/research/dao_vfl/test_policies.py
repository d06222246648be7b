"""Local iterations: the paper's latency model, rules, the optimum, the environment,
and agents in a live head.
"""

import json
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st

from broker_config.protocol.errors import UsageError
from edge_node.extensions.vfl.messages import Recipe, VflSpec, Window
from edge_node.extensions.vfl.policies import latency, selection
from edge_node.extensions.vfl.policies.iteration_rules import RULES, Deadline
from edge_node.extensions.vfl.policies.latency import (
    LatencySettings,
    SimulatedTimings,
    Weights,
    disparity,
)
from edge_node.extensions.vfl.policies.policy import Timing
from edge_node.extensions.vfl.server.journal import ClosedRound, Journal
from edge_node.extensions.vfl.simulation import Simulation, Stream
from research.dao_vfl.policies import measured_timings, ppo
from research.dao_vfl.policies.compare import summary, trajectories
from research.dao_vfl.policies.environment import LineEnv
from research.dao_vfl.policies.learners import Played, Surrogate
from research.dao_vfl.policies.learning_curve import FD002_MINIBATCH, Curve, Run, fit
from research.dao_vfl.policies.measured_timings import Measured
from research.dao_vfl.policies.optimum import Optimum
from research.dao_vfl.policies.problem import Game, simulated
from tests.support.plants import here
from tests.support.research_command import research

ROUNDS = 40
RUN = "0123456789abcdef"
SEEDS = range(500, 510)

seconds = st.floats(0.001, 1000)
sensor_timings = st.integers(1, 6).flatmap(
    lambda sensors: st.lists(
        st.lists(seconds, min_size=sensors, max_size=sensors), min_size=3, max_size=3
    )
)


@pytest.fixture(scope="module")
def game() -> Game:
    """Two sensors, a short episode."""
    return simulated(2, 5, ROUNDS, FD002_MINIBATCH)


class Trained(NamedTuple):
    """An agent that has learnt a little, as the command has written it."""

    agent: ppo.Agent
    path: Path
    said: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    path = tmp_path_factory.mktemp("agent") / "agent.onnx"
    result = research(
        "agent",
        "--sensors",
        2,
        "--iterations",
        5,
        "--rounds",
        ROUNDS,
        "--steps",
        4096,
        "--out",
        path,
        "--seed",
        3,
        "--json",
    )
    assert result.returncode == 0, result.stderr
    return Trained(ppo.Agent.load(path.with_suffix(".zip"), device="cpu"), path, result.stdout)


def vfl_spec(**fields: object) -> VflSpec:
    return VflSpec(
        federation="f",
        software="s",
        sensors=("a", "b"),
        network="dense",
        classes=("good", "bad"),
        window=Window(start=100, chunk=10, size=100),
        recipe=Recipe(eta=0.1),
        seed=1,
        **fields,
    )


def closed_round(number: int, iterations: tuple[int, int]) -> ClosedRound:
    told = {} if 0 in iterations else {"b": 0.25}
    return ClosedRound(
        round=number,
        attempt=1,
        first=0,
        last=10,
        iterations=iterations,
        loss=1.0,
        seconds=1.0,
        collection=told | {"a": 0.5},
        communication={"a": float(number), "b": 2.0},
        iteration={"b": 1.5 * (number > 1), "a": 3.0},
    )


def policy(name: str, most: int = 5, said: list[str] | None = None) -> selection.GuardedPolicy:
    return selection.make_policy(name, most, 2, (said if said is not None else []).append)


# The model


def test_latencies_are_those_of_the_paper_by_hand() -> None:
    setting, ones = LatencySettings(), np.ones(2)
    assert latency.collection(setting, np.array([3.0]), 3).tolist() == [5, 8, 11]  # 3 k + 2
    # 1e7 / 2 log2(1 + 1e-4 / 0.05) = 5e6 x 0.0028825 = 14412 a second
    assert latency.communication(setting, 1e-4 * ones, 2) == pytest.approx([6.938, 6.938], abs=1e-3)
    assert latency.iteration(setting, np.array([2e7, 5e7])).tolist() == [25, 10]  # 1000 x 5e5 / f
    timing = Timing(np.array([5.0, 8.0]), np.array([7.0, 10.0]), np.array([25.0, 10.0]))
    assert timing.latency(np.array([2, 5])) == 68  # max(5 + 7 + 50, 8 + 10 + 50)


def test_all_parts_of_a_latency_have_the_same_order_of_magnitude() -> None:
    parts = SimulatedTimings(2).sample(2000, 1, 0).mean((0, 2))
    assert (parts > 5).all()
    assert (parts < 50).all()


def test_disparity_and_reward_are_those_of_the_paper_by_hand() -> None:
    assert disparity(np.array([[5, 1], [3, 3], [1, 2]])).tolist() == [4, 0, 1]
    assert disparity(np.array([4, 1, 1, 2])) == 4  # |2| + |1| + |1| + |0|
    assert Weights(10.0, 0.01, 0.5).reward(0.8, 100.0, 4.0) == pytest.approx(8 - 1 - 2)


def test_what_is_drawn_stays_within_the_ranges_and_the_last_sensor_is_a_slow_one() -> None:
    for sensors in (2, 4):
        source = SimulatedTimings(sensors)
        low, high = source.ranges
        drawn = source.sample(3000, 2, 0)
        assert (low <= drawn).all()
        assert (drawn <= high).all()
        assert (drawn.max(0) - low > 0.9 * (high - low)).all()
        assert drawn[:, 2, -1].mean() > 1.2 * drawn[:, 2, 0].mean()


def test_timings_are_a_function_of_seed_and_episode() -> None:
    source = SimulatedTimings(2)
    first = source.sample(5, 7, 3)
    assert (first == source.sample(5, 7, 3)).all()
    assert (first != source.sample(5, 7, 4))[:, 1:].all()
    assert (first != source.sample(5, 8, 3))[:, 1:].all()


def test_measured_rounds_are_drawn_whole() -> None:
    table = np.arange(60.0).reshape(10, 3, 2) + 1
    drawn = Measured(table).sample(200, 1, 0)
    assert {tuple(each.ravel()) for each in drawn} == {tuple(each.ravel()) for each in table}


def test_a_head_s_journal_gives_its_rounds_with_all_sensors(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin(vfl_spec(run=RUN))
    rounds = [
        closed_round(number, (2, 0) if number % 4 == 0 else (2, 1)) for number in range(1, 41)
    ]
    journal.close_rounds(RUN, rounds[:20])
    with pytest.raises(UsageError, match="14 rounds"):
        measured_timings.read(tmp_path)
    journal.close_rounds(RUN, rounds[20:])
    journal.close()
    drawn = measured_timings.read(tmp_path).sample(400, 1, 0)
    assert {round(each) for each in drawn[:, 1, 0]} == {
        number for number in range(2, 41) if number % 4
    }
    assert (drawn[:, 0] == [0.5, 0.25]).all()
    assert (drawn[:, 2] == [3.0, 1.5]).all()


def test_the_weights_make_neither_extreme_better_than_the_other() -> None:
    for sensors, most in ((2, 5), (4, 10)):
        game = simulated(sensors, most, 200, FD002_MINIBATCH)
        makers = {name: partial(RULES[name], most) for name in ("all", "least", "one")}
        found = summary(game, makers, SEEDS)
        assert found["all"].reward == pytest.approx(found["least"].reward, abs=0.02)
        assert game.weights.latency * found["all"].latency == pytest.approx(1, rel=0.05)
        assert game.weights.disparity * found["one"].disparity == pytest.approx(0.25)


# The learning curve


def test_a_curve_that_made_the_runs_is_found_again() -> None:
    places = np.geomspace(1, 400, 40)
    truth = Curve((0.5, 0.5, 0.0), tuple(places), tuple(0.5 + 0.05 * np.log(places)))
    decisions = [np.tile(each, (60, 1)) for each in ((1, 1), (5, 1), (2, 4), (6, 6), (3, 1))]
    found, error = fit([Run(each, truth(np.cumsum(truth.step(each)))) for each in decisions])
    assert found.shares == truth.shares
    assert error < 0.005


def test_a_real_federation_teaches_the_environment_as_a_surrogate_does() -> None:
    random = torch.Generator().manual_seed(4)
    samples = torch.randn(600, 6, generator=random)
    labels = (samples.sum(1) > 0).long()
    parts = (samples[:, :3], samples[:, 3:])
    spec = vfl_spec(run=RUN)
    stream = Stream(tuple(part[:500] for part in parts), labels[:500])
    held_out = [part[500:] for part in parts], labels[500:]
    source = SimulatedTimings(2)
    game = Game(
        source, 5, 30, Weights(1.0, 0.0, 0.0), lambda: Played(Simulation(spec, stream), *held_out)
    )
    found = trajectories(
        game, {"all": policy("all"), "again": policy("all"), "least": policy("least")}, 1
    )
    assert (found["all"].accuracy == found["again"].accuracy).all()
    assert found["all"].accuracy[-1] > 0.8
    assert found["all"].accuracy.mean() > found["least"].accuracy.mean()


# Rules


@pytest.mark.parametrize("name", RULES)
@given(timings=sensor_timings, most=st.integers(1, 12), round_=st.integers(1, 1000))
def test_every_rule_decides_something_possible(
    name: str, timings: list[list[float]], most: int, round_: int
) -> None:
    timing = Timing(*np.array(timings))
    decision = RULES[name](most)(timing, round_)
    assert decision.shape == timing.iteration.shape
    assert ((decision >= 1) & (decision <= most)).all()
    assert decision.dtype == np.int64


@given(timings=sensor_timings, most=st.integers(2, 12), scale=st.sampled_from([2.0**-20, 0.25, 64]))
def test_a_deadline_needs_no_units(timings: list[list[float]], most: int, scale: float) -> None:
    here, there = (Deadline(most)(Timing(*(unit * np.array(timings))), 1) for unit in (1, scale))
    assert here.tolist() == there.tolist()


@given(timings=sensor_timings, most=st.integers(2, 12))
def test_a_deadline_is_never_later_than_that_of_ho(timings: list[list[float]], most: int) -> None:
    timing = Timing(*np.array(timings))
    assert timing.latency(Deadline(most)(timing, 1)) <= timing.latency(
        RULES["all"](most)(timing, 1)
    )


def test_a_sensor_works_while_the_others_cannot_help_it() -> None:
    timing = Timing(np.array([2.0, 40.0]), np.array([1.0, 1.0]), np.array([5.0, 10.0]))
    # the second sensor's first iteration ends after 51 s: until then the first one has time for 9
    assert Deadline(10)(timing, 1).tolist() == [9, 1]


def test_where_all_are_alike_a_deadline_takes_some_and_takes_more_in_cheap_rounds() -> None:
    rule, usual = Deadline(10), Timing(*np.ones((3, 3)))
    assert [rule(usual, round_).tolist() for round_ in (1, 2)] == [[4, 4, 4]] * 2  # 9 / ln 10 = 3.9
    assert rule(Timing(np.ones(3), np.ones(3), np.full(3, 0.2)), 3).tolist() == [10, 10, 10]


def test_ho_and_he_are_those_of_the_paper() -> None:
    timing = Timing(*np.ones((3, 4)))
    assert RULES["all"](7)(timing, 1).tolist() == [7, 7, 7, 7]
    assert RULES["one"](7)(timing, 1).tolist() == [1, 1, 1, 7]
    assert RULES["proportional"](8)(
        Timing(np.ones(3), np.ones(3), np.array([2.0, 1.0, 16.0])), 1
    ).tolist() == [4, 8, 1]


def test_no_rule_earns_more_than_the_optimum_and_the_deadline_beats_ho_in_latency_and_reward(
    game: Game,
) -> None:
    makers = {name: partial(rule, 5) for name, rule in RULES.items()}
    best = Optimum(5, FD002_MINIBATCH, game.weights, game.source, ROUNDS)
    found = summary(game, {**makers, "best": lambda: best}, SEEDS)
    assert next(iter(found)) == "best"
    assert found["deadline"].latency < 0.85 * found["all"].latency
    assert found["deadline"].reward > found["all"].reward


def test_the_optimum_is_that_of_all_sequences_of_decisions() -> None:
    curve = Curve((0.0, 1.0, 0.0), (0.0, 3.0, 9.0), (0.1, 0.6, 0.9))
    table = np.array([[[2.0], [1.0], [3.0]]])  # always the same round: nothing is left to chance
    game = Game(Measured(table), 3, 4, Weights(3.0, 0.05, 0.0), lambda: Surrogate(curve))
    earned = []
    for decisions in product((1, 2, 3), repeat=4):
        fixed = trajectories(
            game, {"it": lambda _, round_, all_=decisions: np.array([all_[round_ - 1]])}, 0
        )
        earned.append(fixed["it"].reward.sum())
    best = Optimum(3, curve, game.weights, game.source, 4)
    assert trajectories(game, {"it": best}, 0)["it"].reward.sum() == pytest.approx(
        max(earned), abs=1e-3
    )


# The environment


@pytest.mark.filterwarnings("ignore:.*alternative render modes")
def test_gymnasium_finds_no_fault_in_the_environment(game: Game) -> None:
    check_env(LineEnv(game))


def test_an_agent_and_a_rule_see_the_same_episode(game: Game) -> None:
    rule, env = policy("deadline"), LineEnv(game)
    expected = trajectories(game, {"it": policy("deadline")}, 9)["it"]
    state, _ = env.reset(seed=9)
    timings, rewards, over = game.source.sample(ROUNDS, 9, 0), [], False
    while not over:
        assert (state == game.state(timings[len(rewards)], len(rewards) + 1)).all()
        action = rule(Timing(*timings[len(rewards)]), len(rewards) + 1) - 1
        state, reward, over, _, info = env.step(action)
        rewards.append(reward)
    assert rewards == expected.reward.tolist()
    assert info["latency"] == expected.latency[-1]


def test_episodes_differ_and_come_again_with_their_seed(game: Game) -> None:
    env = LineEnv(game)
    first, second = env.reset(seed=4)[0], env.reset()[0]
    assert (first != second).any()
    assert (env.reset(seed=4)[0] == first).all()
    assert (env.reset()[0] == second).all()


# Agents


def test_actor_and_critic_have_three_layers_of_64_and_learning_rates_of_their_own(
    game: Game,
) -> None:
    agent = ppo.agent(game, 0)
    actor, critic = agent.policy.optimizer.param_groups
    assert (actor["lr"], critic["lr"]) == (1e-4, 1e-3)
    sizes = [sum(each.numel() for each in group["params"]) for group in (actor, critic)]
    hidden = 7 * 64 + 64 + 2 * (64 * 64 + 64)
    assert sizes == [hidden + 64 * 10 + 10, hidden + 64 + 1]
    agent._update_learning_rate(agent.policy.optimizer)
    assert (actor["lr"], critic["lr"]) == (1e-4, 1e-3)


@pytest.mark.slow
def test_a_short_training_earns_more_than_the_first_policy(game: Game, trained: Trained) -> None:
    makers = {
        "first": lambda: ppo.Learnt(ppo.agent(game, 3), game),
        "trained": lambda: ppo.Learnt(trained.agent, game),
    }
    found = summary(game, makers, SEEDS)
    assert found["trained"].reward > found["first"].reward


@pytest.mark.slow
def test_the_graph_decides_as_the_agent_does(game: Game, trained: Trained) -> None:
    agent, path, _ = trained
    said: list[str] = []
    found = trajectories(
        game, {"torch": ppo.Learnt(agent, game), "onnx": policy(str(path), 5, said)}, 11
    )
    assert (found["torch"].iterations == found["onnx"].iterations).all()
    graph = ppo.Graph(agent, game)
    for round_, table in enumerate(2 * game.source.sample(60, 12, 0), 1):
        state = graph.state(torch.from_numpy(table), torch.tensor([round_])).numpy()
        assert np.allclose(state, game.state(table, round_), atol=1e-6)
    far = Timing(np.array([0.0, 1e6]), np.array([1e-9, 30]), np.array([100.0, 1e-3]))
    assert (ppo.Learnt(agent, game)(far, 10**6) == policy(str(path), 5, said)(far, 10**6)).all()
    assert said == []


@pytest.mark.slow
def test_a_training_goes_on_where_it_was_saved(game: Game, trained: Trained) -> None:
    agent, path, _ = trained
    told: list[int] = []
    more = ppo.learn(
        game,
        agent.num_timesteps + 2048,
        3,
        path.with_suffix(".zip"),
        lambda done, _: told.append(done),
    )
    assert told == [agent.num_timesteps + 2048]
    assert more.num_timesteps == told[0]
    same = ppo.learn(game, 1, 3, path.with_suffix(".zip"), lambda done, _: told.append(done))
    assert same.num_timesteps == more.num_timesteps
    assert len(told) == 1


@pytest.mark.slow
def test_a_training_of_another_federation_is_not_gone_on_with(trained: Trained) -> None:
    for sensors, most in ((3, 5), (2, 6)):
        with pytest.raises(UsageError, match=r"2 sensors.*5 iterations"):
            ppo.learn(
                simulated(sensors, most, ROUNDS, FD002_MINIBATCH),
                1,
                3,
                trained.path.with_suffix(".zip"),
                print,
            )


# In a live head


def test_a_rule_has_a_name_and_an_agent_a_file() -> None:
    with pytest.raises(UsageError, match="'deadlines'") as caught:
        policy("deadlines")
    assert "did you mean 'deadline'" in caught.value.remedy
    with pytest.raises(UsageError, match=r"nowhere\.onnx"):
        policy("nowhere.onnx")


@pytest.mark.slow
def test_an_agent_of_another_federation_is_refused(trained: Trained) -> None:
    for most, sensors in ((6, 2), (5, 3)):
        with pytest.raises(UsageError, match=r"2 sensors.*5 iterations"):
            selection.make_policy(str(trained.path), most, sensors, print)


@pytest.mark.slow
def test_an_agent_of_another_federation_is_refused_before_a_head_waits_for_anybody(
    trained: Trained, tmp_path: Path
) -> None:
    result = here(
        "vfl",
        "coordinate",
        "mqtt://127.0.0.1:1",
        "--sensors",
        "a,b,c",
        "--labels",
        tmp_path / "labels.csv",
        "--classes",
        "good,bad",
        "--iterations",
        5,
        "--policy",
        trained.path,
        "--state",
        tmp_path / "head",
    )
    assert result.returncode == 2
    assert "decides for 2 sensors and up to 5 iterations" in result.stderr


@pytest.mark.parametrize("decided", [[9, -3], [1], [np.nan, 1.0], "nonsense", None])
def test_a_policy_that_decides_nonsense_stops_nothing_and_is_told_once(decided: object) -> None:
    said: list[str] = []
    guarded = selection.GuardedPolicy(lambda timing, round_: decided, 5, said.append)  # type: ignore[arg-type, return-value]
    for round_ in (1, 2):
        decision = guarded(Timing(*np.ones((3, 2))), round_)
        assert decision.tolist() == ([5, 1] if decided == [9, -3] else [5, 5])
    assert len(said) == 1


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0])
def test_timings_that_cannot_be_are_answered_with_the_most(wrong: float) -> None:
    said: list[str] = []
    timing = Timing(np.ones(2), np.array([1.0, wrong]), np.ones(2))
    assert policy("deadline", 5, said)(timing, 1).tolist() == [5, 5]
    assert len(said) == 1


def test_sensors_that_take_no_time_at_all_are_no_trouble() -> None:
    said: list[str] = []
    for name in RULES:
        assert (policy(name, 5, said)(Timing(*np.zeros((3, 2))), 1) <= 5).all()
    assert said == []


def test_a_live_head_needs_neither_gymnasium_nor_torch_for_its_policy() -> None:
    code = (
        "import sys; from edge_node.extensions.vfl.policies import selection; "
        "selection.make_policy('deadline', 5, 2, print)\n"
        "print([name for name in ('gymnasium', 'stable_baselines3', 'torch') if name in "
        "sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_command_says_how_its_agent_stands_beside_the_rules(trained: Trained) -> None:
    policies = json.loads(trained.said)["result"]["policies"]
    assert set(policies) == {"agent", *RULES}
    rewards = [each["reward"] for each in policies.values()]
    assert rewards == sorted(rewards, reverse=True)


@pytest.mark.slow
def test_people_see_how_an_agent_stands_beside_the_rules(trained: Trained, tmp_path: Path) -> None:
    path = tmp_path / "agent.onnx"
    path.with_suffix(".zip").write_bytes(trained.path.with_suffix(".zip").read_bytes())
    told = research("agent", "--rounds", ROUNDS, "--steps", 1, "--out", path).stdout
    assert all(name in told for name in ("agent", *RULES))
    assert f"vfl coordinate --policy {path}" in told
