"""Worth of choosing encoder and input size by left-out losses, against the fixed default.

    python -m research.studies.encoder_choice neu=NEU xsdd=XSDD --cache FOLDER --out FILE.jsonl

For each federation of five plants with three classes each, a line is stored: of each candidate of
`--weights auto` the loss of an image that is left out, as plants tell it, and the accuracy of the
consensus head on held-out images, in 0..1. *own*: a plant's images, its own classes being the
candidates; *all*: every plant's images, every class being a candidate. Each encoder has the weights
that come with the package, so MobileNetV2 has those of drawn surfaces. `--tables` prints the means.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import product
from pathlib import Path

import msgspec
import numpy as np

from research.runner.store import Records
from research.studies.frozen_heads import read_features
from trainer.data import class_folders
from trainer.data.class_folders import Catalogue
from trainer.data.image_groups import group_entries
from trainer.data.partition import Scheme, select_pool
from trainer.models.catalogue import CANDIDATE_SIZES, CANDIDATES
from trainer.models.initial_weights import choose_weights
from trainer.statistics import lda_head
from trainer.statistics.label_doubts import find_judged
from trainer.statistics.lda_head import leave_one_out
from trainer.statistics.sums import collect
from trainer.training.preview import cross_entropy

NODES = 5
SAMPLES = (5, 10, 20)
TESTED = 40  # held-out images of a plant
FIXED = "efficientnet_lite0_mid@224"


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One federation."""

    dataset: str
    samples: int  # training images of each plant
    seed: int


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One encoder at one size."""

    loss: float
    own: float
    all: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the store."""

    trial: Trial
    candidates: dict[str, Candidate]  # by MODEL@SIZE

    @property
    def chosen(self) -> Candidate:
        """The one that costs least."""
        return min(self.candidates.values(), key=lambda each: each.loss)


class Plant(msgspec.Struct, frozen=True, kw_only=True):
    """Positions of a plant's images in the pool, and the groups of those that train."""

    train: np.ndarray
    test: np.ndarray
    sets: list[list[int]]


def share(catalogue: Catalogue, trial: Trial) -> list[Plant]:
    """Share a pool among plants."""
    groups = group_entries(catalogue.entries, {})
    places = {entry.digest: place for place, entry in enumerate(catalogue.entries)}
    scheme = Scheme(
        "disjoint",
        NODES,
        trial.samples,
        trial.seed,
        {"classes_per_node": 3},
        pool="tuning",
        test_samples=TESTED,
    )
    plants = []
    for each in scheme.shares(catalogue, groups=groups):
        sets: dict[int, list[int]] = {}
        for position, entry in enumerate(each.train.entries):
            sets.setdefault(groups[entry.digest], []).append(position)
        train, test = (
            np.array([places[entry.digest] for entry in side.entries])
            for side in (each.train, each.test)
        )
        plants.append(Plant(train=train, test=test, sets=list(sets.values())))
    return plants


def judge(features: np.ndarray, labels: np.ndarray, plants: Sequence[Plant]) -> Candidate:
    """Judge a candidate by the features [n, V, d] of the pool's images."""
    classes = int(labels.max()) + 1
    sums = [collect(features[each.train], labels[each.train], classes) for each in plants]
    total = reduce(lambda one, other: one.combine(other, np.add), sums)
    everyone = np.unique(np.concatenate([each.test for each in plants]))
    loss = 0.0
    images = 0
    own = []
    every = []
    for plant, mine in zip(plants, sums, strict=True):
        truth = labels[plant.train]
        logits, _ = leave_one_out(total, mine, features[plant.train], truth, plant.sets)
        judged = find_judged(total, truth, plant.sets)
        loss += cross_entropy(logits[judged], truth[judged])
        images += len(judged)
        head = lda_head.fit(total, mine)
        known = np.unique(truth)
        named = known[head.logits(features[plant.test, 0])[:, known].argmax(1)]
        own.append(np.mean(named == labels[plant.test]))
        every.append(np.mean(head.logits(features[everyone, 0]).argmax(1) == labels[everyone]))
    return Candidate(loss=loss / max(1, images), own=float(np.mean(own)), all=float(np.mean(every)))


def tables(results: Sequence[Result]) -> Iterator[str]:
    """Print what the choice gives, over the fixed default."""
    yield "dataset n federations | fixed own, all | chosen over it own, all (95 %) | best own"
    cells = sorted({(each.trial.dataset, each.trial.samples) for each in results})
    groups = [
        (f"{name} {samples}", [e for e in results if (e.trial.dataset, e.trial.samples) == key])
        for key in cells
        for name, samples in (key,)
    ]
    for title, found in [*groups, ("every", list(results))]:
        fixed = [each.candidates[FIXED] for each in found]
        told = []
        for view in ("own", "all"):
            over = [
                100 * (getattr(each.chosen, view) - getattr(base, view))
                for each, base in zip(found, fixed, strict=True)
            ]
            half = 1.96 * np.std(over, ddof=1) / len(over) ** 0.5
            told.append(f"{np.mean(over):+.1f} ± {half:.1f}")
        best = np.mean([max(c.own for c in each.candidates.values()) for each in found])
        yield (
            f"{title} {len(found)} | {100 * np.mean([e.own for e in fixed]):.1f} "
            f"{100 * np.mean([e.all for e in fixed]):.1f} | {', '.join(told)} | {100 * best:.1f}"
        )


def main() -> None:
    """Run what is not stored yet, or print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--cache", type=Path, default=Path("runs/features"))
    parser.add_argument("--out", type=Path, default=Path("runs/encoder_choice.jsonl"))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--tables", action="store_true")
    asked = parser.parse_args()
    records = Records(asked.out, Result)
    known = {each.trial for each in records}
    for name, _, folder in (each.partition("=") for each in asked.data):
        catalogue = select_pool(class_folders.scan(Path(folder)), "tuning")
        labels = np.array(
            [catalogue.classes.index(entry.class_name) for entry in catalogue.entries]
        )
        features = {
            f"{model}@{size}": read_features(
                catalogue, model, choose_weights(model), size, asked.cache
            )
            for size, model in product(CANDIDATE_SIZES, CANDIDATES)
        }
        for seed, samples in product(range(asked.seeds), SAMPLES):
            trial = Trial(dataset=name, samples=samples, seed=seed)
            if trial not in known:
                plants = share(catalogue, trial)
                judged = {key: judge(each, labels, plants) for key, each in features.items()}
                records.add(Result(trial=trial, candidates=judged))
    if asked.tables:
        print("\n".join(tables(list(records))))


if __name__ == "__main__":
    main()
