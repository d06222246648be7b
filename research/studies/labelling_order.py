"""Labels needed for an accuracy, by the order in which a plant's waiting images are labelled.

    python -m research.studies.labelling_order neu=NEU xsdd=XSDD --cache FOLDER

A plant has two labelled images of each of three classes, alone or beside four plants of three
classes and five images. Its line sees images of all classes, common and rare ones. A person labels
those that wait, five at a time, and the consensus head is made anew with each five. What an image's
order follows from is what the line knew when it saw the image, or (*rescored*) what the newest head
says. Judged by the mean recall of all classes on images apart. A line of the file is one plant, one
order.

- random: as they came, shuffled.
- margin, entropy, novelty: the least probable difference of the two likeliest classes, the greatest
  entropy, the farthest by `Reference.nearest_distance`, first.
- both: the sum of the ranks by margin and novelty (`instructiveness`).
- grouped: the same, of each group of similar images one, then of each a second one
  (`label_order.order`).
"""

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import torch

from edge.bundle.reference import Reference
from edge.labelling.label_order import SimilarityGroups, instructiveness, order
from research.runner.store import Records
from research.studies.consensus_head import Features, extract
from trainer.data import class_folders
from trainer.data.partition import select_pool
from trainer.seeding import generator
from trainer.statistics import lda_head
from trainer.statistics.lda_head import Head
from trainer.statistics.sums import Sums, collect, directions
from trainer.training.calibration import softmax

DIMENSIONS = 256
START, CLASSES = 2, 3  # labelled images of each class in the beginning; classes that have some
OTHERS, OF_OTHERS = 4, 5  # plants, and their images of each of as many classes
RARER = 0.6  # a class has this share of the images of the next more common one
STEP, MOST = 5, 60  # labels between two heads; in all
ORDERS = (
    "random",
    "random, grouped",
    "margin",
    "entropy",
    "novelty",
    "both",
    "margin, grouped",
    "both, grouped",
)
RESCORED = ("margin", "both", "margin, grouped", "both, grouped")
KINDS = (*((name, False) for name in ORDERS), *((name, True) for name in RESCORED))
TOLD, TARGET = (0, 10, 20, 40, 60), 40  # numbers of labels


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One plant that labels in one order."""

    dataset: str
    pool: str
    federated: bool
    order: str
    rescored: bool
    seed: int


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the store."""

    trial: Trial
    waiting: int  # images at the beginning
    groups: int  # of similar images among them
    pure: float  # share of images whose group's most frequent class is theirs
    recall: list[float]  # mean of all classes, with 0, STEP, 2 STEP, ... labels


class Line:
    """A plant, its waiting images, and those on which its heads are judged."""

    def __init__(self, features: Features, trial: Trial) -> None:
        """`features` are whole; heads are made of DIMENSIONS directions of them."""
        random = generator(trial.seed, "labelling order", trial.dataset)
        public = directions(features.views.shape[2], DIMENSIONS)
        self._whole, self._all = (
            features.views[:, 0],
            features._replace(views=features.views @ public.T),
        )
        self._classes = int(features.labels.max()) + 1
        mixed = random.permutation(len(features.labels))
        self._test, seen = np.array_split(mixed, 2)
        by_class = {label: seen[features.labels[seen] == label] for label in range(self._classes)}
        names = random.permutation(self._classes)
        own = names[:CLASSES]
        self.labelled = [int(place) for label in own for place in by_class[label][:START]]
        used = set(self.labelled)
        sums = []
        for _ in range(OTHERS if trial.federated else 0):
            theirs: list[int] = []
            for label in random.permutation(self._classes)[:CLASSES]:
                theirs += [int(place) for place in by_class[label] if place not in used][:OF_OTHERS]
                used |= set(theirs)
            sums.append(self._collect(theirs))
        self._others = sums[0].without(sums[0]) if sums else None
        for each in sums:
            assert self._others
            self._others = self._others.combine(each, np.add)
        rest = {
            label: [place for place in by_class[label] if place not in used]
            for label in range(self._classes)
        }
        most = max(map(len, rest.values()))
        waiting = [
            int(place)
            for rank, label in enumerate(random.permutation(self._classes))
            for place in rest[label][: max(3, round(most * RARER**rank))]
        ]
        self.waiting = random.permutation(waiting)

    def _collect(self, places: Sequence[int]) -> Sums:
        return collect(self._all.views[list(places)], self._all.labels[list(places)], self._classes)

    def head(self) -> Head:
        """That of the labels so far."""
        mine = self._collect(self.labelled)
        return lda_head.fit(mine.combine(self._others, np.add) if self._others else mine, mine)

    def recall(self, head: Head) -> float:
        """Mean share of each class's images that are right."""
        labels = self._all.labels[self._test]
        right = head.logits(self._all.views[self._test, 0]).argmax(1) == labels
        return float(np.mean([right[labels == label].mean() for label in range(self._classes)]))

    def signals(self, head: Head, places: np.ndarray) -> dict[str, np.ndarray]:
        """What the line knows of images."""
        seen = self._all.views[places, 0]
        scaled = softmax(lda_head.expected_scale(head.spread) * head.logits(seen))
        ordered = np.sort(scaled, 1)
        axes = lda_head.class_axes(head.means, lda_head.estimate_whitening(head.spread))
        assert axes
        margin, novelty = (
            1 - (ordered[:, -1] - ordered[:, -2]).astype(np.float32),
            axes.distance(seen),
        )
        return {
            "random": np.zeros(len(places)),
            "margin": margin,
            "entropy": -(scaled * np.log(np.maximum(scaled, 1e-12))).sum(1),
            "novelty": novelty,
            "both": instructiveness(margin, novelty),
        }

    def groups(self) -> np.ndarray:
        """The group of each waiting image, by features that the images with a label standardise."""
        known = self._whole[self.labelled]
        reference = Reference.from_features(known, np.zeros(len(known), np.int64), 1)
        found = SimilarityGroups()
        return np.array(
            [found.add("", reference.embedding(each)) for each in self._whole[self.waiting]],
            np.int64,
        )

    @property
    def truth(self) -> np.ndarray:
        """The classes of the waiting images."""
        return np.asarray(self._all.labels[self.waiting])


def run(trial: Trial, features: Features) -> Result:
    """Label, and judge the head after each step."""
    line = Line(features, trial)
    name, _, grouped = trial.order.partition(", ")
    groups, truth = line.groups(), line.truth
    pure = sum(np.bincount(truth[groups == number]).max() for number in np.unique(groups)) / len(
        groups
    )
    by_group = groups if grouped else np.arange(len(groups))
    head, left = line.head(), np.arange(len(line.waiting))
    scores, recall = line.signals(head, line.waiting)[name], [line.recall(head)]
    turns = order(scores, by_group)
    for _ in range(MOST // STEP):
        if trial.rescored:
            turns = left[order(line.signals(head, line.waiting[left])[name], by_group[left])]
        chosen, turns = turns[:STEP], turns[STEP:]
        left = np.setdiff1d(left, chosen)
        line.labelled += line.waiting[chosen].tolist()
        head = line.head()
        recall.append(round(line.recall(head), 4))
    return Result(
        trial=trial,
        waiting=len(groups),
        groups=len(np.unique(groups)),
        pure=round(float(pure), 4),
        recall=recall,
    )


def tables(lines: Sequence[Result]) -> str:
    """Markdown: recall by labels, and the labels with which an order reaches what TARGET random
    ones give.
    """
    found = []
    for dataset, federated in product(
        dict.fromkeys(line.trial.dataset for line in lines), (False, True)
    ):
        some = [
            line
            for line in lines
            if (line.trial.dataset, line.trial.federated) == (dataset, federated)
        ]
        if not some:
            continue
        goal = np.mean(
            [line.recall[TARGET // STEP] for line in some if line.trial.order == "random"]
        )
        waiting, groups, pure = np.mean(
            [(line.waiting, line.groups, line.pure) for line in some], 0
        )
        head = ["order", *(f"{count} labels" for count in TOLD), f"labels for {100 * goal:.1f} %"]
        rows = [head, ["---"] * len(head)]
        for name, rescored in KINDS:
            recall = 100 * np.array(
                [
                    line.recall
                    for line in some
                    if (line.trial.order, line.trial.rescored) == (name, rescored)
                ]
            )
            cells = [
                f"{recall[:, n // STEP].mean():.1f} ± {recall[:, n // STEP].std(ddof=1):.1f}"
                for n in TOLD
            ]
            reached = np.flatnonzero(recall.mean(0) >= 100 * goal - 1e-6)  # rounding
            needed = str(STEP * reached[0]) if len(reached) else f"> {MOST}"
            rows.append([f"{name}{', rescored' if rescored else ''}", *cells, needed])
        title = f"{dataset}, {'beside four plants' if federated else 'alone'}"
        title = (
            f"{title}: {waiting:.0f} images wait in {groups:.0f} groups, {100 * pure:.0f} % of "
            "them pure"
        )
        found.append("\n".join([title, "", *(f"| {' | '.join(row)} |" for row in rows)]))
    return "\n\n".join(found)


def main() -> None:
    """Compute what is missing, then print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="*", metavar="NAME=FOLDER", help="class folders of data sets")
    parser.add_argument(
        "--cache", type=Path, default=Path("runs/features"), help="folder for features"
    )
    parser.add_argument(
        "--pool", choices=("report", "tuning"), default="report", help="tuning for choices"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(10)])
    parser.add_argument(
        "--out", type=Path, default=Path("research/results/studies/labelling_order.jsonl")
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    records = Records(asked.out, Result)
    finished = {result.trial for result in records}
    for name, folder in (each.split("=", 1) for each in asked.data):
        features = extract(
            select_pool(class_folders.scan(Path(folder)), asked.pool),
            "lite0",
            "imagenet",
            asked.cache,
        )
        for seed, federated, (order_, rescored) in product(asked.seeds, (False, True), KINDS):
            trial = Trial(
                dataset=name,
                pool=asked.pool,
                federated=federated,
                order=order_,
                rescored=rescored,
                seed=seed,
            )
            if trial not in finished:
                records.add(run(trial, features))
    print(tables(list(records)))


if __name__ == "__main__":
    main()
