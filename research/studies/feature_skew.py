"""Plants whose cameras or materials differ:
what the consensus head's weights and offset bring over plain pooling.

    python -m research.studies.feature_skew --neu NEU --xsdd XSDD --kth KTH --weights
    mobilenet_v2.safetensors

makes the heads of federations whose encoder nobody trains, and prints a table: means over nodes and
seeds, in %, with differences from pooling that are paired by seed. Results are kept in a file; what
is in it is not run again. Skews:

- `cameras`: each plant sees one data set's images with its own gamma, brightness, colours and
  sharpness, drawn by seed.
- `sources`: plants have NEU-CLS or X-SDD, three of whose classes are the same, or one of four
  pieces of each fabric.
- `none`, for comparison.

With `classes_per_node` a plant is taught some of its source's classes only. `own` are held-out
images of these, which are the only candidates; `all` are those of all classes of its source, as its
own camera would show them, every class of the federation being a candidate.

Heads: `alone` knows no other plant. `own means` takes nothing but the covariance from the others,
    and the means of
classes that it was not taught. `pooled` takes all images alike. `weighed` is the head that is
deployed.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from PIL import Image, ImageFilter

from broker_config.protocol.messages import Preprocessing
from research.runner.statistics import paired_difference
from research.runner.store import Records
from trainer.data import class_folders
from trainer.data.class_folders import Catalogue
from trainer.data.partition import Scheme, select_pool
from trainer.data.training_set import TrainingSet
from trainer.models.initial_weights import initial_encoder
from trainer.models.network import Network, Tensors, to_tensors
from trainer.seeding import generator
from trainer.statistics.features import view_features
from trainer.statistics.lda_head import Means, Spread, estimate_means, estimate_spread
from trainer.statistics.sums import Sums, collect

MODEL, SIZE, BATCH = "mobilenet_v2", 64, 64
SEEN = 20  # held-out images of each class and plant
SAME = {  # X-SDD's names of NEU-CLS's classes
    "slag_inclusion": "inclusion",
    "surface_scratch": "scratches",
    "oxide_scale_of_temperature_system": "rolled-in_scale",
}


class Setting(NamedTuple):
    """A federation of plants that differ."""

    sources: tuple[str, ...]
    partition: str
    nodes: int
    samples: int  # training images of each node
    classes_per_node: int = 2
    cameras: bool = False


KTH = ("kth_a", "kth_b", "kth_c", "kth_d")
SETTINGS = {
    "NEU, cameras": Setting(("neu",), "disjoint", 5, 6, 3, cameras=True),
    "X-SDD, cameras": Setting(("xsdd",), "disjoint", 5, 6, 3, cameras=True),
    "NEU, cameras, 12 images": Setting(("neu",), "disjoint", 5, 12, 3, cameras=True),
    "X-SDD, cameras, 12 images": Setting(("xsdd",), "disjoint", 5, 12, 3, cameras=True),
    "NEU and X-SDD, all classes": Setting(("neu", "xsdd"), "sources", 4, 14),
    "NEU and X-SDD, 3 classes": Setting(("neu", "xsdd"), "sources_groups", 6, 6, 3),
    "fabrics, all classes": Setting(KTH, "sources", 4, 8),
    "fabrics, 2 classes": Setting(KTH, "sources_groups", 8, 6, 2),
    "NEU, no skew": Setting(("neu",), "disjoint", 5, 6, 3),
    "X-SDD, no skew": Setting(("xsdd",), "disjoint", 5, 6, 3),
}


class Plant(NamedTuple):
    """A plant's features, and the images that it will see."""

    features: np.ndarray  # [n, VIEWS, d]
    labels: np.ndarray  # [n]
    seen: np.ndarray  # [m, d]
    seen_labels: np.ndarray  # [m]


class Outcome(msgspec.Struct, frozen=True):
    """Accuracy of a kind of head in one federation, means over nodes."""

    setting: str
    head: str
    pool: str
    seed: int
    own: float
    all: float


Rule = Callable[[Sums, Sums, Spread], Means]


def own_means(others: Sums, own: Sums, spread: Spread) -> Means:
    """Others' means count only where a plant has no image."""
    return estimate_means(
        others._replace(images=np.where(own.images > 0, 0, others.images)), own, spread
    )


def pooled(others: Sums, own: Sums, spread: Spread) -> Means:
    """All images alike."""
    return estimate_means(others, own, spread._replace(between=0.0))


HEADS: dict[str, Rule] = {"own means": own_means, "pooled": pooled, "weighed": estimate_means}
BASE = "pooled"


class Camera(NamedTuple):
    """How a plant's images differ from those of the data set."""

    gamma: float
    brightness: float  # added, in 0..255
    colours: tuple[float, ...]  # factors of red, green and blue
    blur: float  # radius in pixels

    def shoot(self, image: np.ndarray) -> np.ndarray:
        """The image uint8 [S, S, 3] as this camera would have taken it."""
        blurred = np.asarray(
            Image.fromarray(image).filter(ImageFilter.GaussianBlur(self.blur)), float
        )
        lit = 255 * (blurred / 255) ** self.gamma * np.array(self.colours) + self.brightness
        return np.asarray(np.clip(np.rint(lit), 0, 255).astype(np.uint8))


def draw_camera(seed: int, node: str) -> Camera:
    """The camera of a node."""
    random = generator(seed, "camera", node)
    colours = np.exp(random.normal(0, 0.08, 3))
    return Camera(
        np.exp(random.normal(0, 0.35)), random.normal(0, 15), tuple(colours), random.uniform(0, 1)
    )


class Encoder(NamedTuple):
    """A frozen encoder, and how images reach it."""

    network: Network
    tensors: Tensors

    def views(self, images: class_folders.LabelledImages) -> np.ndarray:
        """What is collected of training images, [n, VIEWS, d]."""
        return view_features(
            self.network, self.tensors, TrainingSet.of(images, Preprocessing(size=SIZE))
        )

    def features(self, images: class_folders.LabelledImages) -> np.ndarray:
        """Features of length one [n, d] of images as they are."""
        ready = TrainingSet.of(images, Preprocessing(size=SIZE))
        with torch.no_grad():
            parts = [
                self.network.encode(self.tensors, ready.network_input(slice(start, start + BATCH)))
                for start in range(0, len(images.labels), BATCH)
            ]
        found = torch.cat(parts).numpy()
        return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True))


def plants(
    setting: Setting, catalogues: Mapping[str, Catalogue], encoder: Encoder, pool: str, seed: int
) -> tuple[list[Plant], int]:
    """The plants of a federation, and the number of its classes."""
    sources = [catalogues[name] for name in setting.sources]
    options = {"classes_per_node": setting.classes_per_node}
    scheme = Scheme(setting.partition, setting.nodes, setting.samples, seed, options, pool=pool)
    shares = scheme.shares(*sources)
    classes = sorted({name for source in sources for name in source.classes})
    trained = {entry.digest for share in shares for entry in share.train.entries}
    made = []
    for number, share in enumerate(shares):
        source = select_pool(sources[number % len(sources)], pool)
        free = [entry for entry in source.entries if entry.digest not in trained]
        order = [
            free[position]
            for position in generator(seed, "seen", share.node).permutation(len(free))
        ]
        seen = [
            entry
            for name in classes
            for entry in [each for each in order if each.class_name == name][:SEEN]
        ]
        parts = [
            class_folders.load(each, classes, SIZE)
            for each in (share.train, Catalogue(tuple(seen)))
        ]
        if setting.cameras:
            shoot = draw_camera(seed, share.node).shoot
            parts = [
                part._replace(images=np.stack([shoot(image) for image in part.images]))
                for part in parts
            ]
        train, later = parts
        made.append(
            Plant(encoder.views(train), train.labels, encoder.features(later), later.labels)
        )
    return made, len(classes)


def measure(
    federation: Sequence[Plant], classes: int, heads: Mapping[str, Rule]
) -> dict[str, tuple[float, float]]:
    """Accuracy on own and on all classes, mean over plants, of each kind of head."""
    sums = [collect(plant.features, plant.labels, classes) for plant in federation]
    total = reduce(lambda one, other: one.combine(other, np.add), sums)
    spread = estimate_spread(total.values())
    found: dict[str, list[tuple[float, float]]] = {"alone": [], **{name: [] for name in heads}}
    for plant, own in zip(federation, sums, strict=True):
        mine, nobody = own.values(), own.without(own).values()
        spread_alone = estimate_spread(mine)
        found["alone"].append(
            _right(plant, estimate_means(nobody, mine, spread_alone), spread_alone)
        )
        others = total.without(own).values()
        for name, rule in heads.items():
            found[name].append(_right(plant, rule(others, mine, spread), spread))
    return {
        name: (float(np.mean(rows, 0)[0]), float(np.mean(rows, 0)[1]))
        for name, rows in found.items()
    }


def _right(plant: Plant, means: Means, spread: Spread) -> tuple[float, float]:
    weight = means.means @ spread.precision
    scores = plant.seen @ weight.T - np.einsum("cd,cd->c", weight, means.means) / 2
    scores = np.where(means.known, scores, -np.inf)
    taught = np.isin(np.arange(len(means.known)), plant.labels)
    own = taught[plant.seen_labels]
    among = np.where(taught, scores, -np.inf)[own].argmax(1)
    return float((among == plant.seen_labels[own]).mean()), float(
        (scores.argmax(1) == plant.seen_labels).mean()
    )


def rows(outcomes: Sequence[Outcome]) -> Iterator[list[str]]:
    """A table's rows: for each setting and head own / all, and what that is over pooling."""
    for setting in SETTINGS:
        mine = [each for each in outcomes if each.setting == setting]
        for head in ("alone", *HEADS):
            there = [each for each in mine if each.head == head]
            if not there:
                continue
            cells = [setting, head]
            for figure in ("own", "all"):
                values = {each.seed: 100 * float(getattr(each, figure)) for each in there}
                base = {
                    each.seed: 100 * float(getattr(each, figure))
                    for each in mine
                    if each.head == BASE
                }
                over = paired_difference(values, base)
                cells.append(f"{np.mean(list(values.values())):.1f}")
                cells.append(f"{over.mean:+.1f} ± {over.half:.1f}" if over and head != BASE else "")
            yield cells


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--neu", type=Path, required=True, help="class folders of NEU-CLS")
    parser.add_argument("--xsdd", type=Path, required=True, help="class folders of X-SDD")
    parser.add_argument("--kth", type=Path, required=True, help="folder with sample_a to sample_d")
    parser.add_argument("--weights", required=True, help="ImageNet's MobileNetV2")
    parser.add_argument("--pool", choices=("report", "tuning"), default="report")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument(
        "--out", type=Path, default=Path("research/results/studies/feature_skew.jsonl")
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    folders = {
        "neu": asked.neu,
        "xsdd": asked.xsdd,
        **{f"kth_{each}": asked.kth / f"sample_{each}" for each in "abcd"},
    }
    catalogues = {name: class_folders.scan(folder) for name, folder in folders.items()}
    named = [
        entry._replace(class_name=SAME.get(entry.class_name, entry.class_name))
        for entry in catalogues["xsdd"].entries
    ]
    catalogues["xsdd"] = Catalogue(tuple(named))
    encoder = Encoder(Network(MODEL, 2), to_tensors(initial_encoder(MODEL, asked.weights, seed=0)))
    records = Records(asked.out, Outcome)
    known = {(each.setting, each.pool, each.seed) for each in records}
    for name, setting in SETTINGS.items():
        for seed in asked.seeds:
            if (name, asked.pool, seed) not in known:
                federation = plants(setting, catalogues, encoder, asked.pool, seed)
                for head, (own, all_) in measure(*federation, HEADS).items():
                    records.add(Outcome(name, head, asked.pool, seed, own, all_))
    header = [["setting", "head", "own", "over pooling", "all", "over pooling"], ["---"] * 6]
    chosen = [each for each in records if each.pool == asked.pool and each.seed in asked.seeds]
    print("\n".join(f"| {' | '.join(row)} |" for row in [*header, *rows(chosen)]))


if __name__ == "__main__":
    main()
