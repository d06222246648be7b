"""Training of an agent, and its comparison with the rules."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from edge_node.extensions.vfl.policies.iteration_rules import RULES
from edge_node.extensions.vfl.policies.latency import TimingSource
from research.dao_vfl.policies.compare import Summary, summary
from research.dao_vfl.policies.learning_curve import Curve
from research.dao_vfl.policies.ppo import Learnt, Report, export, learn
from research.dao_vfl.policies.problem import surrogate

_SEEDS = range(1000, 1010)  # of the comparison


def train(
    source: TimingSource,
    curve: Curve,
    iterations: int,
    rounds: int,
    steps: int,
    seed: int,
    out: Path,
    report: Report,
) -> dict[str, Summary]:
    """Write the agent to `out`, its checkpoint beside it; return each policy's means,
    the best reward first.

    Timings are drawn from `source`, accuracy follows `curve`.

    Raises:
        UsageError: as `ppo.learn` does.
    """
    game = surrogate(source, iterations, rounds, curve)
    agent = learn(game, steps, seed, out.with_suffix(".zip"), report)
    export(agent, game, out)
    policies = {name: partial(rule, iterations) for name, rule in RULES.items()}
    return summary(game, {**policies, "agent": partial(Learnt, agent, game)}, _SEEDS)


def table(found: Mapping[str, Summary], console: Console) -> None:
    """Print the policies side by side."""
    shown = Table(title=f"rounds that the agent has not seen, means of {len(_SEEDS)} seeds")
    for column in ("who decides", "iterations", "latency s", "disparity", "accuracy", "reward"):
        shown.add_column(column, justify="left" if column == "who decides" else "right")
    for name, each in found.items():
        numbers = (each.iterations, each.latency, each.disparity, each.accuracy, each.reward)
        shown.add_row(
            name, *(f"{number:.3f}" for number in numbers), style="bold" if name == "agent" else ""
        )
    console.print(shown)
