"""Train an agent, write it, and see how it stands beside the rules."""

from functools import partial
from pathlib import Path
from typing import Any

from trainer.vertical.adaptive.compare import summary
from trainer.vertical.adaptive.curve import FD002
from trainer.vertical.adaptive.game import surrogate
from trainer.vertical.adaptive.latency import Source
from trainer.vertical.adaptive.ppo import Learnt, Report, export, learn
from trainer.vertical.adaptive.rules import RULES

_SEEDS = range(1000, 1010)  # of the comparison


def train(source: Source, iterations: int, rounds: int, steps: int, seed: int, out: Path, report: Report) -> Any:
    """Write the agent to `out`, its checkpoint beside it; return each policy's means, the best reward first."""
    game = surrogate(source, iterations, rounds, FD002)
    agent = learn(game, steps, seed, out.with_suffix(".zip"), report)
    export(agent, game, out)
    policies = {name: partial(rule, iterations) for name, rule in RULES.items()}
    found = summary(game, {**policies, "agent": partial(Learnt, agent, game)}, _SEEDS)
    return {name: each._asdict() for name, each in found.items()}
