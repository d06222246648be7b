"""How good the models are that plants get, and how true the accuracy is that they are told.

    python -m benchmarks.quality                   # drawn surfaces, as the tests do
    python -m benchmarks.quality --data FOLDER     # also FOLDER/neu_cls and FOLDER/xsdd, if present
    python -m benchmarks.quality --renew           # store what was measured

Federations of five plants with three classes each run the method `gaussian` on the default encoder.
Each plant's model judges held-out images:

- *own*: the plant's images, its own classes being the candidates.
- *all*: every plant's images, every class being a candidate.
- *served*: the plant's images, as a line judges by default.
- *told*: what the plant was told of *served*, which it estimates from its training images.

The figures are means over seeds, plants and images, in %. They are the same each time on one
machine. The program fails if one of the first three is more than TOLERANCE below the figure in
quality.json, or if *told* is further from *served* than there, by more than that.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from broker_config.protocol.errors import UsageError
from trainer.data import class_folders, drawn_surfaces
from trainer.data.class_folders import Images, LabelledImages
from trainer.data.image_groups import group_entries
from trainer.data.partition import Scheme, select_pool
from trainer.data.partitions.disjoint import Disjoint
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate
from trainer.models.fusion import infer_fusion
from trainer.models.network import Network, to_tensors
from trainer.training.engine import encode_all
from trainer.training.evaluation import accuracy, predict_among, predict_in_service
from trainer.training.personal_model import PersonalModel
from trainer.training.seeding import generator
from trainer.training.training_set import TrainingSet

STORED = Path(__file__).with_suffix(".json")
TOLERANCE = 1.0  # points: other machines round differently, which moves a few images

PLANTS = 5
CLASSES_PER_PLANT = 3
SAMPLES = (5, 10, 20)  # training images of each plant
DRAWN = "drawn"
DRAWN_SIZE = 64
DRAWN_SEEDS = 6
DRAWN_TESTED = 10  # held-out images of each of a plant's classes
REAL = ("neu_cls", "xsdd")
REAL_SIZE = 128
REAL_SEEDS = 10


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Accuracy in %."""

    own: float
    all: float
    served: float
    told: float

    @property
    def error(self) -> float:
        """How far the plants are told something else than what is true, in points."""
        return abs(self.told - self.served)


Table = dict[str, Figures]
"""By data set and training images of a plant: `drawn 5`."""


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
        return Pool(catalogue, group_entries(catalogue.entries), images)

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
