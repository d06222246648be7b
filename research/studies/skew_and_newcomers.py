"""Plants with few images of few classes, and one that comes when training is over:
AFedCL+, FedAvg, or each one alone.

    python -m research.studies.skew_and_newcomers --neu NEU --xsdd XSDD --weights
    mobilenet_v2.safetensors

Six shares of a data set are dealt, of five images and three classes each. Five plants train; the
sixth is a newcomer. Where `cameras` differ, each plant sees its images, training and held out,
through its own. The table has means over data sets and seeds, in %, and AFedCL+'s differences,
paired by these. Results are kept in a file; what is in it is not run again. Figures, all on
held-out images:

- `own`: a member's images, its classes being the only candidates; `all`: those of all members,
  every class being one.
- `newcomer own`, `newcomer all`: the same for the newcomer, whose images count in its `all`. With
  FedAvg it takes the last average as it is; with AFedCL+ it makes the head of the run's totals and
  its sums; alone it trains on its images.
- `no image own`, `no image all`: a newcomer that has no image, but its classes. FedAvg's average is
  the same for it.
- `arriving own`, `arriving class`: the newcomer where one of its classes, drawn by seed, is new to
  all: members lack its images and have so many fewer. On all of its images, and on those of that
  class; its classes are candidates.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from broker_config.protocol.messages import Preprocessing, Spec
from research.runner.statistics import paired_difference
from research.runner.store import Records
from research.studies.feature_skew import MODEL, SIZE, draw_camera
from trainer.data import class_folders
from trainer.data.class_folders import Catalogue, Images, LabelledImages
from trainer.data.partition import Scheme
from trainer.data.training_set import TrainingSet
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate
from trainer.models.named_tensors import Arrays
from trainer.models.network import Network, Tensors
from trainer.seeding import generator
from trainer.training.conclusion import conclude
from trainer.training.engine import predict
from trainer.training.evaluation import accuracy, predict_among
from trainer.training.participant import Participant, State

MEMBERS, SAMPLES, CLASSES, EPOCHS = 5, 5, 3, 6
ROUNDS = {"local": 30, "fedavg": 30, "afedcl_plus": 12}
METHOD = "afedcl_plus"
SKEWS = ("none", "cameras")
FIGURES = [f"{who}{what}" for who in ("", "newcomer ", "no image ") for what in ("own", "all")]
FIGURES += ["arriving own", "arriving class"]


class Outcome(msgspec.Struct, frozen=True):
    """What one method reaches with the plants of one seed."""

    data: str
    skew: str
    method: str
    pool: str
    seed: int
    figures: dict[str, float]


class Plants(NamedTuple):
    """Those who train, by name, and the one who comes later."""

    classes: list[str]
    members: dict[str, Images]
    newcomer: Images
    arriving: int  # label of the newcomer's class that members may lack

    def without_arriving(self) -> "Plants":
        """The same plants, whose members lack a class."""
        return self._replace(
            members={name: drop_class(each, self.arriving) for name, each in self.members.items()}
        )


NEWCOMER = f"plant-{MEMBERS + 1}"


def drop_class(images: Images, label: int) -> Images:
    """A plant's images without those of a class."""
    train, test = (
        part.take(np.flatnonzero(part.labels != label)) for part in (images.train, held_out(images))
    )
    return Images(train, test)


def held_out(images: Images) -> LabelledImages:
    """A plant's held-out images, which all plants here have."""
    assert images.test is not None
    return images.test


def deal(catalogue: Catalogue, skew: str, pool: str, seed: int) -> Plants:
    """The plants of a seed."""
    shares = Scheme(
        "disjoint", MEMBERS + 1, SAMPLES, seed, {"classes_per_node": CLASSES}, pool=pool
    ).shares(catalogue)
    classes = catalogue.classes
    images = {}
    for share in shares:
        parts = [class_folders.load(part, classes, SIZE) for part in (share.train, share.test)]
        if skew == "cameras":
            shoot = draw_camera(seed, share.node).shoot
            parts = [
                part._replace(images=np.stack([shoot(image) for image in part.images]))
                for part in parts
            ]
        images[share.node] = Images(parts[0], parts[1])
    newcomer = images.pop(NEWCOMER)
    arriving = generator(seed, "arriving").choice(np.unique(newcomer.train.labels))
    return Plants(classes, images, newcomer, int(arriving))


class Judge(NamedTuple):
    """Accuracies of models of a federation."""

    network: Network

    def predict(self, model: Tensors, images: LabelledImages) -> np.ndarray:
        """Logits [n, classes]."""
        return predict(self.network, model, TrainingSet.of(images, Preprocessing(size=SIZE)))

    def own(self, model: Tensors, plant: Images) -> np.ndarray:
        """Whether each held-out image of a plant is right, among the plant's classes, bool [n]."""
        images = held_out(plant)
        candidates = sorted(set(plant.train.labels.tolist()))
        return np.asarray(predict_among(self.predict(model, images), candidates) == images.labels)

    def all(self, model: Tensors, plants: Sequence[Images]) -> float:
        """Accuracy on the held-out images of all these plants, every class being a candidate."""
        tests = [held_out(plant) for plant in plants]
        found = np.concatenate([self.predict(model, test) for test in tests]).argmax(1)
        return accuracy(found, np.concatenate([test.labels for test in tests]))


class Trained(NamedTuple):
    """A federation that is over."""

    spec: Spec
    final: Arrays
    models: dict[str, Tensors]  # by node

    def welcome(self, images: Images) -> Tensors:
        """The model of a newcomer with these images, as `edge-node join` makes it."""
        participant = Participant(self.spec, NEWCOMER, images)
        rounds, final = self.spec.rounds, self.final
        model = conclude(participant, State({}, {}), rounds, final, final, (), None, counted=False)
        return model.tensors


def train(
    method: str, weights: str, classes: Sequence[str], members: Mapping[str, Images], seed: int
) -> Trained:
    """A federation of the members."""
    rounds = ROUNDS[method]
    request = Request(method, {"epochs": EPOCHS}, MODEL, weights, SIZE, rounds=rounds, seed=seed)
    spec, broadcast = draft(
        request._replace(aggregate="mean"), federation="study", classes=classes, nodes=len(members)
    )
    result = simulate(spec, broadcast, members, evaluate_every=rounds)
    return Trained(
        spec, result.broadcast, {name: model.tensors for name, model in result.models.items()}
    )


def measure(method: str, weights: str, plants: Plants, seed: int) -> dict[str, float]:
    """The figures of a method that it has."""
    judge, newcomer = Judge(Network(MODEL, len(plants.classes))), plants.newcomer
    members = [*plants.members.values()]
    alone = method == "local"
    everyone = {**plants.members, NEWCOMER: newcomer}
    trained = train(method, weights, plants.classes, everyone if alone else plants.members, seed)
    models = [trained.models[name] for name in plants.members]
    own = [judge.own(model, plant).mean() for model, plant in zip(models, members, strict=True)]
    figures = {
        "own": float(np.mean(own)),
        "all": float(np.mean([judge.all(model, members) for model in models])),
    }
    later = {"newcomer": trained.models[NEWCOMER] if alone else trained.welcome(newcomer)}
    if not alone:
        later["no image"] = trained.welcome(Images.none(SIZE))
    for name, model in later.items():
        figures[f"{name} own"] = float(judge.own(model, newcomer).mean())
        figures[f"{name} all"] = judge.all(model, [*members, newcomer])
    if not alone:  # alone it learns the same, whatever members lack
        lacking = train(method, weights, plants.classes, plants.without_arriving().members, seed)
        later["newcomer"] = lacking.welcome(newcomer)
    right = judge.own(later["newcomer"], newcomer)
    figures["arriving own"] = float(right.mean())
    figures["arriving class"] = float(right[held_out(newcomer).labels == plants.arriving].mean())
    return figures


def rows(outcomes: Sequence[Outcome]) -> Iterator[list[str]]:
    """A table's rows: for each skew and figure the methods' means,
    and AFedCL+'s differences from the other two.
    """
    for skew in SKEWS:
        for figure in FIGURES:
            values: dict[str, dict[tuple[str, int], float]] = {
                method: {
                    (each.data, each.seed): 100 * each.figures[figure]
                    for each in outcomes
                    if (each.skew, each.method) == (skew, method) and figure in each.figures
                }
                for method in ROUNDS
            }
            means = [
                f"{np.mean([*found.values()]):.1f}" if found else "" for found in values.values()
            ]
            over = [
                f"{found.mean:+.1f} ± {found.half:.1f}" if found else ""
                for found in (
                    paired_difference(values[METHOD], values[other])
                    for other in ("fedavg", "local")
                )
            ]
            if any(means):
                yield [skew, figure, *means, *over, str(len(values[METHOD]))]


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--neu", type=Path, required=True, help="class folders of NEU-CLS")
    parser.add_argument("--xsdd", type=Path, required=True, help="class folders of X-SDD")
    parser.add_argument("--weights", required=True, help="ImageNet's MobileNetV2")
    parser.add_argument("--pool", choices=("report", "tuning"), default="report")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--out", type=Path, default=Path("research/results/studies/skew_and_newcomers.jsonl")
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    catalogues = {"NEU": class_folders.scan(asked.neu), "X-SDD": class_folders.scan(asked.xsdd)}
    records = Records(asked.out, Outcome)
    known = {(each.data, each.skew, each.method, each.pool, each.seed) for each in records}
    for seed in asked.seeds:
        for data, catalogue in catalogues.items():
            for skew in SKEWS:
                plants = deal(catalogue, skew, asked.pool, seed)
                for method in ROUNDS:
                    if (data, skew, method, asked.pool, seed) not in known:
                        figures = measure(method, asked.weights, plants, seed)
                        records.add(Outcome(data, skew, method, asked.pool, seed, figures))
    header = ["skew", "figure", *ROUNDS, "over fedavg", "over local", "blocks"]
    chosen = [each for each in records if each.pool == asked.pool and each.seed in asked.seeds]
    print(
        "\n".join(
            f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows(chosen)]
        )
    )


if __name__ == "__main__":
    main()
