"""Comparison of policies: `python -m research.studies.vfl_policies [--agents FOLDER] [--json]`.

All policies on the surrogate, on the same seeds: means over rounds and seeds, the best reward
first. `best` knows the learning curve and how timings are distributed, `myopic` too but looks at
its own round only. Agents are FOLDER/k2e5.onnx for 2 sensors and E_max 5 (python -m research
agent). Real federations: `dao-vfl fig10`.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from edge_node.extensions.vfl.policies.iteration_rules import RULES
from edge_node.extensions.vfl.policies.policy import Policy
from edge_node.extensions.vfl.policies.selection import OnnxAgent
from research.dao_vfl.policies.compare import Summary, summary
from research.dao_vfl.policies.learning_curve import FD002
from research.dao_vfl.policies.optimum import Optimum
from research.dao_vfl.policies.problem import Game, simulated

_SIZES = ((2, 5), (2, 10), (4, 5), (4, 10))
_TITLES = {"all": "HO (`all`)", "one": "HE (`one`)", "agent": "PPO"}


def main() -> None:
    """Play and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=Path, default=Path("agents"))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--most", type=int, help="this E_max only")
    parser.add_argument("--only", help="these policies, with commas between")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for sensors, iterations in _SIZES:
        if options.most not in (None, iterations):
            continue
        game = simulated(sensors, iterations, options.rounds, FD002)
        makers = policies(game, options.agents / f"k{sensors}e{iterations}.onnx")
        makers = {name: makers[name] for name in (options.only or ",".join(makers)).split(",")}
        means = summary(game, makers, range(options.seeds))
        if options.json:
            rows = {name: each._asdict() for name, each in means.items()}
            print(
                json.dumps({"sensors": sensors, "iterations": iterations, "policies": rows}),
                flush=True,
            )
        else:
            print(
                f"\n{sensors} sensors, E_max {iterations}: {game.weights}\n\n{table(means)}",
                flush=True,
            )


def policies(game: Game, agent: Path) -> dict[str, Callable[[], Policy]]:
    """All of them, each to be made anew; the agent if there is one."""
    known = partial(Optimum, game.iterations, FD002, game.weights, game.source, game.rounds)
    best, myopic = known(), known(False)
    found: dict[str, Callable[[], Policy]] = {
        name: partial(rule, game.iterations) for name, rule in RULES.items()
    }
    found |= {"best": lambda: best, "myopic": lambda: myopic}
    return found | ({"agent": partial(OnnxAgent, agent)} if agent.exists() else {})


def table(means: Mapping[str, Summary]) -> str:
    """Markdown; latencies beside HO's."""
    ho = means["all"].latency
    lines = [
        "| policy | reward | latency, s | against HO | disparity | accuracy | E |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {_TITLES.get(name, f'`{name}`')} | {each.reward:.3f} | {each.latency:.1f} | "
        f"{each.latency / ho - 1:+.0%} | {each.disparity:.2f} | {each.accuracy:.4f} | "
        f"{each.iterations:.2f} |"
        for name, each in sorted(means.items(), key=lambda item: -item[1].reward)
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
