"""PPO (paper VI, Algorithm 2) by stable-baselines3, and the trained actor as an ONNX graph.

Actor and critic have three layers of 64 and learning rates of their own, as printed. What the paper
does not state is our choice: rollouts of 8 environments x 256 rounds (`Rollout`), 10 epochs over
batches of 64, clipping at 0.2, GAE 0.98, tanh between layers, and no discount: an episode is a
finite sum, and an iteration pays off a hundred rounds later. Rewards are told relative to those of
one iteration each in the same episode: that changes no optimum, and takes away what no decision
changes.
"""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import onnx
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import Tensor, nn

from broker_config.protocol.errors import UsageError
from edge_node.extensions.vfl.policies.iteration_rules import Uniform
from edge_node.extensions.vfl.policies.latency import Ints
from edge_node.extensions.vfl.policies.policy import Timing
from research.dao_vfl.policies.environment import LineEnv
from research.dao_vfl.policies.problem import Game, bounds
from trainer.seeding import key_to_seed

ACTOR, CRITIC = 1e-4, 1e-3  # Adam's learning rates (paper VII-C)
_LAYERS = [64, 64, 64]

# steps so far, mean reward of a round over that of one iteration each
Report = Callable[[int, float], None]


class Rollout(NamedTuple):
    """What an update learns from."""

    environments: int = 8
    rounds: int = 256  # of each


class TwoRates(ActorCriticPolicy):  # type: ignore[misc]
    """An actor and a critic that share no layer; one Adam with a group of parameters for each."""

    def _build(self, lr_schedule: Any) -> None:
        super()._build(lr_schedule)
        extractor = self.mlp_extractor
        actor = [*extractor.policy_net.parameters(), *self.action_net.parameters()]
        critic = [*extractor.value_net.parameters(), *self.value_net.parameters()]
        groups = [{"params": actor, "lr": ACTOR}, {"params": critic, "lr": CRITIC}]
        self.optimizer = self.optimizer_class(groups, **self.optimizer_kwargs)


class Agent(PPO):  # type: ignore[misc]
    """PPO whose two learning rates stay as they are: stable-baselines3 would set one for both."""

    def _update_learning_rate(self, optimizers: Any) -> None:
        """Leave them."""


def agent(game: Game, seed: int, rollout: Rollout = Rollout()) -> Agent:  # noqa: B008
    """One that has learnt nothing."""
    environments = _environments(game, seed, rollout.environments)
    return Agent(
        TwoRates,
        environments,
        n_steps=rollout.rounds,
        batch_size=64,
        n_epochs=10,
        gamma=1.0,
        gae_lambda=0.98,
        clip_range=0.2,
        seed=seed,
        device="cpu",
        policy_kwargs={"net_arch": {"pi": _LAYERS, "vf": _LAYERS}},
    )


def learn(
    game: Game,
    steps: int,
    seed: int,
    checkpoint: Path,
    report: Report,
    rollout: Rollout = Rollout(),  # noqa: B008
) -> Agent:
    """Train until so many rounds have been played in all;
    goes on from the checkpoint if there is one.

    A training that was interrupted goes on with fresh random numbers: it ends well, but not with
    the same bytes.

    Raises:
        UsageError: the checkpoint is of an agent for another number of sensors or iterations.
    """
    if checkpoint.exists():
        trained: Agent = Agent.load(checkpoint, device="cpu")
        most = trained.action_space.nvec.tolist()
        if most != game.source.sensors * [game.iterations]:
            raise UsageError(
                f"the training in {checkpoint} is of an agent for {len(most)} sensors and up to "
                f"{most[0]} iterations",
                f"write --sensors {len(most)} --iterations {most[0]} to go on with it, or "
                "another --out to begin anew",
            )
        environments = _environments(game, seed, rollout.environments, trained.num_timesteps)
        trained = Agent.load(checkpoint, environments, device="cpu", n_steps=rollout.rounds)
        trained.set_random_seed(seed + trained.num_timesteps)
    else:
        trained = agent(game, seed, rollout)
    if trained.num_timesteps < steps:
        left = steps - trained.num_timesteps
        trained.learn(left, callback=_Progress(checkpoint, report), reset_num_timesteps=False)
        _save(trained, checkpoint)
    return trained


class _Relative(gymnasium.Wrapper):  # type: ignore[misc]
    """Rewards less those of a federation that takes one iteration each, with the same timings."""

    def reset(self, **options: Any) -> Any:
        """The next episode, and what `least` earns in it."""
        found = self.env.reset(**options)
        self._least = iter(self.env.unwrapped.played(Uniform(1)).reward)
        return found

    def step(self, action: Any) -> Any:
        """Play a round."""
        state, reward, *rest = self.env.step(action)
        return state, float(reward - next(self._least)), *rest


def _environments(game: Game, seed: int, count: int, played: int = 0) -> DummyVecEnv:
    """Environments whose episodes differ, also from those of an evaluation with this seed."""
    seeds = [key_to_seed(seed, "training", index, played) for index in range(count)]
    return DummyVecEnv([lambda own=own: _Relative(LineEnv(game, own)) for own in seeds])


class _Progress(BaseCallback):  # type: ignore[misc]
    """Tells and saves after each rollout."""

    def __init__(self, checkpoint: Path, report: Report):
        super().__init__()
        self._checkpoint, self._tell = checkpoint, report

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self._tell(self.num_timesteps, float(self.model.rollout_buffer.rewards.mean()))
        _save(self.model, self._checkpoint)


def _save(trained: Agent, checkpoint: Path) -> None:
    partial = checkpoint.with_suffix(".part.zip")
    trained.save(partial)
    partial.replace(checkpoint)


class Learnt:
    """The agent as a policy in this process: the most probable action."""

    def __init__(self, trained: Agent, game: Game):
        self._agent, self._game = trained, game

    def __call__(self, timing: Timing, round_: int) -> Ints:
        """Decide."""
        action, _ = self._agent.predict(
            self._game.state(np.stack(timing), round_), deterministic=True
        )
        return np.asarray(action, np.int64) + 1


class Graph(nn.Module):
    """Timings in seconds -> decision: what `Game.state` does, then the actor,
    then the most probable actions.
    """

    low: Tensor
    span: Tensor

    def __init__(self, trained: Agent, game: Game):
        super().__init__()
        low, high = torch.from_numpy(bounds(game.source))
        self.register_buffer("low", low)
        self.register_buffer("span", (high - low).clamp(min=1e-12))
        self._rounds, self._most = game.rounds, game.iterations
        self._actor = nn.Sequential(
            trained.policy.mlp_extractor.policy_net, trained.policy.action_net
        )

    def forward(self, timing: Tensor, round_: Tensor) -> Tensor:
        """[3, K] float64 seconds, int64 [1] -> E int64 [K]."""
        logits: Tensor = self._actor(self.state(timing, round_)[None]).reshape(-1, self._most)
        decision: Tensor = logits.argmax(1) + 1
        return decision

    def state(self, timing: Tensor, round_: Tensor) -> Tensor:
        """What `Game.state` gives, float32 [3 K + 1]."""
        known = torch.stack([timing[0], timing[1], 1 / timing[2]])
        clock = ((round_ - 1) % self._rounds) / self._rounds
        return (
            torch.cat([((known - self.low) / self.span).flatten(), clock.double()])
            .clamp(0, 1)
            .float()
        )


def export(trained: Agent, game: Game, path: Path) -> None:
    """Write the actor, with what `live.OnnxAgent` checks and a reader wants to know as metadata."""
    example = (torch.from_numpy(game.source.ranges[1]), torch.ones(1, dtype=torch.int64))
    graph = Graph(trained, game).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the exporter, of no use to a user
        program: Any = torch.onnx.export(
            graph,
            example,
            input_names=["timing", "round"],
            output_names=["iterations"],
            dynamo=True,
            verbose=False,
        )
    model: onnx.ModelProto = program.model_proto
    low, high = game.source.ranges
    facts = {
        "sensors": game.source.sensors,
        "iterations": game.iterations,
        "rounds": game.rounds,
        "steps": trained.num_timesteps,
        "low": low.tolist(),
        "high": high.tolist(),
    }
    onnx.helper.set_model_props(model, {name: json.dumps(value) for name, value in facts.items()})
    partial = path.with_suffix(".part")
    partial.write_bytes(model.SerializeToString())
    partial.replace(path)
