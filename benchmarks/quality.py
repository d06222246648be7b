"""Quality of the models that plants get, and how true the accuracy is that they are told.

    python -m benchmarks.quality                  # drawn surfaces; a test in `make slow` does it
    python -m benchmarks.quality --data FOLDER    # FOLDER/neu_cls and FOLDER/xsdd; `make nightly`

Federations of five plants with three classes each run the method `gaussian` on the default encoder.
Each plant's model judges held-out images:

- *own*: the plant's images, its own classes being the candidates.
- *all*: every plant's images, every class being a candidate.
- *served*: the plant's images, as a line judges by default.
- *told*: what the plant was told of *served*, which it estimates from its training images.

The figures are means over seeds, plants and images, in %. They are the same each time on one
machine. The program fails if one of the first three is more than a point below the figure in
quality.json, or if *told* is further from *served* than there, by more than a point. With `--renew`
it stores what it has measured instead. Of a real data set it takes the tuning images.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from trainer.data import class_folders, drawn_surfaces
from trainer.data.class_folders import Images, LabelledImages
from trainer.data.image_groups import group_entries
from trainer.data.partition import Scheme, select_pool
from trainer.data.partitions.disjoint import Disjoint
from trainer.data.training_set import TrainingSet, encode_all
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate
from trainer.models.fusion import infer_fusion
from trainer.models.network import Network, to_tensors
from trainer.seeding import generator
from trainer.training.evaluation import accuracy, predict_among, predict_in_service
from trainer.training.personal_model import PersonalModel

STORED = Path(__file__).with_suffix(".json")
TOLERANCE = 1.0  # points: other machines round differently, which moves a few images

PLANTS = 5
CLASSES_PER_PLANT = 3
SAMPLES = (5, 10, 20)  # training images of each plant
SEEDS = 4
DRAWN_SIZE = 96  # as hard as real images: with more pixels nearly all verdicts are right
DRAWN_TESTED = 10  # held-out images of each of a plant's classes
REAL = ("neu_cls", "xsdd")
REAL_SIZE = 128


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Accuracy in %."""

    own: float
    all: float
    served: float
    told: float

    @property
    def error(self) -> float:
        """Difference between the told accuracy and the true one, in points."""
        return abs(self.told - self.served)


Table = dict[str, Figures]
"""By data set and training images of a plant, such as `drawn 5`."""


class Federation(NamedTuple):
    """The plants' images."""

    classes: Sequence[str]
    train: Mapping[str, LabelledImages]  # by plant
    test: Mapping[str, LabelledImages]


def draw_federation(samples: int, seed: int) -> Federation:
    """Draw what each plant's camera sees of its classes, in its own style."""
    classes = drawn_surfaces.CLASSES
    rule = Disjoint(classes_per_node=CLASSES_PER_PLANT)
    counts = rule.count(classes, PLANTS, samples, generator(seed, "quality"))
    train = {}
    test = {}
    for number, mine in enumerate(counts):
        labels = []
        taught = []
        for name, count in sorted(mine.items()):
            labels += [classes.index(name)] * (count + DRAWN_TESTED)
            taught += [True] * count + [False] * DRAWN_TESTED
        images = LabelledImages(
            drawn_surfaces.draw_images(np.array(labels), DRAWN_SIZE, seed, number),
            np.array(labels),
            tuple(f"{seed}-{number}-{place:03d}" for place in range(len(labels))),
            tuple(Path(f"{seed}-{number}-{place:03d}.png") for place in range(len(labels))),
        )
        train[f"plant-{number + 1}"] = images.take(np.flatnonzero(taught))
        test[f"plant-{number + 1}"] = images.take(np.flatnonzero(~np.array(taught)))
    return Federation(classes, train, test)


class Pool(NamedTuple):
    """The tuning images of a data set; the others are for reports alone."""

    catalogue: class_folders.Catalogue
    groups: Mapping[str, int]  # of look-alikes, by digest
    images: LabelledImages

    @staticmethod
    def read(folder: Path) -> "Pool":
        """Read a folder of class folders."""
        catalogue = select_pool(class_folders.scan(folder), "tuning")
        images = class_folders.load(catalogue, catalogue.classes, REAL_SIZE)
        return Pool(catalogue, group_entries(catalogue.entries, {}), images)

    def share(self, samples: int, seed: int) -> Federation:
        """Share it among the plants."""
        options = {"classes_per_node": CLASSES_PER_PLANT}
        scheme = Scheme("disjoint", PLANTS, samples, seed, options, pool="tuning")
        shares = scheme.shares(self.catalogue, groups=self.groups)
        train = {}
        test = {}
        for share in shares:
            train[share.node] = self.images.among(share.train)
            test[share.node] = self.images.among(share.test)
        return Federation(self.catalogue.classes, train, test)


def run(federation: Federation, seed: int) -> list[Figures]:
    """Let the plants learn together, and judge each one's model."""
    first = next(iter(federation.train.values()))
    request = Request("gaussian", size=first.images.shape[1], seed=seed)
    spec, broadcast = draft(
        request, federation="quality", classes=federation.classes, nodes=len(federation.train)
    )
    images = {name: Images(train, None) for name, train in federation.train.items()}
    models = simulate(spec, broadcast, images, compare=True).models
    # The encoder is frozen: the plants' models have the same, so each image is encoded once.
    network = Network(spec.model, len(spec.classes))
    encoder = to_tensors(broadcast)
    features = {}
    for name, each in federation.test.items():
        data = TrainingSet.of(each, spec.preprocessing)
        features[name] = torch.from_numpy(encode_all(network, encoder, data))
    return [judge(model, federation.test, features) for model in models.values()]


def judge(
    model: PersonalModel, test: Mapping[str, LabelledImages], features: Mapping[str, torch.Tensor]
) -> Figures:
    """Judge a plant's model on held-out images, whose features [n, d] its encoder has made."""
    metadata = model.metadata
    network = Network(metadata.model, len(metadata.classes))
    fusion = infer_fusion(model.tensors)
    logits = {}
    for name, each in features.items():
        fused = fusion.fuse([each], model.tensors)
        logits[name] = network.linear(model.tensors, "classifier", fused).numpy()
    own = sorted(metadata.classes.index(name) for name in metadata.trained)
    mine = logits[metadata.node]
    labels = test[metadata.node].labels
    assert metadata.confidence is not None
    calibrated = mine / metadata.confidence.temperature
    everyone = np.concatenate([logits[name] for name in test])
    all_labels = np.concatenate([each.labels for each in test.values()])
    return Figures(
        own=100 * accuracy(predict_among(mine, own), labels),
        all=100 * accuracy(everyone.argmax(1), all_labels),
        served=100 * accuracy(predict_in_service(calibrated, own), labels),
        told=100 * metadata.metrics["accuracy"],
    )


def measure_drawn(samples: int) -> Table:
    """Measure plants with so many drawn training images."""
    federations = [draw_federation(samples, seed) for seed in range(SEEDS)]
    return {f"drawn {samples}": average(federations)}


def measure_real(folder: Path) -> Table:
    """Measure plants that share the data set in a folder."""
    pool = Pool.read(folder)
    table = {}
    for samples in SAMPLES:
        federations = [pool.share(samples, seed) for seed in range(SEEDS)]
        table[f"{folder.name} {samples}"] = average(federations)
    return table


def average(federations: Sequence[Federation]) -> Figures:
    """Return the mean figures of all plants; a federation's position is its seed."""
    plants: list[Figures] = []
    for seed, federation in enumerate(federations):
        plants += run(federation, seed)
    means = {}
    for field in Figures.__struct_fields__:
        means[field] = round(float(np.mean([getattr(plant, field) for plant in plants])), 2)
    return Figures(**means)


def find_faults(found: Table, stored: Table) -> list[str]:
    """Return what is worse than stored, a line each."""
    faults = []
    for name, figures in found.items():
        before = stored.get(name)
        if before is None:
            faults.append(f"{name}: nothing is stored; store it with --renew")
            continue
        for field in ("own", "all", "served"):
            value = getattr(figures, field)
            least = getattr(before, field) - TOLERANCE
            if value < least:
                faults.append(f"{name}: {field} is {value:.2f} %, less than {least:.2f} %")
        most = before.error + TOLERANCE
        if figures.error > most:
            faults.append(
                f"{name}: plants are told {figures.told:.2f} % of {figures.served:.2f} %, "
                f"more than {most:.2f} points off"
            )
    return faults


def read_stored() -> Table:
    """Return the stored figures."""
    return msgspec.json.decode(STORED.read_bytes(), type=Table)


def main() -> None:
    """Print the figures and what is worse than stored; exit with 1 if anything is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="a folder with neu_cls or xsdd")
    parser.add_argument("--renew", action="store_true", help="store the figures")
    asked = parser.parse_args()
    found: Table = {}
    if asked.data is None:
        for samples in SAMPLES:
            found |= measure_drawn(samples)
    else:
        for name in REAL:
            folder = asked.data / name
            if folder.is_dir():
                found |= measure_real(folder)
            else:
                print(f"skipped, because {folder} does not exist")
    for name, figures in found.items():
        values = " ".join(
            f"{key} {value:.2f}" for key, value in msgspec.to_builtins(figures).items()
        )
        print(f"{name}: {values}")
    stored = read_stored()
    if asked.renew:
        encoded = msgspec.json.encode(stored | found, order="sorted")
        STORED.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")
        return
    faults = find_faults(found, stored)
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
