"""Accuracy of the heads of a frozen encoder, and how true the accuracy is that a plant is told.

    python -m research.studies.frozen_heads neu=NEU xsdd=XSDD --cache FOLDER --out FILE.jsonl

For each federation of five plants a line is stored: what each head reaches on held-out images, what
the plant was told and within which interval, and what the simplest alternatives reach: the plant's
own logistic regression on EfficientNet-Lite0's last features (*probe*), and the consensus head of
the last features (*last*). Heads are made and judged by the product's own functions.

*own*: the plant's held-out images, its own classes being the candidates; *all*: every plant's
held-out images, every class being a candidate; *served*: as a line judges by default.
`--tables` prints what is stored.
"""

import argparse
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Preprocessing
from edge.inference.class_prior import Prior
from edge.uncertainty.performance import unseen_performance, wilson_interval
from research.runner.store import Records
from trainer.data import class_folders
from trainer.data.class_folders import Catalogue, LabelledImages, split_folds
from trainer.data.image_groups import group_entries, read_keys
from trainer.data.partition import Scheme, select_pool
from trainer.data.training_set import TrainingSet
from trainer.models.initial_weights import initial_encoder
from trainer.models.network import Network, to_tensors
from trainer.statistics import lda_head, logistic_head
from trainer.statistics.features import view_features
from trainer.statistics.logistic_head import Linear
from trainer.statistics.sums import Sums, collect
from trainer.training import frozen_heads
from trainer.training.calibration import calibrate
from trainer.training.evaluation import predict_in_service
from trainer.training.frozen_heads import Together

NODES = 5
JUDGED = 3  # plants of a federation that are judged: each takes seconds
SAMPLES = (5, 10, 20)
CLASSES = (2, 3)
SIZES = (128, 224)
MODEL = "efficientnet_lite0_mid"
LAST = "efficientnet_lite0"


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One federation."""

    dataset: str
    size: int
    samples: int  # training images of each plant
    classes: int  # of each plant
    seed: int
    pool: str = "tuning"


class Plant(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of right verdicts on held-out images, in 0..1."""

    own: dict[str, float]  # by head
    all: dict[str, float]
    served: float  # of what is deployed
    told: float | None  # what the plant was told of that
    low: float = 0.0
    high: float = 1.0
    groups: int = 0  # of look-alikes that judged
    doubted: float = 0.0  # share of held-out verdicts that are in doubt
    accepted: float | None = None  # accuracy of the others
    deployed: str = ""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the store."""

    trial: Trial
    plants: list[Plant]


class Pool(NamedTuple):
    """A pool's images, as encoders see them."""

    catalogue: Catalogue
    groups: dict[str, int]
    labels: np.ndarray  # [n]
    places: dict[str, int]  # by digest
    middle: np.ndarray  # [n, V, d]
    last: np.ndarray  # [n, V, 1280]


def read_pool(folder: Path, size: int, cache: Path, group: str = "", name: str = "tuning") -> Pool:
    """Read a pool of a data set; features are computed once.

    `group` says which images belong together beside look-alikes, as `read_keys` takes it.
    """
    catalogue = select_pool(class_folders.scan(folder), name)
    entries = catalogue.entries
    labels = np.array([catalogue.classes.index(entry.class_name) for entry in entries])
    middle, last = (
        read_features(catalogue, model, "imagenet", size, cache) for model in (MODEL, LAST)
    )
    places = {entry.digest: place for place, entry in enumerate(entries)}
    groups = group_entries(entries, read_keys(group, entries) if group else {})
    return Pool(catalogue, groups, labels, places, middle, last)


def read_features(
    catalogue: Catalogue, model: str, weights: str, size: int, cache: Path
) -> np.ndarray:
    """Return features [n, V, d] of a catalogue's images, which are computed once."""
    initial = initial_encoder(model, weights, seed=0)
    digest = hashlib.sha256("".join(entry.digest for entry in catalogue.entries).encode())
    for _, array in sorted(initial.items()):
        digest.update(array.tobytes())
    file = cache / f"{model}-{size}-{digest.hexdigest()[:16]}.npy"
    if not file.exists():
        torch.set_num_threads(1)
        images = class_folders.load(catalogue, catalogue.classes, size)
        data = TrainingSet.of(images, Preprocessing(size=size))
        cache.mkdir(parents=True, exist_ok=True)
        network = Network(model, len(catalogue.classes))
        np.save(file, view_features(network, to_tensors(initial), data).astype(np.float16))
    features: np.ndarray = np.load(file)
    return features.astype(np.float32)


def run(trial: Trial, pool: Pool, tested: int) -> Result:
    """Make one federation's heads and judge them on `tested` held-out images a plant at most.

    Raises:
        UsageError: the pool has too few images for it.
    """
    options = {"classes_per_node": trial.classes}
    scheme = Scheme(
        "disjoint", NODES, trial.samples, trial.seed, options, pool=trial.pool, test_samples=tested
    )
    shares = scheme.shares(pool.catalogue, groups=pool.groups)
    places = [_places(pool, share.train) for share in shares]
    tests = [_places(pool, share.test) for share in shares]
    classes = len(pool.catalogue.classes)
    middle = [collect(pool.middle[each], pool.labels[each], classes) for each in places]
    last = [collect(pool.last[each], pool.labels[each], classes) for each in places]
    total = reduce(lambda one, other: one.combine(other, np.add), middle)
    total_last = reduce(lambda one, other: one.combine(other, np.add), last)
    spread = lda_head.estimate_spread(total_last.values())
    everyone = np.unique(np.concatenate(tests))
    plants = []
    for number in range(JUDGED):
        head = lda_head.fit(total_last, last[number], spread)
        plants.append(
            _judge(
                trial,
                pool,
                places[number],
                tests[number],
                everyone,
                total.without(middle[number]),
                Linear(head.weight, head.bias),
            )
        )
    return Result(trial=trial, plants=plants)


def _places(pool: Pool, catalogue: Catalogue) -> np.ndarray:
    return np.array([pool.places[entry.digest] for entry in catalogue.entries])


def _judge(
    trial: Trial,
    pool: Pool,
    train: np.ndarray,
    test: np.ndarray,
    everyone: np.ndarray,
    others: Sums,
    last: Linear,
) -> Plant:
    classes = len(pool.catalogue.classes)
    labels = pool.labels[train]
    own = sorted({*labels.tolist()})
    views = pool.middle[train]
    images = LabelledImages(
        np.empty((len(train), 0)),
        labels,
        tuple(pool.catalogue.entries[place].digest for place in train),
        tuple(pool.catalogue.entries[place].path for place in train),
        groups=np.array([pool.groups[pool.catalogue.entries[place].digest] for place in train]),
    )

    def fit_together(kept: np.ndarray) -> Together:
        mine = collect(views[kept], labels[kept], classes)
        head = lda_head.fit(others.combine(mine, np.add), mine)
        scale = lda_head.expected_scale(head.spread)
        return Together(Linear(scale * head.weight, scale * head.bias))

    folds = split_folds(images, min(frozen_heads.FOLDS, len(images.sets)), trial.seed)
    left_out = frozen_heads.leave_out(views, labels, folds, others.images, fit_together)
    everything = np.arange(len(train))
    judged = frozen_heads.judge(views, labels, own, left_out, fit_together(everything).head)
    probe = logistic_head.fit(pool.last[train], labels, classes, 1.0)
    heads: dict[str, Linear] = {}
    for candidate, linear in judged.heads.items():
        heads[candidate] = linear
    heads |= {"chosen": judged.head, "probe": probe, "last": last}
    seen = {name: pool.last if name in ("probe", "last") else pool.middle for name in heads}
    truth = pool.labels[test]
    shares_own = {}
    shares_all = {}
    for name, head in heads.items():
        logits = head.logits(seen[name][test, 0])
        shares_own[name] = _share(np.array(own)[logits[:, own].argmax(1)] == truth)
        right = head.logits(seen[name][everyone, 0]).argmax(1) == pool.labels[everyone]
        shares_all[name] = _share(right)
    logits = judged.head.logits(pool.middle[test, 0])
    rows = np.flatnonzero(judged.known)
    trained = [pool.catalogue.classes[label] for label in own]
    plant = Plant(
        own=shares_own,
        all=shares_all,
        served=_share(predict_in_service(logits, own) == truth),
        told=None,
        deployed=judged.deployed,
    )
    groups = images.take(rows).sets if len(rows) else []
    if len(groups) < 2:
        return plant
    weights = Prior().weights(pool.catalogue.classes, trained)
    chosen = judged.logits[judged.deployed][rows]
    remaining = judged.remaining[rows]
    calibrated = calibrate(chosen, labels[rows], pool.catalogue.classes, weights, groups, remaining)
    confidence = calibrated.confidence
    found = unseen_performance(confidence, pool.catalogue.classes, trained)
    assert found is not None
    powers = np.exp(logits / confidence.temperature)
    powers = powers * weights
    probabilities = powers / powers.sum(1, keepdims=True)
    limits = np.array([confidence.thresholds[name] for name in pool.catalogue.classes])
    taken = probabilities.argmax(1)
    accepted = probabilities.max(1) >= limits[taken]
    return msgspec.structs.replace(
        plant,
        served=_share(taken == truth),
        told=found.accuracy.share,
        low=found.accuracy.low,
        high=found.accuracy.high,
        groups=len(groups),
        doubted=_share(~accepted),
        accepted=_share((taken == truth)[accepted]) if accepted.any() else None,
    )


def _share(right: np.ndarray) -> float:
    return round(float(np.mean(right)), 4)


def tables(results: Sequence[Result]) -> Iterator[str]:
    """Print accuracy by setting, and how true the figures are."""
    settings: dict[tuple[str, int, int, int], list[Result]] = defaultdict(list)
    for each in results:
        trial = each.trial
        settings[trial.dataset, trial.size, trial.samples, trial.classes].append(each)
    names = ("probe", "last", "alone", "together", "mixed", "chosen")
    yield f"dataset px n c federations | own, all: {', '.join(names)}"
    for key, found in sorted(settings.items()):
        own = " ".join(f"{100 * _mean(found, 'own', name):5.1f}" for name in names)
        every = " ".join(f"{100 * _mean(found, 'all', name):5.1f}" for name in names)
        yield f"{' '.join(map(str, key))} {len(found)} | {own} | {every}"
    yield "dataset px n | plants, told, true, inside, width/Wilson, doubted, right of the others"
    truths: dict[tuple[str, int, int], list[Plant]] = defaultdict(list)
    for each in results:
        told = [plant for plant in each.plants if plant.told is not None]
        truths[each.trial.dataset, each.trial.size, each.trial.samples] += told
    truths["every", 0, 0] = [plant for found in truths.values() for plant in found]
    for group, plants in sorted(truths.items()):
        inside = np.mean([plant.low <= plant.served <= plant.high for plant in plants])
        told_mean = np.mean([plant.told for plant in plants if plant.told is not None])
        widths = []
        for plant in plants:
            low, high = wilson_interval((plant.told or 0) * plant.groups, plant.groups)
            widths.append((plant.high - plant.low) / (high - low))
        sure = [plant.accepted for plant in plants if plant.accepted is not None]
        yield (
            f"{' '.join(map(str, group))} | {len(plants)} {100 * told_mean:.1f} "
            f"{100 * np.mean([plant.served for plant in plants]):.1f} {100 * inside:.1f} % "
            f"{np.mean(widths):.2f} {100 * np.mean([plant.doubted for plant in plants]):.1f} % "
            f"{100 * np.mean(sure):.1f}"
        )


def _mean(results: Sequence[Result], view: str, name: str) -> float:
    values = []
    for each in results:
        values.append(np.mean([getattr(plant, view)[name] for plant in each.plants]))
    return float(np.mean(values))


def main() -> None:
    """Run what is not stored yet, or print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--group", nargs="*", default=[], metavar="NAME=REGEX")
    parser.add_argument("--cache", type=Path, default=Path("runs/features"))
    parser.add_argument("--out", type=Path, default=Path("runs/frozen_heads.jsonl"))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--tested", type=int, default=60, help="held-out images of a plant")
    parser.add_argument("--pool", choices=["tuning", "report"], default="tuning")
    parser.add_argument("--tables", action="store_true")
    asked = parser.parse_args()
    records = Records(asked.out, Result)
    if asked.tables:
        print("\n".join(tables(list(records))))
        return
    known = {each.trial for each in records}
    folders = dict(each.split("=", 1) for each in asked.data)
    keys = dict(each.split("=", 1) for each in asked.group)
    for name, size in product(folders, SIZES):
        pool = read_pool(Path(folders[name]), size, asked.cache, keys.get(name, ""), asked.pool)
        for seed, samples, classes in product(range(asked.seeds), SAMPLES, CLASSES):
            trial = Trial(
                dataset=name,
                size=size,
                samples=samples,
                classes=classes,
                seed=seed,
                pool=asked.pool,
            )
            if trial in known:
                continue
            try:
                records.add(run(trial, pool, asked.tested))
            except UsageError as error:
                print(f"{trial}: {error}")


if __name__ == "__main__":
    main()
