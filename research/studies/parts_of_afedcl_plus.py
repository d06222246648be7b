"""Worth of each part of AFedCL+, and of what was tried beside: one part changed at a time,
on the tuning pool.

    python -m research.studies.parts_of_afedcl_plus --neu NEU --xsdd XSDD --weights
    mobilenet_v2.safetensors

trains federations of five plants with five images of three classes each, 12 rounds of 6 epochs at
64 px, and prints a table: means over data sets and seeds in %, and differences from AFedCL+ itself,
paired by data set and seed. Results are kept in a file; what is in it is not run again.

`own`: each plant's held-out images, its own classes being the only candidates. `all`: all plants'
held-out images, every class being a candidate. What is served, of each training: `refit`, each
plant's head of the sums of the trained encoder; `trained`, the shared classifier as trained;
`both`, the former's log-probabilities plus half the latter's; `averaged`, the shared model averaged
over the last four rounds.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from broker_config.protocol.messages import Preprocessing, Training
from research.runner.statistics import paired_difference
from research.runner.store import Records
from trainer.data import class_folders
from trainer.data.class_folders import Catalogue
from trainer.data.partition import Scheme
from trainer.data.training_set import TrainingSet, encode_all
from trainer.methods.afedcl import L_D
from trainer.methods.base import Batch, Encode, Phase, Step
from trainer.models.initial_weights import init_linear, initial_encoder
from trainer.models.network import Network, Tensors, to_tensors
from trainer.seeding import key_to_seed
from trainer.statistics import lda_head
from trainer.statistics.features import view_features
from trainer.statistics.sums import Sums, collect
from trainer.training.engine import run_phase

MODEL, SIZE, NODES, SAMPLES, CLASSES = "mobilenet_v2", 64, 5, 5, 3
ROUNDS, JUDGED = 12, (6, 12)
AVERAGED = 4  # last rounds
TRAINING = Training(
    learning_rate=3e-4,
    local_epochs=6,
    batch_size=32,
    augment=True,
    batch_norm="eval",
    moments="keep",
)
# weight of the adversarial term; pseudo-features of each absent class in a batch
ADVERSARY, PSEUDO = 0.1, 2
SERVED = ("refit", "trained", "both", "averaged")


class Variant(NamedTuple):
    """How a federation trains."""

    words: str
    begins_with_sums: bool = True
    frozen_classifier: bool = False
    adversary: bool = False
    weighs_by_loss: bool = False
    pseudo_features: bool = False


BASE = "complete"
VARIANTS = {
    BASE: Variant("AFedCL+"),
    "random": Variant("classifier begins at random", begins_with_sums=False),
    "adversary": Variant("with AFedCL's adversarial term", adversary=True),
    "adversary, L_D": Variant("with it, and weights by L_D", adversary=True, weighs_by_loss=True),
    "pseudo-features": Variant(
        "with Gaussian pseudo-features of classes that a plant lacks", pseudo_features=True
    ),
    "frozen": Variant("classifier stays the first head", frozen_classifier=True),
}


class Outcome(msgspec.Struct, frozen=True):
    """Accuracy in percent of one federation after so many rounds, means over plants."""

    variant: str
    dataset: str
    seed: int
    rounds: int
    served: str
    own: float
    all: float


class Federation:
    """Images of the plants, and the encoder that all begin with."""

    def __init__(self, catalogue: Catalogue, weights: str, seed: int):
        shares = Scheme(
            "disjoint", NODES, SAMPLES, seed, {"classes_per_node": CLASSES}, pool="tuning"
        ).shares(catalogue)
        self.train, tests = (
            [
                TrainingSet.of(
                    class_folders.load(part, catalogue.classes, SIZE), Preprocessing(size=SIZE)
                )
                for part in parts
            ]
            for parts in ([share.train for share in shares], [share.test for share in shares])
        )
        self.own = [np.unique(each.labels.numpy()) for each in self.train]
        self.sizes = [len(each.labels) for each in tests]
        self.test = TrainingSet.joined(tests)
        self.network, self.seed = Network(MODEL, len(catalogue.classes)), seed
        self.encoder = to_tensors(initial_encoder(MODEL, weights, seed=0))

    def sums(self, tensors: Tensors) -> list[Sums]:
        """Each plant's sums."""
        classes = self.network.shape.classes
        return [
            collect(view_features(self.network, tensors, each), each.labels.numpy(), classes)
            for each in self.train
        ]

    def judge(self, logits: Sequence[np.ndarray]) -> tuple[float, float]:
        """own and all of each plant's logits [n, C] for all held-out images."""
        labels, ends = self.test.labels.numpy(), np.cumsum(self.sizes)
        own, everyone = [], []
        for plant, (known, end, size) in enumerate(zip(self.own, ends, self.sizes, strict=True)):
            mine = slice(end - size, end)
            own.append((known[logits[plant][mine][:, known].argmax(1)] == labels[mine]).mean())
            everyone.append((logits[plant].argmax(1) == labels).mean())
        return round(100 * float(np.mean(own)), 2), round(100 * float(np.mean(everyone)), 2)


def first_head(federation: Federation) -> Tensors:
    """The classifier of all plants' sums."""
    total = reduce(
        lambda one, other: one.combine(other, np.add), federation.sums(federation.encoder)
    )
    head = lda_head.fit(total, total.without(total))
    scale = lda_head.expected_scale(head.spread)
    made = {"classifier.weight": scale * head.weight, "classifier.bias": scale * head.bias}
    return {name: torch.from_numpy(value.astype(np.float32)) for name, value in made.items()}


def normalised(features: Tensor) -> Tensor:
    """Features of length one."""
    lengths: Tensor = features.norm(dim=1, keepdim=True).clamp_min(1e-6)
    return features / lengths


class Pseudo:
    """Draws features of classes from the first encoder's means and the scatter within classes."""

    def __init__(self, federation: Federation):
        values = [each.values() for each in federation.sums(federation.encoder)]
        counts = sum(each.images for each in values)
        means = sum(each.sums for each in values) / np.maximum(counts, 1)[:, None]
        views = np.concatenate(
            [
                view_features(federation.network, federation.encoder, each)
                for each in federation.train
            ]
        )
        flat = views.reshape(-1, views.shape[2])
        lengths = np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12)
        labels = np.concatenate([each.labels.numpy() for each in federation.train]).repeat(
            views.shape[1]
        )
        self._means = torch.tensor(means, dtype=torch.float32)
        self._scatter = torch.tensor(flat / lengths, dtype=torch.float32) - self._means[labels]

    def draw(self, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """PSEUDO features of each class, and their labels."""
        labels = torch.tensor(classes).repeat_interleave(PSEUDO)
        noise = (
            torch.randn(len(labels), len(self._scatter)) @ self._scatter / len(self._scatter) ** 0.5
        )
        return normalised(self._means[labels] + noise), labels


def make_loss(
    variant: Variant, absent: Sequence[int], pseudo: Pseudo | None
) -> Callable[..., tuple[Tensor, Tensors]]:
    """The loss of a plant that has no image of the classes `absent`."""

    def loss(
        network: Network, tensors: Tensors, batch: Batch, encode: Encode
    ) -> tuple[Tensor, Tensors]:
        features = encode(tensors, batch.images)
        logits, labels = network.linear(tensors, "classifier", normalised(features)), batch.labels
        if pseudo is not None:
            drawn, theirs = pseudo.draw(absent)
            logits = torch.cat([logits, network.linear(tensors, "classifier", normalised(drawn))])
            labels = torch.cat([labels, theirs])
        total = network.cross_entropy(logits, labels)
        measured = {"L_C": total}
        if variant.adversary:
            assert batch.reference is not None
            guess = [
                network.linear(
                    tensors,
                    "discriminator.1",
                    network.linear(tensors, "discriminator.0", each).relu(),
                )
                for each in (network.reverse(features, ADVERSARY), batch.reference)
            ]
            measured[L_D.key] = (
                network.cross_entropy(guess[0], 0) + network.cross_entropy(guess[1], 1)
            ) / 2
            total = total + measured[L_D.key]
        return total, measured

    return loss


def mean(models: Sequence[Tensors], shares: Sequence[float]) -> Tensors:
    """The mean of models by these shares; counters are the first one's."""
    return {
        name: reduce(
            torch.add, [share * each[name] for share, each in zip(shares, models, strict=True)]
        )
        if value.dtype.is_floating_point
        else value
        for name, value in models[0].items()
        if name.split(".")[0] in ("encoder", "classifier")
    }


def train(federation: Federation, variant: Variant) -> Iterator[tuple[int, list[Tensors]]]:
    """Yield the rounds at which a federation is judged,
    with the shared models of the rounds until then.
    """
    network, seed = federation.network, federation.seed
    random = np.random.default_rng(seed)
    width, classes = network.shape
    shared = dict(federation.encoder)
    shared |= (
        first_head(federation)
        if variant.begins_with_sums
        else to_tensors(init_linear("classifier", width, classes, random))
    )
    adversary = (
        to_tensors(
            {
                **init_linear("discriminator.0", width, 256, random),
                **init_linear("discriminator.1", 256, 2, random),
            }
        )
        if variant.adversary
        else {}
    )
    private, moments = [adversary] * NODES, [dict[str, Tensor]()] * NODES
    pseudo = Pseudo(federation) if variant.pseudo_features else None
    moved = (
        "encoder",
        *(() if variant.frozen_classifier else ("classifier",)),
        *(("discriminator",) if adversary else ()),
    )
    models = []
    for round_ in range(1, ROUNDS + 1):
        trained, weights = [], []
        for plant in range(NODES):
            absent = [label for label in range(classes) if label not in federation.own[plant]]
            phase = Phase(
                "train",
                (Step(moved, make_loss(variant, absent, pseudo)),),
                TRAINING.local_epochs,
                bool(adversary),
            )
            torch.manual_seed(seed * 1000 + round_ * 10 + plant)
            tensors, moments[plant], measured = run_phase(
                network,
                phase,
                {**shared, **private[plant]},
                moments[plant],
                shared,
                federation.train[plant],
                TRAINING,
                key_to_seed(seed, str(plant), round_, "train"),
            )
            private[plant] = {
                name: value for name, value in tensors.items() if name.startswith("discriminator.")
            }
            trained.append(tensors)
            weights.append(measured[L_D.key] if variant.weighs_by_loss else 1.0)
        shared = mean(trained, [float(weight) for weight in np.array(weights) / sum(weights)])
        models.append(shared)
        if round_ in JUDGED:
            yield round_, models


def measure(federation: Federation, models: Sequence[Tensors]) -> dict[str, tuple[float, float]]:
    """own and all of what may be served after these rounds' shared models."""
    shared = models[-1]

    def features(tensors: Tensors) -> np.ndarray:
        found = encode_all(federation.network, tensors, federation.test)
        return np.asarray(found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12))

    def logits(tensors: Tensors) -> np.ndarray:
        return np.asarray(
            features(tensors) @ tensors["classifier.weight"].numpy().T
            + tensors["classifier.bias"].numpy()
        )

    sums, seen = federation.sums(shared), features(shared)
    total = reduce(lambda one, other: one.combine(other, np.add), sums)
    heads = [lda_head.fit(total, each) for each in sums]
    refit = [lda_head.expected_scale(head.spread) * head.logits(seen) for head in heads]
    trained = logits(shared)
    served = {
        "refit": federation.judge(refit),
        "trained": federation.judge([trained] * NODES),
        "both": federation.judge([log_softmax(each) + log_softmax(trained) / 2 for each in refit]),
    }
    if len(models) < ROUNDS:
        return served
    average = mean(models[-AVERAGED:], [1 / AVERAGED] * AVERAGED)
    return {**served, "averaged": federation.judge([logits(average)] * NODES)}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Of each row."""
    return np.asarray(logits - np.logaddexp.reduce(logits, 1, keepdims=True))


def rows(outcomes: Sequence[Outcome]) -> Iterator[list[str]]:
    """A table's rows: for each variant, number of rounds and what is served own and all,
    and these over AFedCL+'s.
    """
    found: dict[tuple[str, int, str], dict[tuple[str, int], Outcome]] = {}
    for each in outcomes:
        found.setdefault((each.variant, each.rounds, each.served), {})[each.dataset, each.seed] = (
            each
        )
    for rounds in JUDGED:
        for name, variant in VARIANTS.items():
            for served in SERVED:
                if there := found.get((name, rounds, served)):
                    yield [
                        variant.words,
                        served,
                        str(rounds),
                        str(len(there)),
                        *_figures(there, found[BASE, rounds, SERVED[0]]),
                    ]


def _figures(
    there: Mapping[tuple[str, int], Outcome], base: Mapping[tuple[str, int], Outcome]
) -> Iterator[str]:
    for figure in ("own", "all"):
        values, others = (
            {key: float(getattr(each, figure)) for key, each in side.items()}
            for side in (there, base)
        )
        yield f"{np.mean(list(values.values())):.1f}"
        over = paired_difference(values, others)
        yield f"{over.mean:+.1f} ± {over.half:.1f}" if over and there is not base else ""


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--neu", type=Path, required=True, help="class folders of NEU-CLS")
    parser.add_argument("--xsdd", type=Path, required=True, help="class folders of X-SDD")
    parser.add_argument("--weights", required=True, help="ImageNet's MobileNetV2")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--out", type=Path, default=Path("research/results/studies/parts_of_afedcl_plus.jsonl")
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    catalogues = {"NEU-CLS": class_folders.scan(asked.neu), "X-SDD": class_folders.scan(asked.xsdd)}
    records = Records(asked.out, Outcome)
    known = {(each.variant, each.dataset, each.seed) for each in records if each.rounds == ROUNDS}
    for seed in asked.seeds:
        for dataset, catalogue in catalogues.items():
            for name in asked.variants:
                if (name, dataset, seed) in known:
                    continue
                federation = Federation(catalogue, asked.weights, seed)
                made = [
                    Outcome(name, dataset, seed, round_, served, *figures)
                    for round_, models in train(federation, VARIANTS[name])
                    for served, figures in measure(federation, models).items()
                ]
                for outcome in made:
                    records.add(outcome)
    header = [
        ["", "served", "rounds", "federations", "own", "over AFedCL+", "all", "over AFedCL+"],
        ["---"] * 8,
    ]
    print("\n".join(f"| {' | '.join(row)} |" for row in [*header, *rows(list(records))]))


if __name__ == "__main__":
    main()
