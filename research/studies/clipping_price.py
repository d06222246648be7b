"""Price of the clipped mean where nobody lies:
accuracy of the same federations with and without its limits.

    python -m research.studies.clipping_price --neu NEU --xsdd XSDD --weights
    mobilenet_v2.safetensors

trains federations of five plants at 64 px on the tuning pool and prints a table: means over data
sets and seeds in %, and differences from the mean, paired by data set, rounds and seed. Results are
kept in a file; what is in it is not run again.

Three ways to share: `disjoint`, three classes and five images a plant; `dirichlet`, five images
each of classes drawn from Dir(0.1); `uneven`, three classes, and 20, 10, 5, 5 and 3 images, which
are FedAvg's weights.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import product, zip_longest
from pathlib import Path
from typing import Literal, get_args

import msgspec
import numpy as np
import torch

from research.runner.statistics import paired_difference
from research.runner.store import Records
from trainer.data import class_folders
from trainer.data.class_folders import Catalogue
from trainer.data.partition import Scheme, Share
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate

Sharing = Literal["disjoint", "dirichlet", "uneven"]
Rule = Literal["clipped_mean", "mean"]
SHARINGS: tuple[Sharing, ...] = get_args(Sharing)
RULES: tuple[Rule, ...] = get_args(Rule)
METHODS = ("fedavg", "afedcl", "afedcl_plus")
NODES, IMAGES, SIZE = 5, 5, 64
UNEVEN = (20, 10, 5, 5, 3)


class Outcome(msgspec.Struct, frozen=True):
    """What a federation reached."""

    method: str
    dataset: str
    sharing: Sharing
    rounds: int  # of training
    seed: int
    rule: Rule
    # %, after the last round, on each plant's held-out images, all classes being candidates
    accuracy: float


def deal(catalogue: Catalogue, sharing: Sharing, seed: int) -> list[Share]:
    """The plants' images."""
    if sharing != "uneven":
        return Scheme(sharing, NODES, IMAGES, seed, {"classes_per_node": 3}, pool="tuning").shares(
            catalogue
        )
    shares = Scheme(
        "disjoint", NODES, max(UNEVEN), seed, {"classes_per_node": 3}, pool="tuning"
    ).shares(catalogue)
    return [
        share._replace(train=first(share.train, count))
        for share, count in zip(shares, UNEVEN, strict=True)
    ]


def first(catalogue: Catalogue, count: int) -> Catalogue:
    """So many images, of all classes in turn."""
    classes = [
        [each for each in catalogue.entries if each.class_name == name]
        for name in catalogue.classes
    ]
    turns = [each for turn in zip_longest(*classes) for each in turn if each]
    return Catalogue(tuple(turns[:count]))


def run(
    catalogue: Catalogue,
    weights: str,
    method: str,
    sharing: Sharing,
    rounds: int,
    seed: int,
    rule: Rule,
) -> float:
    """Accuracy of a federation, %."""
    classes = catalogue.classes
    images = {
        share.node: class_folders.load_both(share.train, share.test, classes, SIZE)
        for share in deal(catalogue, sharing, seed)
    }
    options = {} if method == "afedcl" else {"epochs": 6}  # as many as AFedCL's two stages
    request = Request(method, options, "mobilenet_v2", weights, SIZE, rounds=rounds, seed=seed)
    spec, broadcast = draft(
        request._replace(aggregate=rule), federation="price", classes=classes, nodes=NODES
    )
    models = simulate(spec, broadcast, images, evaluate_every=rounds).models.values()
    return round(
        100 * float(np.mean([model.metadata.metrics["accuracy_own"] for model in models])), 3
    )


def rows(outcomes: Sequence[Outcome]) -> Iterator[list[str]]:
    """A table's rows: for each method and way to share both rules' accuracies,
    and their difference.
    """
    for method, sharing in product(METHODS, SHARINGS):
        there = [each for each in outcomes if (each.method, each.sharing) == (method, sharing)]
        clipped, plain = (
            {
                (each.dataset, each.rounds, each.seed): each.accuracy
                for each in there
                if each.rule == rule
            }
            for rule in RULES
        )
        if price := paired_difference(clipped, plain):
            means = (f"{np.mean([*each.values()]):.1f}" for each in (plain, clipped))
            yield [
                method,
                sharing,
                str(price.pairs),
                *means,
                f"{price.mean:+.1f} ± {price.half:.1f}",
            ]


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--neu", type=Path, required=True, help="class folders of NEU-CLS")
    parser.add_argument("--xsdd", type=Path, required=True, help="class folders of X-SDD")
    parser.add_argument("--weights", required=True, help="ImageNet's MobileNetV2")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--sharings", nargs="+", choices=SHARINGS, default=SHARINGS)
    parser.add_argument(
        "--out", type=Path, default=Path("research/results/studies/clipping_price.jsonl")
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    catalogues = {"NEU-CLS": class_folders.scan(asked.neu), "X-SDD": class_folders.scan(asked.xsdd)}
    records = Records(asked.out, Outcome)
    known = {msgspec.structs.replace(each, accuracy=0) for each in records}
    for seed, sharing, method, dataset, rule in product(
        asked.seeds, asked.sharings, asked.methods, catalogues, RULES
    ):
        outcome = Outcome(method, dataset, sharing, asked.rounds, seed, rule, accuracy=0)
        if outcome not in known:
            accuracy = run(
                catalogues[dataset], asked.weights, method, sharing, asked.rounds, seed, rule
            )
            records.add(msgspec.structs.replace(outcome, accuracy=accuracy))
    header = [["method", "shared", "federations", "mean", "clipped_mean", "price"], ["---"] * 6]
    print("\n".join(f"| {' | '.join(row)} |" for row in [*header, *rows(list(records))]))


if __name__ == "__main__":
    main()
