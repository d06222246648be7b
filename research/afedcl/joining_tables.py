"""Tables of what joining gives each node: for each setting,
and for each rule that might decide what is deployed.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from research.afedcl import labels
from research.afedcl.cell import Finished, NodeResult, Setting
from research.afedcl.joining import (
    DEPLOYED,
    MIXED,
    MIXING,
    MIXINGS,
    RULES,
    SIZES,
    TOGETHER,
    VALIDATION,
    Candidates,
    Outcome,
    candidates,
    choose,
    judge,
    pairs,
    served,
)
from research.runner.tables import Table

GAINS = (
    "Gains of joining: accuracy among a node's own classes minus that of training alone, "
    "percentage points, mean over nodes and seeds; in brackets the number of nodes below alone "
    "by anything, then of those below it for certain, whose paired 95 % interval (Newcombe) "
    "lies wholly below -3 points. *together*: the federation's model; *mixed*: it and the "
    f"node's own, {MIXING}; both on all held-out images. *deployed*: {DEPLOYED}, chosen on "
    f"{VALIDATION} held-out images and judged on the others, mean over 20 draws (so numbers of "
    "nodes are not whole); *regret*: how far that is below the best of the three. *As a line "
    "judges by default*: all classes are candidates, those that the node has no image of at a "
    "fifth of the weight."
)
RULED = (
    "The last two tables are of the tuning pool: what each way of mixing and each rule gives "
    "there, and each rule's regret; by these the rule was chosen."
)

# by setting and method: node by node, seed by seed
_Nodes = Mapping[tuple[Setting, str], Sequence[Candidates]]


def gains(finished: Sequence[Finished]) -> list[Table]:
    """A table for each setting, and one over all of them;
    none where nodes' outputs are not stored.
    """
    places: dict[str, dict[str, list[Candidates]]] = defaultdict(lambda: defaultdict(list))
    for (setting, method), nodes in _nodes(
        finished, partial(candidates, mixing=MIXINGS[MIXING])
    ).items():
        for title in (_title(setting), "all settings"):
            places[title][method] += nodes
    if len(places) > 1:
        # last; it is the only other one if there is one setting
        places["all settings"] = places.pop("all settings")
    heads = ["", "nodes", "alone, %", "together", "mixed", "deployed", "regret"]
    found = [
        Table(
            f"Gains of joining, {title}",
            heads,
            [[_name(method), *_row(nodes)] for method, nodes in methods.items()],
        )
        for title, methods in places.items()
        if title != "all settings" or len(places) > 2
    ]
    rows = [
        [f"{_name(method)}, {_title(setting)}", *_row(nodes)]
        for (setting, method), nodes in _nodes(finished, served).items()
    ]
    return [
        *found,
        *([Table("Gains of joining, as a line judges by default", heads, rows)] if rows else []),
    ]


def rules(finished: Sequence[Finished]) -> list[Table]:
    """What each way of mixing and each rule would have given;
    none where nodes' outputs are not stored.
    """
    nodes = {
        name: _nodes(finished, partial(candidates, mixing=mixing))
        for name, mixing in MIXINGS.items()
    }
    if not nodes[MIXING]:
        return []
    methods = list(dict.fromkeys(method for _, method in nodes[MIXING]))
    heads = [f"{_name(method)}, {len(_of(nodes[MIXING], [method]))} nodes" for method in methods]
    always = [
        [
            name,
            *(_entry([judge(each, MIXED)] for each in _of(found, [method])) for method in methods),
        ]
        for name, found in nodes.items()
    ]
    chosen = {
        size: [choose(each, RULES, size) for each in _of(nodes[MIXING], methods)] for size in SIZES
    }
    judged = [
        [rule, *(_with_regret([each[rule] for each in found]) for found in chosen.values())]
        for rule in RULES
    ]
    return [
        Table("Always mixed, by the way of mixing", ["", *heads], always),
        Table(
            f"Rules; mixed are {MIXING}",
            ["", *(f"{size} images looked at" for size in SIZES)],
            judged,
        ),
    ]


def _nodes(
    finished: Sequence[Finished], look: Callable[[NodeResult, NodeResult], Candidates | None]
) -> _Nodes:
    found: dict[tuple[Setting, str], list[Candidates]] = defaultdict(list)
    for alone, joined in pairs(
        sorted(finished, key=lambda each: (labels.order(each.cell), each.cell.seed))
    ):
        for one, other in zip(alone.nodes, joined.nodes, strict=True):
            if node := look(one, other):
                found[joined.cell.setting, joined.cell.method].append(node)
    return found


def _of(nodes: _Nodes, methods: Sequence[str]) -> list[Candidates]:
    return [each for (_, method), found in nodes.items() if method in methods for each in found]


def _row(nodes: Sequence[Candidates]) -> list[str]:
    alone = 100 * float(np.mean([each.right[0].mean() for each in nodes]))
    fixed = [_entry([judge(each, side)] for each in nodes) for side in (TOGETHER, MIXED)]
    deployed = [choose(each, {DEPLOYED: RULES[DEPLOYED]}, VALIDATION)[DEPLOYED] for each in nodes]
    return [str(len(nodes)), f"{alone:.1f}", *fixed, _entry(deployed), _regret(deployed)]


def _entry(nodes: Iterable[Sequence[Outcome]]) -> str:
    """Gain, and numbers of nodes below alone; of each node the outcome of every draw."""
    nodes = list(nodes)
    gain = 100 * float(np.mean([each.gain for node in nodes for each in node]))
    below, worse = (
        sum(float(np.mean(each)) for each in counted)
        for counted in (
            [[each.below for each in node] for node in nodes],
            [[each.worse for each in node] for node in nodes],
        )
    )
    return f"{round(gain, 1) + 0.0:+.1f} ({below:.3g}; {worse:.3g})"


def _with_regret(nodes: Sequence[Sequence[Outcome]]) -> str:
    return f"{_entry(nodes)}, regret {_regret(nodes)}"


def _regret(nodes: Iterable[Sequence[Outcome]]) -> str:
    return f"{100 * float(np.mean([each.regret for node in nodes for each in node])):.1f}"


def _title(setting: Setting) -> str:
    classes = f", {setting.classes_per_node} classes" if setting.partition == "disjoint" else ""
    partition = labels.PARTITIONS.get(setting.partition, setting.partition)
    return f"{setting.dataset}, {partition}{classes}, {setting.samples} images a node"


def _name(method: str) -> str:
    return labels.METHODS.get(method, method)
