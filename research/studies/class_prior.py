"""Weight of classes that a plant never taught: what its own images gain by it,
and a class that arrives loses.

    python -m research.studies.class_prior neu=NEU xsdd=XSDD --weights mobilenet_v2.safetensors
    --seeds 0 1 2 3 4

simulates federations with a shared classifier, disjoint classes, on the tuning pool, and prints a
table for each data set: means over nodes. Own images are a node's held-out ones; those of a class
that arrives are of its other classes, and trained no node. Temperature and reject thresholds come
from one half of the own images, at the default weight as in a bundle, and the other half is judged
with them; then the halves change places. The last row is the mask with which classifiers are
compared: others' classes have no weight.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from edge.inference.class_prior import Prior, reweight
from trainer.data import class_folders
from trainer.data.class_folders import Catalogue
from trainer.data.partition import Scheme, select_pool
from trainer.data.training_set import TrainingSet
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate
from trainer.models.network import Network
from trainer.seeding import generator
from trainer.training.calibration import calibrate, softmax
from trainer.training.engine import predict

UNTAUGHT = (1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0)
# pixels; nodes; classes of each; images of classes that arrive, of each
SIZE, NODES, CLASSES, MOST = 64, 5, 3, 120
COLUMNS = (
    "own images right",
    "accepted",
    "accepted and wrong",
    "arriving right",
    "accepted",
    "accepted and wrong",
)


class Seen(NamedTuple):
    """What a model made of n images."""

    logits: np.ndarray  # [n, C]
    labels: np.ndarray  # [n]

    def take(self, some: np.ndarray) -> "Seen":
        """Some of them."""
        return Seen(self.logits[some], self.labels[some])


class Node(NamedTuple):
    """A node's images as its model sees them."""

    taught: np.ndarray  # [C], whether the node taught a class
    own: Seen
    arriving: Seen


def observe(
    catalogue: Catalogue, method: str, weights: str, seed: int, rounds: int, samples: int
) -> Iterator[Node]:
    """Simulate a federation on the tuning pool,
    and show each node's model its own images and those of others.
    """
    shares = Scheme(
        "disjoint", NODES, samples, seed, {"classes_per_node": CLASSES}, pool="tuning"
    ).shares(catalogue)
    classes = catalogue.classes
    images = {s.node: class_folders.load_both(s.train, s.test, classes, SIZE) for s in shares}
    request = Request(
        method=method, model="mobilenet_v2", weights=weights, size=SIZE, rounds=rounds, seed=seed
    )
    spec, broadcast = draft(
        request._replace(aggregate="mean"), federation="prior", classes=classes, nodes=NODES
    )
    models = simulate(spec, broadcast, images, evaluate_every=rounds).models
    trained = {entry.digest for share in shares for entry in share.train.entries}
    network = Network(spec.model, len(classes))
    for share in shares:
        own = set(share.train.classes)
        others = [
            each
            for each in select_pool(catalogue, "tuning").entries
            if each.class_name not in own and each.digest not in trained
        ]
        order = generator(seed, "arriving", share.node).permutation(len(others))[:MOST]
        arriving = class_folders.load(
            Catalogue(tuple(others[position] for position in order)), classes, SIZE
        )
        held_out = images[share.node].test
        assert held_out is not None
        seen = [
            Seen(
                predict(
                    network, models[share.node].tensors, TrainingSet.of(each, spec.preprocessing)
                ),
                each.labels,
            )
            for each in (held_out, arriving)
        ]
        yield Node(np.array([name in own for name in classes]), *seen)


def measure(node: Node) -> dict[float, np.ndarray]:
    """By weight, the shares of COLUMNS: the mean of both ways to halve the own images."""
    half = np.zeros(len(node.own.labels), bool)
    half[np.argsort(node.own.labels, kind="stable")[::2]] = True  # of each class
    found: dict[float, list[np.ndarray]] = defaultdict(list)
    names = [str(number) for number in range(len(node.taught))]
    for known in (half, ~half):
        default = np.where(node.taught, 1, Prior().untaught)
        confidence = calibrate(*node.own.take(known), names, default).confidence
        least = np.array([confidence.thresholds[name] for name in names])
        for untaught in UNTAUGHT:
            weights = np.where(node.taught, 1, untaught)
            row = [
                share
                for seen in (node.own.take(~known), node.arriving)
                for share in _shares(
                    reweight(softmax(seen.logits / confidence.temperature), weights), seen, least
                )
            ]
            found[untaught].append(np.array(row))
    return {untaught: np.mean(rows, 0) for untaught, rows in found.items()}


def _shares(probabilities: np.ndarray, seen: Seen, least: np.ndarray) -> tuple[float, float, float]:
    """Of images that are right, accepted, and accepted although wrong."""
    taken = probabilities.argmax(1)
    right, accepted = taken == seen.labels, probabilities.max(1) >= least[taken]
    return float(right.mean()), float(accepted.mean()), float((accepted & ~right).mean())


def table(measured: Sequence[Mapping[float, np.ndarray]]) -> str:
    """A Markdown table of means over nodes, in %."""
    rows = [["weight", *COLUMNS], ["---"] * (1 + len(COLUMNS))]
    for untaught in UNTAUGHT:
        means = np.mean([each[untaught] for each in measured], 0)
        rows.append([f"{untaught:g}", *(f"{100 * mean:.1f}" for mean in means)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Run the federations and print a table for each data set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "data", nargs="+", metavar="NAME=FOLDER", help="class folders of a data set"
    )
    parser.add_argument("--method", default="fedavg", help="one whose classifier is shared")
    parser.add_argument("--weights", default="surface", help="surface, or a safetensors file")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--samples", type=int, default=6, help="training images of each node")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for name, folder in (each.split("=", 1) for each in asked.data):
        catalogue = class_folders.scan(Path(folder))
        measured = [
            measure(node)
            for seed in asked.seeds
            for node in observe(
                catalogue, asked.method, asked.weights, seed, asked.rounds, asked.samples
            )
        ]
        print(
            f"{name}, {asked.method}, {len(asked.seeds)} federations of {NODES} nodes, "
            f"%\n\n{table(measured)}\n"
        )


if __name__ == "__main__":
    main()
