"""Gains of training over the model of a federation's first sums, on the tuning pool.

    python -m research.studies.training_after_sums neu_cls=NEU xsdd=XSDD

trains federations of five plants on the default encoder at 128 px, 12 rounds of 6 epochs, and
stores a line for each; what is stored is not run again. `--tables` prints what is stored: means
over seeds in %, and the difference from the first sums, paired by seed.

`own`: each plant's held-out images, its own classes being the candidates; `all`: all plants'
held-out images, every class being a candidate. What is served: `first`, each plant's head of the
sums before training; `refit`, its head of the sums of the trained encoder; `both`, the latter's
log-probabilities plus half the trained classifier's; `halfway`, as `refit`, of the mean of first
and trained encoder; `side by side`, the sum of both heads' log-probabilities, which takes two
encoders.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from broker_config.protocol.messages import Preprocessing, Training
from research.runner.statistics import paired_difference
from research.runner.store import Records
from trainer.data import class_folders
from trainer.data.class_folders import Catalogue
from trainer.data.partition import Scheme
from trainer.data.training_set import TrainingSet, encode_all
from trainer.methods.afedcl_plus import normalised_loss
from trainer.methods.base import WHOLE, Phase, Step
from trainer.models.fusion import LENGTH
from trainer.models.initial_weights import initial_encoder
from trainer.models.network import Network, Tensors, to_tensors
from trainer.seeding import key_to_seed
from trainer.statistics import lda_head
from trainer.statistics.features import view_features
from trainer.statistics.label_doubts import log_softmax
from trainer.statistics.sums import Sums, collect
from trainer.training.engine import run_phase

MODEL = "efficientnet_lite0_mid"
NODES = 5
ROUNDS = 12
JUDGED = (1, 3, 6, 12)
EPOCHS = 6  # of a round
OPTIONS: dict[str, dict[str, object]] = {
    "disjoint": {"classes_per_node": 3},
    "dirichlet": {"alpha": 0.1},
}
SERVED = ("refit", "both", "halfway", "side by side")
# the last five of sixteen blocks, and what follows them
LAST = tuple(
    f"encoder.{name}"
    for name in (
        *(f"_blocks.{number}" for number in range(11, 16)),
        "_conv_head",
        "_bn1",
        "_projection",
    )
)


class Variant(NamedTuple):
    """How a federation trains."""

    words: str
    rate: float = 3e-4
    moved: tuple[str, ...] = WHOLE


VARIANTS = {
    "base": Variant("as `afedcl_plus`"),
    "low": Variant("a third of its learning rate", rate=1e-4),
    "last": Variant("the last five blocks alone", moved=(*LAST, "classifier")),
}


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One federation."""

    dataset: str
    size: int
    samples: int  # training images of each plant
    partition: str
    seed: int
    variant: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the store: own and all in %, of what is served after so many rounds."""

    trial: Trial
    first: tuple[float, float]
    rounds: dict[str, dict[str, tuple[float, float]]]


class Federation:
    """Images of the plants, and the encoder that all begin with."""

    def __init__(self, catalogue: Catalogue, trial: Trial):
        shares = Scheme(
            trial.partition,
            NODES,
            trial.samples,
            trial.seed,
            OPTIONS[trial.partition],
            pool="tuning",
        ).shares(catalogue)
        size = trial.size
        images = [
            class_folders.load_both(each.train, each.test, catalogue.classes, size)
            for each in shares
        ]
        preprocessing = Preprocessing(size=size)
        self.train = [TrainingSet.of(each.train, preprocessing) for each in images]
        tests = [TrainingSet.of(each.test, preprocessing) for each in images if each.test]
        self.own = [np.unique(each.labels.numpy()) for each in self.train]
        self.ends = np.cumsum([0, *(len(each.labels) for each in tests)])
        self.test = TrainingSet.joined(tests)
        self.network = Network(MODEL, len(catalogue.classes))
        self.seed = trial.seed
        self.encoder = to_tensors(initial_encoder(MODEL, "imagenet", seed=0))

    def sums(self, tensors: Tensors) -> list[Sums]:
        """Each plant's sums."""
        classes = self.network.shape.classes
        return [
            collect(view_features(self.network, tensors, each), each.labels.numpy(), classes)
            for each in self.train
        ]

    def seen(self, tensors: Tensors) -> np.ndarray:
        """Features [n, d] of length one of all held-out images."""
        found = encode_all(self.network, tensors, self.test)
        return np.asarray(found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12))

    def refit(self, tensors: Tensors) -> list[np.ndarray]:
        """Log-probabilities [n, C] of each plant's head of the sums of an encoder."""
        sums = self.sums(tensors)
        total = reduce(lambda one, other: one.combine(other, np.add), sums)
        seen = self.seen(tensors)
        heads = [lda_head.fit(total, each) for each in sums]
        return [
            log_softmax(lda_head.expected_scale(head.spread) * head.logits(seen)) for head in heads
        ]

    def judge(self, logits: Sequence[np.ndarray]) -> tuple[float, float]:
        """own and all of each plant's logits [n, C] for all held-out images."""
        labels = self.test.labels.numpy()
        own, everyone = [], []
        for plant, known in enumerate(self.own):
            mine = slice(self.ends[plant], self.ends[plant + 1])
            if len(labels[mine]):
                named = known[logits[plant][mine][:, known].argmax(1)]
                own.append((named == labels[mine]).mean())
            everyone.append((logits[plant].argmax(1) == labels).mean())
        return round(100 * float(np.mean(own)), 2), round(100 * float(np.mean(everyone)), 2)


def train(federation: Federation, variant: Variant) -> Iterator[tuple[int, Tensors]]:
    """Yield the shared model after each round."""
    network, seed = federation.network, federation.seed
    total = reduce(
        lambda one, other: one.combine(other, np.add), federation.sums(federation.encoder)
    )
    head = lda_head.fit(total, total.without(total))
    scale = lda_head.expected_scale(head.spread)
    made = {"classifier.weight": scale * head.weight, "classifier.bias": scale * head.bias}
    shared = {
        **federation.encoder,
        **{name: torch.from_numpy(value.astype(np.float32)) for name, value in made.items()},
        LENGTH: torch.ones(()),
    }
    training = Training(
        learning_rate=variant.rate, local_epochs=EPOCHS, batch_norm="eval", moments="keep"
    )
    phase = Phase("train", (Step(variant.moved, normalised_loss),), EPOCHS)
    moments: list[Tensors] = [{} for _ in range(NODES)]
    for round_ in range(1, ROUNDS + 1):
        trained = []
        for plant in range(NODES):
            torch.manual_seed(seed * 1000 + round_ * 10 + plant)
            tensors, moments[plant], _ = run_phase(
                network,
                phase,
                shared,
                moments[plant],
                shared,
                federation.train[plant],
                training,
                key_to_seed(seed, str(plant), round_, "train"),
            )
            trained.append(tensors)
        shared = mean(trained)
        yield round_, shared


def mean(models: Sequence[Tensors]) -> Tensors:
    """The mean of models; counters are the first one's."""
    found: Tensors = {}
    for name, value in models[0].items():
        found[name] = value
        if value.dtype.is_floating_point:
            found[name] = reduce(torch.add, [each[name] for each in models]) / len(models)
    return found


def run(catalogue: Catalogue, trial: Trial) -> Result:
    """Train a federation, and judge it on the way."""
    federation = Federation(catalogue, trial)
    before = federation.refit(federation.encoder)
    rounds = {}
    for round_, shared in train(federation, VARIANTS[trial.variant]):
        if round_ not in JUDGED:
            continue
        after = federation.refit(shared)
        logits = federation.seen(shared) @ shared["classifier.weight"].numpy().T
        classifier = log_softmax(logits + shared["classifier.bias"].numpy())
        encoder = {name: shared[name] for name in federation.encoder}
        served = {
            "refit": after,
            "both": [each + classifier / 2 for each in after],
            "halfway": federation.refit(mean([federation.encoder, encoder])),
            "side by side": [one + other for one, other in zip(before, after, strict=True)],
        }
        rounds[str(round_)] = {name: federation.judge(each) for name, each in served.items()}
    return Result(trial=trial, first=federation.judge(before), rounds=rounds)


def rows(results: Sequence[Result], rounds: int) -> Iterator[list[str]]:
    """A table's rows: for each setting and variant the first sums,
    and what each served model has over them.
    """
    settings: dict[tuple[str, str, int, int, str], list[Result]] = defaultdict(list)
    for each in results:
        trial = each.trial
        key = (trial.dataset, trial.partition, trial.size, trial.samples, trial.variant)
        settings[key].append(each)
    for (dataset, partition, size, samples, variant), found in sorted(settings.items()):
        head = [dataset, partition, f"{size}", f"{samples}", VARIANTS[variant].words]
        first = [np.mean([each.first[side] for each in found]) for side in (0, 1)]
        told = [f"{first[0]:.1f} / {first[1]:.1f}"]
        for served in SERVED:
            told.append(" / ".join(_over(found, served, rounds, side) for side in (0, 1)))
        yield [*head, f"{len(found)}", *told]


def _over(found: Sequence[Result], served: str, rounds: int, side: int) -> str:
    after: Mapping[tuple[str, int], float] = {
        (each.trial.dataset, each.trial.seed): each.rounds[str(rounds)][served][side]
        for each in found
    }
    before = {(each.trial.dataset, each.trial.seed): each.first[side] for each in found}
    over = paired_difference(after, before)
    if over is None:
        return f"{np.mean([*after.values()]) - np.mean([*before.values()]):+.1f}"
    return f"{over.mean:+.1f} ± {over.half:.1f}"


def main() -> None:
    """Run what is missing, or print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="*", help="NAME=FOLDER of class folders")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--samples", type=int, nargs="+", default=[5, 20])
    parser.add_argument("--partitions", nargs="+", choices=OPTIONS, default=["disjoint"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["base"])
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--tables", action="store_true", help="print what is stored")
    parser.add_argument(
        "--out", type=Path, default=Path("research/results/studies/training_after_sums.jsonl")
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    records = Records(asked.out, Result)
    known = {each.trial for each in records}
    for name, _, folder in (each.partition("=") for each in asked.data):
        catalogue = class_folders.scan(Path(folder))
        for partition in asked.partitions:
            for samples in asked.samples:
                for seed in asked.seeds:
                    for variant in asked.variants:
                        trial = Trial(
                            dataset=name,
                            size=asked.size,
                            samples=samples,
                            partition=partition,
                            seed=seed,
                            variant=variant,
                        )
                        if trial not in known:
                            records.add(run(catalogue, trial))
    if asked.tables:
        header = ["data", "partition", "px", "n", "trained", "federations", "first own / all"]
        table = [[*header, *SERVED], ["---"] * 11, *rows(list(records), ROUNDS)]
        print("\n".join(f"| {' | '.join(row)} |" for row in table))


if __name__ == "__main__":
    main()
