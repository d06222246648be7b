"""Detection of unknown images by the consensus head: AUROC of scores that need no training,
on frozen features.

    python -m research.studies.novelty_of_head neu=NEU xsdd=XSDD --weights mobilenet_v2.safetensors
    --cache FOLDER python -m research.studies.novelty_of_head --table

Five plants of three classes share sums of one data set, of which one class is left out. Ordinary
are, for each plant, held-out images of its own classes, one half of which calibrates what needs it
and gives the limit that 5 % of such images pass; the other half is judged, then the halves change
places. Also ordinary, to a head that names all classes, are held-out images of classes that only
other plants were taught. Unknown are the class left out and the other data set. A line of the file
is a federation, and is not computed again. The scores (all: the larger, the stranger):

- held-out image: 1 - cosine to the nearest held-out image (Sun et al. 2022), by which a line
  measures other models.
- training image: to the nearest training image of the plant.
- class mean: 1 - cosine to the nearest class mean. Whitened: in whitened features, seen from the
  middle of the means; `ClassAxes`, by which the line measures. Own classes: to those that the plant
  has.
- Mahalanobis (Lee et al. 2018): from the nearest class mean, by the head's precision. Relative (Ren
  et al. 2021): less the distance from the middle.
- max softmax: of the head's probabilities, at the best temperature.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from edge.bundle.reference import ClassAxes, quantile
from research.runner.store import Records
from research.studies.consensus_head import NODES, Features, extract
from trainer.data import class_folders
from trainer.data.class_folders import Catalogue
from trainer.data.partition import Scheme, select_pool
from trainer.seeding import generator
from trainer.statistics import lda_head
from trainer.statistics.lda_head import Means
from trainer.statistics.sums import collect
from trainer.training.calibration import fit_temperature, softmax

SAMPLES = (5, 10, 20)  # training images a plant
MOST = 100  # images of a kind for each plant
SHARE = 0.05  # of ordinary images that may be doubted
UNKNOWN = {"left out": "class that no plant has", "other": "other data set"}
SCORES = {
    "held-out image": "cosine to the nearest held-out image",
    "training image": "cosine to the nearest own training image",
    "class mean": "cosine to the nearest class mean",
    "whitened": "**whitened cosine to the nearest class mean**",
    "whitened, own classes": "the same, of the plant's own classes",
    "Mahalanobis": "Mahalanobis distance to the nearest class mean",
    "relative": "relative Mahalanobis distance",
    "max softmax": "max softmax",
}
SHORT = ("held-out image", "whitened")
Scores = dict[str, np.ndarray]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One federation."""

    dataset: str
    pool: str
    left_out: str
    samples: int
    seed: int


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a score is worth, means over plants and halves, in 0..1."""

    own: dict[str, float]  # AUROC by kind of unknown images, against images of own classes
    all: dict[str, float]  # against images of all taught classes
    # shares beyond the limit: of own classes, of others' classes, of unknown images
    doubted: dict[str, float]


class Judge(NamedTuple):
    """What a plant knows."""

    means: Means
    precision: np.ndarray  # [d, d]
    axes: ClassAxes
    train: Features


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the store."""

    trial: Trial
    scores: dict[str, Figures]
    seconds: float


def run(trial: Trial, catalogue: Catalogue, features: Features, other: np.ndarray) -> Result:
    """Deal the images without one class, make the plants' heads, and show them all kinds of images.

    `other` are features [n, d] of the other data set.
    """
    started = time.monotonic()
    classes = catalogue.classes
    known = Catalogue(
        tuple(entry for entry in catalogue.entries if entry.class_name != trial.left_out)
    )
    shares = Scheme(
        "disjoint", NODES, trial.samples, trial.seed, {"classes_per_node": 3}, pool=trial.pool
    ).shares(known)
    dealt = [features.take(share.train) for share in shares]
    sums = [collect(each.views, each.labels, len(classes)) for each in dealt]
    total = sums[0]
    for each in sums[1:]:
        total = total.combine(each, np.add)
    spread = lda_head.estimate_spread(total.values())
    whitening = lda_head.estimate_whitening(spread)
    trained = {entry.digest for share in shares for entry in share.train.entries}
    untrained = [
        entry for entry in select_pool(known, trial.pool).entries if entry.digest not in trained
    ]
    random = generator(trial.seed, "unknown")

    def some(rows: np.ndarray) -> np.ndarray:
        return rows[random.permutation(len(rows))[:MOST]]

    unseen = features.views[features.labels == classes.index(trial.left_out), 0]
    found: dict[str, list[Figures]] = defaultdict(list)
    for share, train, own in zip(shares, dealt, sums, strict=True):
        means = lda_head.estimate_means(total.without(own).values(), own.values(), spread)
        axes = lda_head.class_axes(means, whitening)
        assert axes is not None
        judge = Judge(means, spread.precision, axes, train)
        test = features.take(share.test)
        foreign = features.take(
            Catalogue(tuple(e for e in untrained if e.class_name not in share.train.classes))
        )
        others = [some(foreign.views[:, 0]), some(unseen), some(other)]
        half = np.zeros(len(test.labels), bool)
        half[np.argsort(test.labels, kind="stable")[::2]] = True  # of each class
        for reference in (half, ~half):
            groups = [test.views[reference, 0], test.views[~reference, 0], *others]
            scores = _scores(judge, groups[0], test.labels[reference], np.concatenate(groups))
            cuts = np.cumsum([len(group) for group in groups])[:-1]
            for name, values in scores.items():
                found[name].append(_figures(*np.split(values, cuts)))
    return Result(
        trial=trial,
        scores={name: _mean(figures) for name, figures in found.items()},
        seconds=round(time.monotonic() - started, 1),
    )


def _scores(judge: Judge, reference: np.ndarray, labels: np.ndarray, images: np.ndarray) -> Scores:
    """The scores of images [n, d], of which the first are those of the reference."""
    means, axes = judge.means.means[judge.means.known], judge.axes
    own = np.isin(np.flatnonzero(judge.means.known), np.unique(judge.train.labels))
    nearest = images @ reference.T
    nearest[: len(reference)] -= 2 * np.eye(len(reference))  # an image is not its own neighbour
    weight, moved = means @ judge.precision, images - axes.middle
    lengths = ((moved @ judge.precision) * moved).sum(1)
    apart = means - axes.middle
    closeness = 2 * moved @ (apart @ judge.precision).T - np.einsum(
        "cd,cd->c", apart @ judge.precision, apart
    )
    logits = np.full((len(images), len(judge.means.known)), -1e6)
    logits[:, judge.means.known] = images @ weight.T - np.einsum("cd,cd->c", weight, means) / 2
    divisor = fit_temperature(logits[: len(reference)], labels)
    return {
        "held-out image": 1 - nearest.max(1),
        "training image": 1 - (images @ judge.train.views[:, 0].T).max(1),
        "class mean": 1 - (images @ _unit(means).T).max(1),
        "whitened": axes.distance(images),
        "whitened, own classes": axes._replace(classes=axes.classes[own]).distance(images),
        "Mahalanobis": lengths - closeness.max(1),
        "relative": -closeness.max(1),
        "max softmax": -softmax(logits / divisor).max(1),
    }


def _unit(vectors: np.ndarray) -> np.ndarray:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def _figures(
    reference: np.ndarray,
    own: np.ndarray,
    others: np.ndarray,
    left_out: np.ndarray,
    other: np.ndarray,
) -> Figures:
    limit = quantile(np.sort(reference), 1 - SHARE)
    unknown = {"left out": left_out, "other": other}
    return Figures(
        own={kind: _auroc(own, values) for kind, values in unknown.items()},
        all={kind: _auroc(np.r_[own, others], values) for kind, values in unknown.items()},
        doubted={
            kind: float((values > limit).mean())
            for kind, values in {"own": own, "others": others, **unknown}.items()
            if len(values)
        },
    )


def _auroc(ordinary: np.ndarray, unknown: np.ndarray) -> float:
    return float(
        roc_auc_score(
            np.r_[np.zeros(len(ordinary)), np.ones(len(unknown))], np.r_[ordinary, unknown]
        )
    )


def _mean(figures: Sequence[Figures]) -> Figures:
    def each(name: str) -> dict[str, float]:
        tables = [getattr(found, name) for found in figures]
        kinds = dict.fromkeys(kind for table in tables for kind in table)
        return {
            kind: round(float(np.mean([table[kind] for table in tables if kind in table])), 4)
            for kind in kinds
        }

    return Figures(own=each("own"), all=each("all"), doubted=each("doubted"))


def tables(lines: Sequence[Result]) -> str:
    """Markdown: AUROC of each score by data set and kind of unknown images,
    and what is doubted; in %.
    """
    found = []
    for pool in sorted({line.trial.pool for line in lines}):
        chosen = [line for line in lines if line.trial.pool == pool]
        sets = list(dict.fromkeys(line.trial.dataset for line in chosen))
        for name, title in (
            ("own", "own classes ordinary"),
            ("all", "all taught classes ordinary"),
        ):
            columns = [(dataset, kind) for kind in UNKNOWN for dataset in sets]
            head = [title, *(f"{dataset}: {UNKNOWN[kind]}" for dataset, kind in columns)]
            rows = [
                [text, *(_spread(chosen, dataset, score, name, kind) for dataset, kind in columns)]
                for score, text in SCORES.items()
            ]
            found.append(_markdown(f"{pool} pool, {len(chosen)} federations: AUROC, %", head, rows))
        kinds = ("own", "others", *UNKNOWN)
        rows = [
            [text, *(_spread(chosen, None, score, "doubted", kind) for kind in kinds)]
            for score, text in SCORES.items()
        ]
        found.append(
            _markdown(
                f"{pool} pool: doubted, %",
                ["score", "own classes", "others' classes", *UNKNOWN],
                rows,
            )
        )
        rows = [
            [
                f"{dataset}, {samples} images",
                *(_one(chosen, dataset, samples, s, k) for s in SHORT for k in UNKNOWN),
            ]
            for dataset, samples in product(sets, SAMPLES)
        ]
        head = [
            "all taught classes ordinary",
            *(f"{score}: {kind}" for score in SHORT for kind in UNKNOWN),
        ]
        found.append(_markdown(f"{pool} pool, by images a plant: AUROC, %", head, rows))
    return "\n\n".join(found)


def _one(lines: Sequence[Result], dataset: str, samples: int, score: str, kind: str) -> str:
    return _spread(
        [line for line in lines if line.trial.samples == samples], dataset, score, "all", kind
    )


def _spread(lines: Sequence[Result], dataset: str | None, score: str, name: str, kind: str) -> str:
    each = [
        100 * getattr(line.scores[score], name)[kind]
        for line in lines
        if dataset in (None, line.trial.dataset)
    ]
    return f"{np.mean(each):.1f} ± {np.std(each, ddof=min(1, len(each) - 1)):.1f}"


def _markdown(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join([title, "", *(f"| {' | '.join(row)} |" for row in lines)])


def main() -> None:
    """Compute what is missing, then print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "data", nargs="*", metavar="NAME=FOLDER", help="class folders of two data sets"
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
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--out", type=Path, default=Path("research/results/studies/novelty_of_head.jsonl")
    )
    parser.add_argument(
        "--table", action="store_true", help="only print what the file holds, as Markdown"
    )
    asked = parser.parse_args()
    if not asked.table:
        _run(asked)
    print(tables(list(Records(asked.out, Result))))


def _run(asked: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    records = Records(asked.out, Result)
    finished = {result.trial for result in records}
    catalogues = {
        name: class_folders.scan(Path(folder))
        for name, folder in (each.split("=", 1) for each in asked.data)
    }
    features = {
        name: extract(select_pool(catalogue, asked.pool), "imagenet", asked.weights, asked.cache)
        for name, catalogue in catalogues.items()
    }
    for seed, samples, (name, other) in product(
        asked.seeds, SAMPLES, zip(features, reversed(features), strict=True)
    ):
        classes = catalogues[name].classes
        for left_out in {classes[seed % len(classes)], classes[(seed + 3) % len(classes)]}:
            trial = Trial(
                dataset=name, pool=asked.pool, left_out=left_out, samples=samples, seed=seed
            )
            if trial not in finished:
                records.add(
                    result := run(
                        trial, catalogues[name], features[name], features[other].views[:, 0]
                    )
                )
                told = result.scores["whitened"].all
                print(trial, told, f"{result.seconds} s", flush=True)


if __name__ == "__main__":
    main()
