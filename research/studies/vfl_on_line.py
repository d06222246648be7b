"""An agent that learns to decide on the line itself (Wang et al., 2025, Algorithm 2):
rewards of real federations.

`python -m research.studies.vfl_on_line --cmapss FOLDER --agent FOLDER/agent.zip [--episodes 20]`:
C-MAPSS FD002, two sensors, accuracy on held-out engines of the training file. An episode is a
federation of its own, and what an update learns from; a line of JSON says its mean reward beyond
that of one iteration each. `--agent` is the file that is learnt on: a copy of what `python -m
research agent` has left, or none yet.
"""

import argparse
import json
from itertools import count
from pathlib import Path

import torch
from msgspec.structs import replace

from edge_node.extensions.vfl.simulation import Simulation
from research.dao_vfl import data
from research.dao_vfl.grids import Plan
from research.dao_vfl.policies.learners import Played
from research.dao_vfl.policies.learning_curve import FD002
from research.dao_vfl.policies.ppo import Agent, Rollout, learn
from research.dao_vfl.policies.problem import Game, simulated
from research.dao_vfl.presets import PRESETS
from research.dao_vfl.run import spec
from research.runner.machine import TORCH

_SEED = 1000  # of the first federation: no grid has it


def main() -> None:
    """Learn, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cmapss", type=Path, required=True)
    parser.add_argument("--agent", type=Path, required=True)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    game = on_line(options.cmapss)
    played = Agent.load(options.agent, device="cpu").num_timesteps if options.agent.exists() else 0
    rollout = Rollout(environments=1, rounds=game.rounds)
    learn(
        game, played + options.episodes * game.rounds, options.seed, options.agent, _tell, rollout
    )


def on_line(folder: Path) -> Game:
    """The game whose every episode is played by another federation of the preset `cpu`.

    A federation is played twice in a row: for the agent, and for the one iteration each that it is
    compared with.
    """
    digest, source = data.read("cmapss", folder)
    study = PRESETS["cpu"]["cmapss"]
    plan, seeds = Plan({"cmapss": study}, {"cmapss": digest}, TORCH), count(2 * _SEED)

    def begin() -> Played:
        cell = replace(
            plan.base("cmapss", next(seeds) // 2, "tuning"),
            iterations=(study.most,) * study.sensors,
        )
        parts = data.split(cell.split, source, cell.seed, cell.window.start)
        return Played(Simulation(spec(cell, parts), parts.stream), *parts.held_out)

    return simulated(study.sensors, study.most, study.rounds, FD002)._replace(learner=begin)


def _tell(played: int, reward: float) -> None:
    print(json.dumps({"rounds": played, "reward": round(reward, 4)}), flush=True)


if __name__ == "__main__":
    main()
