"""Damage that liars do to a federation under each aggregation rule: accuracy of the honest nodes.

    python -m research.studies.attacks NEU --nodes 5 --liars 1 --out attacks.jsonl
    python -m research.studies.attacks --table --out attacks.jsonl

Each federation is simulated: NEU-CLS, MobileNetV2 from the weights that come with edge-node, images
dealt evenly or (`--partition disjoint`) three classes to a node. The last nodes lie, in every
round, and what they send passes the coordinator's checks; a rule reckons with as many liars as
there are. A finished federation is a line of the file, and is not run again. Accuracies are of the
last round, on the held-out images of the honest nodes. The same nodes without an attack (`none`)
stand beside them, under each rule. The backdoor's success is the share of the honest nodes'
held-out images of other classes that, with the patch, are taken for the target. The attacks:

- sign flip: the update, reversed and 4 times as long. Scaling: the update, 10 times as long.
- L_D inflation: a sign flip by a node that reports the largest weight that counts.
- noise: normal noise as wide as each tensor, added to it.
- label flip: the liar trains with labels in reverse order.
- backdoor: half of its images carry a patch and the target's label, and its update is 4 times as
  long.
- within limits: liars who know the clipped mean's rule, and what the honest nodes send: they move
  each tensor against the honest nodes' mean update, as far and with such a weight as is just not
  limited.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Literal, get_args

import msgspec
import numpy as np
import torch

from broker_config.protocol.errors import EdgeNodeError
from broker_config.protocol.messages import Spec
from research.runner.store import Records
from trainer.data import class_folders
from trainer.data.class_folders import Catalogue, LabelledImages
from trainer.data.partition import Scheme, Share
from trainer.data.training_set import TrainingSet
from trainer.federation.server.aggregation import largest
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import Tamper, simulate
from trainer.methods.afedcl import CHANCE
from trainer.methods.base import MAX_IMAGES_WEIGHT
from trainer.models.named_tensors import Arrays
from trainer.models.network import Network
from trainer.seeding import generator
from trainer.training.engine import predict
from trainer.training.participant import Contributed
from trainer.training.personal_model import PersonalModel

Attack = Literal[
    "none",
    "sign flip",
    "scaling",
    "L_D inflation",
    "noise",
    "label flip",
    "backdoor",
    "within limits",
]
Rule = Literal["mean", "clipped_mean", "multi_krum"]
ATTACKS: tuple[Attack, ...] = get_args(Attack)
RULES: tuple[Rule, ...] = get_args(Rule)
TARGET = 0  # the backdoor's class
MODEL, WEIGHTS, SIZE = "mobilenet_v2", "surface", 64


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One federation."""

    method: str
    pool: str
    nodes: int
    liars: int  # as many lie, but for `none`, and the rule reckons with as many
    attack: Attack
    rule: Rule
    seed: int
    rounds: int
    samples: int  # training images of each node
    partition: str = "iid"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a federation reached: of each node that is honest in all trials of this many liars.

    Empty: it diverged.
    """

    trial: Trial
    accuracy: list[float]
    success: list[float]  # of the backdoor
    seconds: float


def run(trial: Trial, shares: Sequence[Share], classes: Sequence[str]) -> Result:
    """Simulate a federation."""
    images = {
        share.node: class_folders.load_both(share.train, share.test, classes, SIZE)
        for share in shares
    }
    honest, liars = [*images][: -trial.liars], [*images][-trial.liars :]
    if trial.attack != "none":
        for node in liars:
            images[node] = images[node]._replace(
                train=poison(trial, images[node].train, len(classes))
            )
    request = Request(
        method=trial.method,
        options={} if trial.method == "afedcl" else {"epochs": 6},  # as many as AFedCL's two stages
        model=MODEL,
        weights=WEIGHTS,
        size=SIZE,
        rounds=trial.rounds,
        seed=trial.seed,
        aggregate=trial.rule,
        liars=trial.liars if trial.rule == "multi_krum" else 0,
    )
    spec, broadcast = draft(request, federation="attacked", classes=classes, nodes=trial.nodes)
    started = time.monotonic()
    try:
        tamper = tampering(trial, spec, liars)
        models = simulate(
            spec, broadcast, images, tamper=tamper, evaluate_every=trial.rounds
        ).models
    except EdgeNodeError:
        models = {}
    tests = {node: images[node].test for node in honest}
    return Result(
        trial=trial,
        accuracy=[
            round(models[node].metadata.metrics["accuracy_own"], 4) for node in honest if models
        ],
        success=[round(fooled(models[node], spec, tests[node]), 4) for node in honest if models],
        seconds=round(time.monotonic() - started, 1),
    )


def deal(trial: Trial, catalogue: Catalogue) -> list[Share]:
    """The nodes' images."""
    return Scheme(
        trial.partition,
        trial.nodes,
        trial.samples,
        trial.seed,
        {"classes_per_node": 3},
        pool=trial.pool,
    ).shares(catalogue)


def poison(trial: Trial, images: LabelledImages, classes: int) -> LabelledImages:
    """A liar's training images."""
    if trial.attack == "label flip":
        return images._replace(labels=classes - 1 - images.labels)
    if trial.attack == "backdoor":
        chosen = np.arange(len(images.labels)) % 2 == 0
        pixels = np.where(chosen[:, None, None, None], marked(images.images), images.images)
        return images._replace(images=pixels, labels=np.where(chosen, TARGET, images.labels))
    return images


def marked(pixels: np.ndarray) -> np.ndarray:
    """Images [n, S, S, 3] with the backdoor's patch in a corner: a small chequered square."""
    side = pixels.shape[1] // 8
    patch = 255 * ((np.add.outer(np.arange(side), np.arange(side)) // 2) % 2)
    found = pixels.copy()
    found[:, -side:, -side:] = patch[:, :, None]
    return found


def fooled(model: PersonalModel, spec: Spec, test: LabelledImages | None) -> float:
    """The share of images of other classes that the patch turns into the target's."""
    assert test is not None
    others = test.take(np.flatnonzero(test.labels != TARGET))
    ready = TrainingSet.of(others._replace(images=marked(others.images)), spec.preprocessing)
    logits = predict(Network(spec.model, len(spec.classes)), model.tensors, ready)
    return float((logits.argmax(1) == TARGET).mean())


Known = Mapping[tuple[Attack, Rule, int], Result]
"""By attack, rule and seed."""

Update = Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray]
"""(contribution, broadcast, random numbers) -> what is sent."""


def _stretched(factor: float) -> Update:
    return lambda own, start, _: start + np.float32(factor) * (own - start)


SENT: dict[Attack, Update] = {
    "sign flip": _stretched(-4),
    "L_D inflation": _stretched(-4),
    "scaling": _stretched(10),
    "backdoor": _stretched(4),
    "noise": lambda own, start, random: own + random.normal(0, start.std(), own.shape),
}


def tampering(trial: Trial, spec: Spec, liars: Sequence[str]) -> Tamper:
    """What stands between the liars and the server."""
    if trial.attack == "within limits":
        return evading(spec, liars)

    def tamper(node: str, round_: int, contributed: Contributed, broadcast: Arrays) -> Contributed:
        if node not in liars or trial.attack not in SENT:
            return contributed
        random = generator(spec.seed, node, round_, "lie")
        sent = {
            name: admissible(name, SENT[trial.attack](own, broadcast[name], random), spec)
            for name, own in contributed.tensors.items()
        }
        most = 2 * CHANCE if trial.method == "afedcl" else MAX_IMAGES_WEIGHT
        return Contributed(sent, most if trial.attack == "L_D inflation" else contributed.weight)

    return tamper


def evading(spec: Spec, liars: Collection[str]) -> Tamper:
    """Liars that stay within the clipped mean's limits; nodes that are honest train before them."""
    honest: dict[int, list[Contributed]] = {}

    def tamper(node: str, round_: int, contributed: Contributed, broadcast: Arrays) -> Contributed:
        if node not in liars:
            honest.setdefault(round_, []).append(contributed)
            honest.pop(round_ - 1, None)
            return contributed
        seen, beyond = honest[round_], [np.inf] * len(liars)
        sent = {}
        for name, start in broadcast.items():
            if name in contributed.tensors:
                updates = [each.tensors[name] - start.astype(np.float64) for each in seen]
                longest = np.median([*map(np.linalg.norm, map(np.ravel, updates)), *beyond])
                mean = np.mean(updates, axis=0)
                against = -mean * longest / max(float(np.linalg.norm(np.ravel(mean))), 1e-12)
                sent[name] = admissible(name, start + against, spec)
        return Contributed(sent, float(np.median([*(each.weight for each in seen), *beyond])))

    return tamper


def admissible(name: str, values: np.ndarray, spec: Spec) -> np.ndarray:
    """The nearest values that the coordinator does not refuse."""
    most = largest(spec.tensors[name], spec.nodes)
    least = 0.0 if name.endswith("running_var") else -most
    return np.asarray(np.clip(values, least, most), np.float32)


def trials(asked: argparse.Namespace) -> Iterable[Trial]:
    """Those that were asked for; all of one seed, then of the next."""
    for seed, attack, rule in product(asked.seeds, asked.attacks, asked.rules):
        if rule != "multi_krum" or asked.nodes >= 2 * asked.liars + 3:
            yield Trial(
                method=asked.method,
                pool=asked.pool,
                nodes=asked.nodes,
                liars=asked.liars,
                attack=attack,
                rule=rule,
                seed=seed,
                rounds=asked.rounds,
                samples=asked.samples,
                partition=asked.partition,
            )


def main() -> None:
    """Run what is missing, or print tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", help="class folders of NEU-CLS")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("research/results/studies/attacks.jsonl"),
        help="file of lines",
    )
    parser.add_argument(
        "--table", action="store_true", help="print what the file holds, as Markdown"
    )
    parser.add_argument("--method", default="afedcl")
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--liars", type=int, default=1)
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=ATTACKS)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--pool", default="report", help="report; tuning for choices")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--partition", choices=("iid", "disjoint"), default="iid")
    asked = parser.parse_args()
    if asked.table:
        print(tables(list(Records(asked.out, Result))))
        return
    torch.set_num_threads(1)
    catalogue = class_folders.scan(asked.folder)
    records = Records(asked.out, Result)
    finished = {result.trial for result in records}
    for trial in trials(asked):
        if trial not in finished:
            result = run(trial, deal(trial, catalogue), catalogue.classes)
            records.add(result)
            print(f"{trial.attack}, {trial.rule}, seed {trial.seed}: {_told(result)}", flush=True)


def tables(lines: Sequence[Result]) -> str:
    """A Markdown table for each method, pool, partition and number of nodes and liars."""
    groups: dict[tuple[str, str, str, int, int], list[Result]] = defaultdict(list)
    for line in lines:
        trial = line.trial
        groups[trial.method, trial.pool, trial.partition, trial.nodes, trial.liars].append(line)
    return "\n\n".join(_table(*key, group) for key, group in sorted(groups.items()))


def _table(
    method: str, pool: str, partition: str, nodes: int, liars: int, lines: Sequence[Result]
) -> str:
    known = {(line.trial.attack, line.trial.rule, line.trial.seed): line for line in lines}
    rules = [rule for rule in RULES if rule in {rule for _, rule, _ in known}]
    rows = [["attack", *rules], ["---"] * (1 + len(rules))]
    for attack in (attack for attack in ATTACKS if attack in {attack for attack, _, _ in known}):
        rows.append([attack, *(_accuracy(known, attack, rule) for rule in rules)])
    shown: tuple[Attack, ...] = ("none", "backdoor")
    for attack in shown:
        rows.append(
            [
                f"patch taken for the target, {attack}",
                *(_success(known, attack, rule) for rule in rules),
            ]
        )
    seeds = len({seed for _, _, seed in known})
    title = f"{method}, {partition}, {pool} pool, {liars} of {nodes} lie, {seeds} seed(s)"
    title += ": accuracy % (points against `mean`, `none`)"
    return "\n".join([title, "", *(f"| {' | '.join(row)} |" for row in rows)])


def _accuracy(known: Known, attack: Attack, rule: Rule) -> str:
    found = {
        seed: _percent(line.accuracy)
        for (a, r, seed), line in known.items()
        if (a, r) == (attack, rule)
    }
    if not found:
        return ""
    clean = {
        seed: _percent(known["none", "mean", seed].accuracy)
        for seed in found
        if ("none", "mean", seed) in known
    }
    lost = [found[seed] - clean[seed] for seed in clean]
    spread = f" ± {np.std([*found.values()], ddof=1):.1f}" if len(found) > 1 else ""
    return f"{np.mean([*found.values()]):.1f}{spread}" + (
        f" ({np.mean(lost):+.1f})" if lost else ""
    )


def _success(known: Known, attack: Attack, rule: Rule) -> str:
    found = [
        _percent(line.success) for (a, r, _), line in known.items() if (a, r) == (attack, rule)
    ]
    return f"{np.mean(found):.1f}" if found else ""


def _percent(shares: Sequence[float]) -> float:
    """The nodes' mean; what has diverged leaves no model, and counts as zero."""
    return float(100 * np.mean(shares)) if shares else 0.0


def _told(line: Result) -> str:
    if not line.accuracy:
        return "diverged"
    return (
        f"{100 * np.mean(line.accuracy):.1f} %, backdoor {100 * np.mean(line.success):.1f} %, "
        f"{line.seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
