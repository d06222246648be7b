"""The consensus head against its nearest relatives,
which also make a head of one message from each plant.

    python -m research.studies.one_message_relatives neu=NEU xsdd=XSDD --weights
    mobilenet_v2.safetensors

runs what is missing of federations of five plants, whose encoder nobody trains, and prints a table:
means over settings and seeds, in %, and how far `gaussian` lies above each, with 95 % intervals
whose blocks are the settings (means over seeds). All methods have the same images and features.
`own` and `all` are those of `consensus_head`.

- `own sums alone`: the consensus head of a plant that knows no other.
- `FedNCM` (Legate et al., NeurIPS 2023): a class is the direction of all its images' mean.
- `pooled means`: the consensus head with one mean of each class for all.
- `FedCGS` (Guan et al., AAAI 2025): one Gaussian classifier for all, as if one plant had all
  images; shrunk as our covariance is, and with no class likelier beforehand.
- `AFL` (He et al., CVPR 2025): ridge regression on one-hot labels, from sums of Gram matrices.
- `FedPFT` (Beitollahi et al., 2024): each plant sends one Gaussian with a diagonal covariance for
  each of its classes; a logistic regression learns from as many draws as there were features.

An image counts by its eight views everywhere. What AFL and FedPFT leave open was chosen on `--pool
tuning`, which runs the candidates instead: the best mean of own and all.

MB are what a plant sends, in float32: symmetric matrices by half, tables of all classes but where a
method sends its plant's classes one by one (FedNCM, FedPFT). The product's sums are int64, twice as
long.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from sklearn.linear_model import LogisticRegression

from research.runner.statistics import paired_difference
from research.runner.store import Records
from research.runner.tables import Table, format_difference
from research.studies.consensus_head import SAMPLES, Features, Logits, Trial, deal, extract, judge
from trainer.data import class_folders
from trainer.data.partition import select_pool
from trainer.seeding import generator
from trainer.statistics import lda_head
from trainer.statistics.sums import VIEWS, Sums, collect, shapes

PARTITIONS = (("disjoint", 3), ("dirichlet", 0))  # and classes a plant
RIDGES = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 10.0)  # of AFL: candidates, and the choice
RIDGE = 0.01
PENALTIES = (1.0, 10.0, 100.0, 1000.0)  # of FedPFT's regression, inverse; likewise
PENALTY = 100.0
BASE = "gaussian"


class Federation(NamedTuple):
    """What the plants' messages are made of."""

    plants: Sequence[Features]
    sums: Sequence[Sums]  # of each plant
    total: Sums
    seed: int

    @staticmethod
    def of(plants: Sequence[Features], classes: int, seed: int) -> "Federation":
        """With the sums of these plants' training images."""
        sums = [collect(plant.views, plant.labels, classes) for plant in plants]
        return Federation(
            plants, sums, reduce(lambda one, other: one.combine(other, np.add), sums), seed
        )

    def linear(self, weight: np.ndarray) -> list[Logits]:
        """The same linear head for each plant; a class that nobody has is never named."""
        lowest = np.where(self.total.images > 0, 0.0, -np.inf)
        return [lambda features: features @ weight.T + lowest] * len(self.plants)


class Method(NamedTuple):
    """How the plants' heads are made, and how many numbers a plant sends for it."""

    heads: Callable[[Federation], list[Logits]]
    numbers: Callable[[int, int, int], int]  # of the plant's classes, all classes, dimensions


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One federation; means over plants by method."""

    trial: Trial
    figures: dict[str, tuple[float, float]]  # own, all; shares in 0..1
    megabytes: dict[str, float]
    seconds: float


def gaussian(federation: Federation) -> list[Logits]:
    """The head that is deployed."""
    return [lda_head.fit(federation.total, own).logits for own in federation.sums]


def own_sums(federation: Federation) -> list[Logits]:
    """The same without other plants."""
    return [lda_head.fit(own, own).logits for own in federation.sums]


def pooled_means(federation: Federation) -> list[Logits]:
    """The same for a plant without images."""
    total = federation.total
    return [lda_head.fit(total, total.without(total)).logits] * len(federation.plants)


def fedcgs(federation: Federation) -> list[Logits]:
    """FedCGS: what its sums give is the scatter of all plants' images about their common means."""
    views, labels = (
        np.concatenate(each)
        for each in zip(*(plant[:2] for plant in federation.plants), strict=True)
    )
    pooled = collect(views, labels, len(federation.total.images))
    return pooled_means(federation._replace(total=pooled))


def nearest_mean(federation: Federation) -> list[Logits]:
    """FedNCM."""
    sums = federation.total.values().sums
    return federation.linear(
        sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), np.finfo(float).tiny)
    )


def afl(federation: Federation, ridge: float) -> list[Logits]:
    """AFL, with the ridge that each image's views meet in common."""
    cross = federation.total.values().sums
    gram = ridge * np.eye(cross.shape[1])
    for plant in federation.plants:
        flat = plant.views.reshape(-1, cross.shape[1]).astype(float)
        gram += flat.T @ flat / VIEWS
    return federation.linear(np.linalg.solve(gram, cross.T).T)


def fedpft(federation: Federation, inverse_penalty: float) -> list[Logits]:
    """FedPFT."""
    draws, labels = [], []
    for number, plant in enumerate(federation.plants):
        for label in np.unique(plant.labels):
            views = plant.views[plant.labels == label].reshape(-1, plant.views.shape[2])
            noise = generator(federation.seed, "draws", number, int(label)).standard_normal(
                views.shape
            )
            draws.append(views.mean(0) + views.std(0) * noise)
            labels += [label] * len(views)
    model = LogisticRegression(C=inverse_penalty, max_iter=1000).fit(np.concatenate(draws), labels)

    def logits(features: np.ndarray) -> np.ndarray:
        found = np.full((len(features), len(federation.total.images)), -np.inf)
        found[:, model.classes_] = model.predict_log_proba(features)
        return found

    return [logits] * len(federation.plants)


GAUSSIAN = Method(
    gaussian, lambda _, all_, d: sum(int(np.prod(shape)) for shape in shapes(all_, d).values())
)
METHODS = {
    BASE: GAUSSIAN,
    "own sums alone": Method(own_sums, lambda *_: 0),
    "FedNCM": Method(nearest_mean, lambda own, _, d: own * (d + 1)),
    "pooled means": GAUSSIAN._replace(heads=pooled_means),
    # one for the shrinkage
    "FedCGS": Method(fedcgs, lambda _, all_, d: all_ * (d + 1) + d * (d + 1) // 2 + 1),
    "AFL": Method(partial(afl, ridge=RIDGE), lambda _, all_, d: all_ * d + d * (d + 1) // 2),
    "FedPFT": Method(partial(fedpft, inverse_penalty=PENALTY), lambda own, _, d: own * (2 * d + 1)),
}
CANDIDATES = {
    BASE: GAUSSIAN,
    **{
        f"AFL, {each:g}": METHODS["AFL"]._replace(heads=partial(afl, ridge=each)) for each in RIDGES
    },
    **{
        f"FedPFT, {each:g}": METHODS["FedPFT"]._replace(heads=partial(fedpft, inverse_penalty=each))
        for each in PENALTIES
    },
}


def run(
    trial: Trial,
    catalogue: class_folders.Catalogue,
    features: Features,
    methods: Mapping[str, Method],
) -> Outcome:
    """Deal the images, and make and judge each method's heads."""
    started = time.monotonic()
    shares = deal(trial, catalogue, features)
    classes, dimensions = len(catalogue.classes), features.views.shape[2]
    federation = Federation.of([share.train for share in shares], classes, trial.seed)
    figures, megabytes = {}, {}
    for name, method in methods.items():
        judged = [
            judge(head, number, shares) for number, head in enumerate(method.heads(federation))
        ]
        own, _, all_ = np.mean(judged, 0).round(4).tolist()
        figures[name] = (own, all_)
        sent = [method.numbers(len(share.own), classes, dimensions) for share in shares]
        megabytes[name] = 4 * float(np.mean(sent)) / 1e6
    return Outcome(
        trial=trial,
        figures=figures,
        megabytes=megabytes,
        seconds=round(time.monotonic() - started, 1),
    )


def rows(outcomes: Sequence[Outcome]) -> Iterator[list[str]]:
    """A table's rows, one for each method."""
    for name in outcomes[0].figures:
        means, over = [], []
        for view in (0, 1):
            mine, base = (_by_setting(outcomes, each, view) for each in (name, BASE))
            difference = paired_difference(base, mine)
            means.append(f"{np.mean(list(mine.values())):.1f}")
            over.append(format_difference(difference) if difference and name != BASE else "")
        yield [name, *means, *over, f"{np.mean([each.megabytes[name] for each in outcomes]):.3f}"]


def _by_setting(outcomes: Sequence[Outcome], name: str, view: int) -> dict[Trial, float]:
    """A method's accuracy in %, mean over seeds."""
    values: dict[Trial, list[float]] = {}
    for each in outcomes:
        setting = msgspec.structs.replace(each.trial, seed=0)
        values.setdefault(setting, []).append(100 * each.figures[name][view])
    return {setting: float(np.mean(found)) for setting, found in values.items()}


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "data", nargs="+", metavar="NAME=FOLDER", help="class folders of a data set"
    )
    parser.add_argument(
        "--weights", default="imagenet", help="of MobileNetV2: imagenet, or a safetensors file"
    )
    parser.add_argument(
        "--cache", type=Path, default=Path("runs/features"), help="folder for features"
    )
    parser.add_argument(
        "--pool", choices=("report", "tuning"), default="report", help="tuning for choices"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument(
        "--out", type=Path, default=Path("research/results/studies/one_message_relatives.jsonl")
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    methods = METHODS if asked.pool == "report" else CANDIDATES
    records = Records(asked.out, Outcome)
    finished = {each.trial for each in records}
    folders = dict(each.split("=", 1) for each in asked.data)
    for name, folder in folders.items():
        catalogue = class_folders.scan(Path(folder))
        features = extract(
            select_pool(catalogue, asked.pool), "imagenet", asked.weights, asked.cache
        )
        for seed, (partition, classes), samples in product(asked.seeds, PARTITIONS, SAMPLES):
            trial = Trial(
                dataset=name,
                pool=asked.pool,
                partition=partition,
                classes=classes,
                samples=samples,
                seed=seed,
                encoder="imagenet",
            )
            if trial not in finished:
                records.add(run(trial, catalogue, features, methods))
    chosen = [
        each for each in records if each.trial.pool == asked.pool and each.trial.seed in asked.seeds
    ]
    columns = ["", "own", "all", f"{BASE} over it, own", "all", "MB a plant sends"]
    print(Table("", columns, list(rows(chosen))).markdown())
    print(f"\n{len(chosen)} federations, {sum(each.seconds for each in chosen) / 60:.0f} minutes.")


if __name__ == "__main__":
    main()
