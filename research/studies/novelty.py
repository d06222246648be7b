"""Detection of unknown defects: AUROC of uncertainty scores on images of classes that the model
was never taught.

    python -m research.studies.novelty NEU --other XSDD --weights mobilenet_v2.safetensors
    python -m research.studies.novelty --table

Each federation is simulated: AFedCL on NEU-CLS, one class left out of it altogether. The images of
a node's own classes that were held out are the ordinary ones. Unknown ones are

- `unseen everywhere`: of the class that was left out.
- `unseen here`: of classes that other nodes were taught and this one was not (partition
  `disjoint`).
- `other data set`: X-SDD's.

What a score is measured against (temperature, means, deviations) comes from one half of the
held-out images, and the other half is judged with it; then the halves change places. No unknown
image takes part in that. A line of the file is a finished federation, and is not run again.
`caught` is the share of unknown images that are doubted when 5 % of the ordinary ones are. The
scores (all: the larger, the stranger):

- max softmax, entropy: of the model's probabilities. Energy (Liu et al. 2020) and max logit: of its
  logits.
- disagreement: Jensen-Shannon divergence of what the classifier says of either encoder's features
  alone; calibrated: its logits divided by the model's temperature. Labels differ: whether both name
  different classes. Feature distance: 1 - cosine of both encoders' features. Difference: how far
  they differ otherwise than for the nearest held-out image.
- class distance: from the mean of the predicted class, with a diagonal covariance. Mahalanobis (Lee
  et al. 2018): from the nearest class's mean, with a full covariance, shrunk.
- novelty: 1 - cosine to the nearest held-out image (Sun et al. 2022), which is what the line
  measures.
- a + b: sum of both, each in standard deviations of held-out images.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from broker_config.protocol.messages import Spec
from edge.bundle.reference import LEAST, Reference, disagreement
from research.runner.store import Records
from trainer.data import class_folders
from trainer.data.class_folders import Catalogue, LabelledImages
from trainer.data.partition import Scheme, select_pool
from trainer.data.training_set import TrainingSet
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate
from trainer.models.fusion import WEIGHTED_SUM
from trainer.models.network import Network, Tensors
from trainer.seeding import generator
from trainer.training.calibration import fit_temperature, softmax
from trainer.training.personal_model import PersonalModel

SIZE, NODES, MOST = 64, 5, 120  # pixels; nodes; unknown images of a kind for each node
COMBINED = (
    ("max softmax", "disagreement"),
    ("energy", "disagreement"),
    ("novelty", "disagreement"),
    ("novelty", "difference"),
    ("novelty", "max softmax"),
    ("novelty", "energy"),
)
Scores = dict[str, np.ndarray]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One federation."""

    pool: str
    partition: str
    left_out: str
    seed: int
    rounds: int
    samples: int  # training images of each node
    weights: str  # name of the file, or surface


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a score is worth on one node, against one kind of unknown images."""

    auroc: float
    caught: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a federation showed: by kind of unknown images and score,
    for each node that could be measured.
    """

    trial: Trial
    accuracy: list[float]
    figures: dict[str, dict[str, list[Figures]]]
    seconds: float


class Seen(NamedTuple):
    """What a model made of n images."""

    logits: np.ndarray  # [n, C]
    # logits of the classifier on either encoder's features [n, 2, C]: received, own
    opinions: np.ndarray
    features: np.ndarray  # fused [n, F]
    encoders: np.ndarray  # either encoder's features [n, 2, F]

    def take(self, index: np.ndarray) -> "Seen":
        """Some of them."""
        return Seen(*(values[index] for values in self))


class Node(NamedTuple):
    """A node's ordinary images as its model sees them, and the unknown ones by their kind."""

    held_out: Seen
    labels: np.ndarray
    unknown: dict[str, Seen]


def run(trial: Trial, weights: str, catalogue: Catalogue, other: Catalogue) -> Result:
    """Simulate a federation and measure its nodes."""
    started = time.monotonic()
    nodes, accuracy = observe(trial, weights, catalogue, other)
    figures: dict[str, dict[str, list[Figures]]] = defaultdict(lambda: defaultdict(list))
    for node in nodes:
        for kind, scores in measure(node).items():
            for name, found in scores.items():
                figures[kind][name].append(found)
    return Result(
        trial=trial,
        accuracy=accuracy,
        figures=figures,
        seconds=round(time.monotonic() - started, 1),
    )


def observe(
    trial: Trial, weights: str, catalogue: Catalogue, other: Catalogue
) -> tuple[list[Node], list[float]]:
    """Train without the left-out class, and show each node's model all kinds of images;
    and the nodes' accuracies.
    """
    known = Catalogue(
        tuple(entry for entry in catalogue.entries if entry.class_name != trial.left_out)
    )
    shares = Scheme(
        trial.partition, NODES, trial.samples, trial.seed, {"classes_per_node": 3}, pool=trial.pool
    ).shares(known)
    classes = known.classes
    images = {s.node: class_folders.load_both(s.train, s.test, classes, SIZE) for s in shares}
    request = Request(
        "afedcl",
        model="mobilenet_v2",
        weights=weights,
        size=SIZE,
        rounds=trial.rounds,
        seed=trial.seed,
    )
    spec, broadcast = draft(
        request._replace(aggregate="mean"), federation="novelty", classes=classes, nodes=NODES
    )
    models = simulate(spec, broadcast, images, evaluate_every=trial.rounds).models
    trained = {entry.digest for share in shares for entry in share.train.entries}
    nodes = []
    for share in shares:
        test = images[share.node].test
        assert test is not None
        kinds = _unknown(
            trial,
            select_pool(catalogue, trial.pool),
            select_pool(other, trial.pool),
            set(share.train.classes),
            trained,
        )
        unknown = {
            kind: look(models[share.node], spec, _pictures(found))
            for kind, found in kinds.items()
            if found.entries
        }
        nodes.append(Node(look(models[share.node], spec, test), test.labels, unknown))
    return nodes, [
        round(models[share.node].metadata.metrics["accuracy_own"], 4) for share in shares
    ]


def _unknown(
    trial: Trial, catalogue: Catalogue, other: Catalogue, own: set[str], trained: set[str]
) -> dict[str, Catalogue]:
    """The images of each kind that a node with these classes does not know."""
    left_out = [entry for entry in catalogue.entries if entry.class_name == trial.left_out]
    foreign = [
        entry
        for entry in catalogue.entries
        if entry.class_name not in own | {trial.left_out} and entry.digest not in trained
    ]
    kinds = {
        "unseen everywhere": left_out,
        "unseen here": foreign,
        "other data set": list(other.entries),
    }
    random = generator(trial.seed, "unknown")
    return {
        kind: Catalogue(
            tuple(entries[position] for position in random.permutation(len(entries))[:MOST])
        )
        for kind, entries in kinds.items()
    }


def _pictures(catalogue: Catalogue) -> LabelledImages:
    """Decoded; their labels mean nothing."""
    return class_folders.load(catalogue, catalogue.classes, SIZE)


def look(model: PersonalModel, spec: Spec, images: LabelledImages) -> Seen:
    """What a fused personal model makes of images."""
    network, tensors = Network(spec.model, len(spec.classes)), model.tensors
    ready = TrainingSet.of(images, spec.preprocessing)
    with torch.no_grad():
        parts = [
            _look(network, tensors, ready.network_input(slice(start, start + 64)))
            for start in range(0, len(images.labels), 64)
        ]
    return Seen(*(np.concatenate(values) for values in zip(*parts, strict=True)))


def _look(network: Network, tensors: Tensors, images: torch.Tensor) -> Seen:
    received, own = (
        network.encode(tensors, images, prefix="received"),
        network.encode(tensors, images),
    )
    fused = WEIGHTED_SUM.fuse([received, own], tensors)
    logits = [
        network.linear(tensors, "classifier", features) for features in (fused, received, own)
    ]
    return Seen(
        logits[0].numpy(),
        torch.stack(logits[1:], 1).numpy(),
        fused.numpy(),
        torch.stack([received, own], 1).numpy(),
    )


def measure(node: Node) -> dict[str, dict[str, Figures]]:
    """The figures by kind of unknown images and score:
    the mean of both ways to halve the held-out images.
    """
    half = np.zeros(len(node.labels), bool)
    half[np.argsort(node.labels, kind="stable")[::2]] = True  # of each class
    found: dict[str, dict[str, list[Figures]]] = defaultdict(lambda: defaultdict(list))
    for known in (half, ~half):
        judged = [node.held_out.take(~known), *node.unknown.values()]
        ordinary, *strange = score(node.held_out.take(known), node.labels[known], judged)
        for kind, scores in zip(node.unknown, strange, strict=True):
            for name in scores:
                found[kind][name].append(_figures(ordinary[name], scores[name]))
    return {
        kind: {name: _mean(both) for name, both in scores.items()} for kind, scores in found.items()
    }


def _mean(figures: Sequence[Figures]) -> Figures:
    return Figures(
        auroc=round(float(np.mean([each.auroc for each in figures])), 4),
        caught=round(float(np.mean([each.caught for each in figures])), 4),
    )


def _figures(ordinary: np.ndarray, unknown: np.ndarray) -> Figures:
    truth = np.r_[np.zeros(len(ordinary)), np.ones(len(unknown))]
    return Figures(
        auroc=float(roc_auc_score(truth, np.r_[ordinary, unknown])),
        caught=float((unknown > np.quantile(ordinary, 0.95)).mean()),
    )


def score(known: Seen, labels: np.ndarray, judged: Sequence[Seen]) -> list[Scores]:
    """The scores of sets of images, measured against images that the node knows."""
    divisor = fit_temperature(known.logits, labels)
    reference = Reference.from_features(
        known.features, known.logits.argmax(1), known.logits.shape[1]
    )
    whitening = _whitening(known, reference)
    alone = {"novelty": reference.novelty, "difference": _difference(known, known, itself=True)}
    baseline = _scores(known, known, divisor, reference, whitening) | alone
    found = []
    for seen in judged:
        scores = _scores(seen, known, divisor, reference, whitening)
        standard = {
            name: (scores[name] - baseline[name].mean()) / (baseline[name].std() + 1e-9)
            for name in scores
        }
        found.append(
            scores | {f"{one} + {two}": standard[one] + standard[two] for one, two in COMBINED}
        )
    return found


def _scores(
    seen: Seen, known: Seen, divisor: float, reference: Reference, whitening: np.ndarray
) -> Scores:
    exact = seen._replace(
        logits=seen.logits.astype(np.float64), opinions=seen.opinions.astype(np.float64)
    )
    probabilities, labels = softmax(exact.logits / divisor), seen.logits.argmax(1)
    distances = [
        reference.standardised(each, label)
        for each, label in zip(seen.features, labels, strict=True)
    ]
    own = reference.counts >= LEAST if (reference.counts >= LEAST).any() else reference.counts >= 0
    full = np.square((seen.features[:, None] - reference.means[None, own]) @ whitening).sum(-1)
    return {
        # 1 - largest would lose what float cannot tell from 1
        "max softmax": np.sort(probabilities, 1)[:, :-1].sum(1),
        "entropy": -(probabilities * np.log(np.maximum(probabilities, 1e-300))).sum(1),
        "energy": -np.log(np.exp(exact.logits).sum(1)),
        "max logit": -exact.logits.max(1),
        "disagreement": disagreement(softmax(exact.opinions)),
        "disagreement, calibrated": disagreement(softmax(exact.opinions / divisor)),
        "labels differ": (seen.opinions[:, 0].argmax(1) != seen.opinions[:, 1].argmax(1)).astype(
            float
        ),
        "feature distance": 1 - (_unit(seen.encoders[:, 0]) * _unit(seen.encoders[:, 1])).sum(1),
        "difference": _difference(seen, known),
        "class distance": np.square(distances).mean(1),
        "Mahalanobis": full.min(1),
        "novelty": reference.nearest_distance(seen.features),
    }


def _difference(seen: Seen, known: Seen, *, itself: bool = False) -> np.ndarray:
    """How far the difference of both encoders' directions is from the nearest known one's;
    `itself` does not count.
    """
    one, two = (_unit(each.encoders[:, 0]) - _unit(each.encoders[:, 1]) for each in (seen, known))
    squares = np.square(one).sum(1)[:, None] + np.square(two).sum(1)[None] - 2 * one @ two.T
    return np.asarray((squares + 1e9 * np.eye(len(squares)) if itself else squares).min(1))


def _unit(features: np.ndarray) -> np.ndarray:
    return np.asarray(features / (np.linalg.norm(features, axis=-1, keepdims=True) + 1e-12))


def _whitening(known: Seen, reference: Reference) -> np.ndarray:
    """[F, F]: the root of the inverse of the features' covariance within a class,
    shrunk halfway to a sphere's.
    """
    residuals = known.features - reference.means[known.logits.argmax(1)]
    covariance = (residuals.T @ residuals / len(residuals)).astype(np.float64)
    shrunk = 0.5 * covariance + 0.5 * (np.trace(covariance) / len(covariance) + 1e-9) * np.eye(
        len(covariance)
    )
    return np.asarray(np.linalg.cholesky(np.linalg.inv(shrunk)), np.float32)


def trials(asked: argparse.Namespace, classes: Sequence[str], weights: str) -> Iterable[Trial]:
    """Those that were asked for; all of one seed, then of the next."""
    for seed, partition, left_out in product(
        asked.seeds, asked.partitions, asked.left_out or classes
    ):
        yield Trial(
            pool=asked.pool,
            partition=partition,
            left_out=left_out,
            seed=seed,
            rounds=asked.rounds,
            samples=asked.samples,
            weights=weights,
        )


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", help="class folders of NEU-CLS")
    parser.add_argument("--other", type=Path, help="class folders of another data set: X-SDD")
    parser.add_argument("--weights", default="surface", help="surface, or a safetensors file")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("research/results/studies/novelty.jsonl"),
        help="file of lines",
    )
    parser.add_argument(
        "--table", action="store_true", help="only print what the file holds, as Markdown"
    )
    parser.add_argument("--left-out", nargs="+", help="classes; all by default")
    parser.add_argument(
        "--partitions", nargs="+", choices=("disjoint", "iid"), default=["disjoint", "iid"]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--pool", choices=("report", "tuning"), default="report", help="tuning for choices"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--samples", type=int, default=12)
    asked = parser.parse_args()
    if not asked.table:
        _run(asked)
    print(tables(list(Records(asked.out, Result))))


def _run(asked: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    catalogue, other = class_folders.scan(asked.folder), class_folders.scan(asked.other)
    records = Records(asked.out, Result)
    finished = {result.trial for result in records}
    for trial in trials(asked, catalogue.classes, Path(asked.weights).stem):
        if trial not in finished:
            result = run(trial, asked.weights, catalogue, other)
            records.add(result)
            told = f"{trial.partition} without {trial.left_out}, seed {trial.seed}"
            print(
                f"{told}: accuracy {np.mean(result.accuracy):.1%}, {result.seconds:.0f} s",
                flush=True,
            )


def tables(lines: Sequence[Result]) -> str:
    """A Markdown table for each pool, partition and kind of weights;
    mean and standard deviation over federations.
    """
    groups: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for line in lines:
        groups[line.trial.pool, line.trial.partition, line.trial.weights].append(line)
    return "\n\n".join(_table(*key, group) for key, group in sorted(groups.items()))


def _table(pool_: str, partition: str, weights: str, lines: Sequence[Result]) -> str:
    kinds = [kind for kind in lines[0].figures if all(kind in line.figures for line in lines)]
    rows = [["score", *(f"{kind}{figure}" for kind in kinds for figure in ("", ", caught"))]]
    rows.append(["---"] * len(rows[0]))
    for score_ in lines[0].figures[kinds[0]]:
        row = [score_]
        for kind in kinds:
            for figure in ("auroc", "caught"):
                each = [
                    100 * np.mean([getattr(found, figure) for found in line.figures[kind][score_]])
                    for line in lines
                ]
                row.append(f"{np.mean(each):.1f} ± {np.std(each, ddof=min(1, len(each) - 1)):.1f}")
        rows.append(row)
    seeds, left_out = (
        {getattr(line.trial, name) for line in lines} for name in ("seed", "left_out")
    )
    accuracy = 100 * np.mean([np.mean(line.accuracy) for line in lines])
    title = (
        f"{pool_} pool, {partition}, weights {weights}: AUROC % and caught %, {len(lines)} "
        "federations "
    )
    title += f"({len(seeds)} seeds, {len(left_out)} classes left out), accuracy {accuracy:.1f} %"
    return "\n".join([title, "", *(f"| {' | '.join(row)} |" for row in rows)])


if __name__ == "__main__":
    main()
