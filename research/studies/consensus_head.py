"""Accuracy of the consensus head on frozen features: against one plant's own sums,
for newcomers, and as a forecast.

    python -m research.studies.consensus_head neu=NEU xsdd=XSDD --weights mobilenet_v2.safetensors
    --cache FOLDER

computes the features of a pool once for each encoder, keeps them in `--cache`, and stores a line
for each federation of five plants: what each plant's head, made by the product's own functions,
reaches on held-out images. Choices are made on `--pool tuning`; `python -m
research.studies.consensus_head_tables` prints what is stored.

*own*: a plant's held-out images, its own classes being the candidates; *all*: the held-out images
of all plants, every class being a candidate.
"""

import argparse
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import UNSET, UnsetType

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Preprocessing
from edge.inference.class_prior import UNTAUGHT, reweight
from research.runner.store import Records
from trainer.data import class_folders
from trainer.data.class_folders import Catalogue
from trainer.data.partition import Scheme, select_pool
from trainer.data.training_set import TrainingSet
from trainer.models.initial_weights import initial_encoder
from trainer.models.network import Network, to_tensors
from trainer.statistics import lda_head
from trainer.statistics.features import view_features
from trainer.statistics.lda_head import Head
from trainer.statistics.sums import Sums, collect, directions
from trainer.training.calibration import softmax

SIZE, NODES, DIMENSIONS = 64, 5, 256  # pixels; plants; directions that features are projected to
PARTITIONS = (("disjoint", 2), ("disjoint", 3), ("dirichlet", 0))  # and classes a plant
SAMPLES = (3, 5, 10)  # training images a plant
Logits = Callable[[np.ndarray], np.ndarray]  # [n, C] of features [n, d]
# by encoder
MODELS = {"imagenet": "mobilenet_v2", "surface": "mobilenet_v2", "lite0": "efficientnet_lite0"}


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One federation."""

    dataset: str
    pool: str
    partition: str
    classes: int  # of each plant; 0: as many as it draws
    samples: int  # training images of each plant
    seed: int
    encoder: str  # of MODELS


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A plant's training images, each as a head without it sees it."""

    logits: bytes  # float32 [n, classes]
    labels: list[int]
    rest: list[int]  # images of its class that the plant has besides
    elsewhere: list[int]  # and that the others have


class Plant(msgspec.Struct, frozen=True, kw_only=True):
    """What a plant's heads reach on held-out images; shares in 0..1."""

    trained: dict[str, int]  # images of each of its classes
    tested: int
    heads: dict[str, tuple[float, float, float]]  # own; its own images, but among all classes; all
    left_out: LeftOut
    arriving: dict[str, float] | UnsetType = UNSET
    newcomer: dict[str, float] | UnsetType = UNSET


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the store."""

    trial: Trial
    plants: list[Plant]
    lacking: str = ""  # why there is no such federation
    seconds: float = 0.0


class Features(NamedTuple):
    """Images as an encoder sees them."""

    views: np.ndarray  # [n, VIEWS, d]
    labels: np.ndarray  # [n]
    places: Mapping[str, int]  # by digest

    def take(self, catalogue: Catalogue) -> "Features":
        """Those that a catalogue contains."""
        index = [self.places[entry.digest] for entry in catalogue.entries]
        return Features(self.views[index], self.labels[index], {})


class Share(NamedTuple):
    """A plant's images; the first view of those that are held out."""

    train: Features
    tested: np.ndarray  # [n, d]
    labels: np.ndarray  # [n]
    own: np.ndarray  # classes that it has, numbers


def extract(catalogue: Catalogue, encoder: str, weights: str, cache: Path) -> Features:
    """The features of a pool's images, computed once."""
    initial = initial_encoder(MODELS[encoder], weights, seed=0)
    digest = hashlib.sha256(
        "".join(f"{entry.digest}{entry.class_name}" for entry in catalogue.entries).encode()
    )
    for _, array in sorted(initial.items()):
        digest.update(array.tobytes())
    file = cache / f"{encoder}-{digest.hexdigest()[:16]}.npy"
    labels = np.array([catalogue.classes.index(entry.class_name) for entry in catalogue.entries])
    if not file.exists():
        images = class_folders.load(catalogue, catalogue.classes, SIZE)
        assert np.array_equal(images.labels, labels)
        network = Network(MODELS[encoder], len(catalogue.classes))
        data = TrainingSet.of(images, Preprocessing(size=SIZE))
        cache.mkdir(parents=True, exist_ok=True)
        np.save(file, view_features(network, to_tensors(initial), data))
    return Features(
        np.load(file),
        labels,
        {entry.digest: place for place, entry in enumerate(catalogue.entries)},
    )


def deal(trial: Trial, catalogue: Catalogue, features: Features) -> list[Share]:
    """The plants' images. UsageError if there are too few for such a federation."""
    scheme = Scheme(
        trial.partition,
        NODES,
        trial.samples,
        trial.seed,
        {"classes_per_node": trial.classes or 2},
        pool=trial.pool,
    )
    shares = []
    for each in scheme.shares(catalogue):
        train, test = features.take(each.train), features.take(each.test)
        shares.append(Share(train, test.views[:, 0], test.labels, np.unique(train.labels)))
    return shares


def run(trial: Trial, catalogue: Catalogue, features: Features) -> Result:
    """Deal the images, and make and judge each plant's heads."""
    started = time.monotonic()
    try:
        shares = deal(trial, catalogue, features)
    except UsageError as error:
        return Result(trial=trial, plants=[], lacking=str(error))
    classes = catalogue.classes
    sums = [collect(share.train.views, share.train.labels, len(classes)) for share in shares]
    total = _add(sums)
    heads: list[dict[str, Head]] = [{"gaussian": lda_head.fit(total, own)} for own in sums]
    if trial.encoder == "imagenet":
        pooled = lda_head.fit(total, _none(total))
        projected = _projected(shares, len(classes))
        for mine, own, small in zip(heads, sums, projected, strict=True):
            mine |= {
                "own sums": lda_head.fit(own, own),
                "pooled means": pooled,
                f"{DIMENSIONS} directions": small,
            }
    left = [
        lda_head.leave_one_out(total, own, *share.train[:2])[0]
        for own, share in zip(sums, shares, strict=True)
    ]
    plants = []
    for number, share in enumerate(shares):
        judged = {name: judge(head.logits, number, shares) for name, head in heads[number].items()}
        plants.append(
            Plant(
                trained={
                    classes[label]: int(n) for label, n in enumerate(sums[number].images) if n
                },
                tested=len(share.labels),
                heads=judged,
                left_out=_left_out(left[number], share.train.labels, total, sums[number]),
                arriving=_arriving(heads[number]["gaussian"], left[number], number, shares)
                if trial.encoder == "imagenet"
                else UNSET,
                newcomer=_newcomer(share, total, sums[number])
                if trial.encoder == "imagenet"
                and (trial.partition, trial.classes) == ("disjoint", 3)
                else UNSET,
            )
        )
    return Result(trial=trial, plants=plants, seconds=round(time.monotonic() - started, 1))


def _add(sums: Sequence[Sums]) -> Sums:
    return reduce(lambda one, other: one.combine(other, np.add), sums)


def _none(total: Sums) -> Sums:
    """Of a plant without images."""
    return total.without(total)


def _projected(shares: Sequence[Share], classes: int) -> list[Head]:
    """The plants' heads of projected features, taking features of full length."""
    public = directions(shares[0].tested.shape[1], DIMENSIONS)
    sums = [collect(share.train.views @ public.T, share.train.labels, classes) for share in shares]
    total = _add(sums)
    heads = [lda_head.fit(total, own) for own in sums]
    return [head._replace(weight=head.weight @ public) for head in heads]


def judge(logits: Logits, number: int, shares: Sequence[Share]) -> tuple[float, float, float]:
    """Own accuracy of a plant's head, that on its own images among all classes,
    and that on all plants' images.
    """
    share = shares[number]
    mine = logits(share.tested)
    right = np.concatenate([logits(each.tested).argmax(1) == each.labels for each in shares])
    return (
        _mean(share.own[mine[:, share.own].argmax(1)] == share.labels),
        _mean(mine.argmax(1) == share.labels),
        _mean(right),
    )


def _left_out(logits: np.ndarray, labels: np.ndarray, total: Sums, own: Sums) -> LeftOut:
    return LeftOut(
        logits=logits.astype(np.float32).tobytes(),
        labels=labels.tolist(),
        rest=(own.images[labels] - 1).tolist(),
        elsewhere=(total.images - own.images)[labels].tolist(),
    )


def _arriving(
    head: Head, left: np.ndarray, number: int, shares: Sequence[Share]
) -> dict[str, float]:
    """Images of classes that the plant has none of, and what its own images pay for them.

    By the weight of such a class, and where the head's certainty comes from: training images that
    are left out, or one half of the held-out ones, of which the other half is judged.
    """
    share = shares[number]
    logits = np.concatenate([head.logits(each.tested) for each in shares])
    labels = np.concatenate([each.labels for each in shares])
    others = ~np.isin(labels, share.own)
    mine = head.logits(share.tested)
    half = np.zeros(len(mine), bool)
    half[np.argsort(share.labels, kind="stable")[::2]] = True  # of each class
    expected = lda_head.expected_scale(head.spread)
    scales = {
        "left out": lda_head.fit_scale(left, share.train.labels, expected),
        "held out": lda_head.fit_scale(mine[half], share.labels[half], expected),
    }
    found = {"images": float(others.sum())}
    for (source, scale), (name, weight) in product(
        scales.items(), (("uniform", 1.0), ("default", UNTAUGHT))
    ):
        weights = np.where(np.isin(np.arange(len(head.bias)), share.own), 1.0, weight)
        own, arriving = (
            reweight(softmax(scale * each), weights).argmax(1)
            for each in (mine[~half], logits[others])
        )
        found[f"{source}, {name}: own right"] = _mean(own == share.labels[~half])
        found[f"{source}, {name}: own called another's"] = _mean(~np.isin(own, share.own))
        if others.any():
            found[f"{source}, {name}: arriving right"] = _mean(arriving == labels[others])
    return found


def _newcomer(share: Share, total: Sums, own: Sums) -> dict[str, float]:
    """Own accuracy of a plant that the other four never counted: with no label,
    with one a class, or with all.
    """
    others = total.without(own)
    first = np.unique(share.train.labels, return_index=True)[1]
    one = collect(share.train.views[first], share.train.labels[first], len(total.images))
    heads = {
        "no label": lda_head.fit(others, _none(total)),
        "one label a class": lda_head.fit(others.combine(one, np.add), one),
        "one label a class, alone": lda_head.fit(one, one),
    }
    known = (others.images > 0)[share.labels]  # held-out images of a class that another plant has
    found = {"known": _mean(known)}
    for name, head in heads.items():
        right = share.own[head.logits(share.tested)[:, share.own].argmax(1)] == share.labels
        found[name] = _mean(right)
        if known.any():
            found[f"{name}, known"] = _mean(right[known])
    return found


def _mean(right: np.ndarray) -> float:
    return round(float(right.mean()), 4)


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "data", nargs="*", metavar="NAME=FOLDER", help="class folders of a data set"
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
    parser.add_argument("--encoders", nargs="+", choices=MODELS, default=["imagenet"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument(
        "--out", type=Path, default=Path("research/results/studies/consensus_head.jsonl")
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    weights = {"imagenet": asked.weights, "surface": "surface", "lite0": "imagenet"}
    records = Records(asked.out, Result)
    finished = {result.trial for result in records}
    folders = dict(each.split("=", 1) for each in asked.data)
    for encoder, (name, folder) in product(asked.encoders, folders.items()):
        catalogue = class_folders.scan(Path(folder))
        features = extract(
            select_pool(catalogue, asked.pool), encoder, weights[encoder], asked.cache
        )
        for seed, (partition, classes), samples in product(asked.seeds, PARTITIONS, SAMPLES):
            trial = Trial(
                dataset=name,
                pool=asked.pool,
                partition=partition,
                classes=classes,
                samples=samples,
                seed=seed,
                encoder=encoder,
            )
            if trial in finished:
                continue
            result = run(trial, catalogue, features)
            records.add(result)
            own = (
                np.mean([plant.heads["gaussian"][0] for plant in result.plants])
                if result.plants
                else np.nan
            )
            told = result.lacking or f"own {own:.1%}, {result.seconds} s"
            print(
                f"{encoder}, {name}, {partition} {classes}, {samples} images, seed {seed}: {told}",
                flush=True,
            )


if __name__ == "__main__":
    main()
