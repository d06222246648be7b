"""Good images alone -> a bundle that tells good from strange:
what a line starts with before anybody has labels.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from msgspec import Struct
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from broker_config.protocol.errors import UsageError
from broker_config.protocol.topics import check_name
from edge.bundle import bundle_format
from edge.inference.batch import Image, find_images
from edge.inference.image_decoding import read_image
from edge.inference.part_decision import NO_DEFECT
from edge.uncertainty.performance import Proportion
from edge_node.extensions.anomaly.patch_density import (
    MODEL,
    Judgement,
    PatchDensity,
    PlaceFeatures,
    cross_validate,
)
from export.graph import fill_values, trace
from export.parity import BATCHES, compare, draw_test_images, open_session
from trainer.data.checks.likeness import find_alike, make_thumbnail
from trainer.data.image_groups import unite

ANOMALY = "anomaly"
LEAST = 10  # good images
_CLASSES = (NO_DEFECT, ANOMALY)

Track = Callable[[Sequence[Image]], Iterable[Image]]


class AnomalyReport(Struct, frozen=True, kw_only=True):
    """What a detector was made of, and how it judges images that it was not made of."""

    bundle: str
    images: int  # good ones
    threshold: float  # of an image's distance
    # among good images, each judged by a detector that was fitted without it and its like
    false_rejects: Proportion
    found: Proportion | None  # among images of defects
    auroc: float | None  # of good images against those of defects


class _Detector(nn.Module):
    """Images uint8 [n, S, S, 3] -> probabilities [n, 2] of good and strange, and maps [n, 1,
    2, h, w].
    """

    threshold: Tensor
    slope: Tensor

    def __init__(self, features: PlaceFeatures, density: PatchDensity, judgement: Judgement):
        super().__init__()
        self.features = features
        self.density = density
        self.register_buffer("threshold", torch.tensor(judgement.threshold))
        self.register_buffer("slope", torch.tensor(judgement.slope))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        places, images = self.density(self.features(image))
        return torch.softmax(self._logits(images), 1), self._logits(places)[:, None]

    def _logits(self, distances: Tensor) -> Tensor:
        strange = self.slope * (torch.log(distances) - self.threshold)
        return torch.stack([torch.zeros_like(strange), strange], 1)


def export_anomaly_detector(
    good: Path, defects: Path | None, target: Path, size: int, track: Track = lambda images: images
) -> AnomalyReport:
    """Write the bundle `target`, whose name is the node's, from a folder of good images,
    and judge it.

    Args:
        good: images without a defect, in the folder and below.
        defects: images with one, by which nothing is chosen; without them only false rejects are
            known.
        target: the bundle's folder.
        size: of the graph's input, pixels.
        track: passes the image files on, to show progress.

    Raises:
        UsageError: fewer than LEAST good images that differ, or an image that cannot be read.
        ParityError: the graph does not compute what torch computes; nothing is written.
    """
    check_name(target.name, "the bundle's name (--out)")
    network = PlaceFeatures()
    images, groups = _load(find_images([good]), size, track)
    if len(np.unique(groups)) < LEAST:
        raise UsageError(
            f"{good} has {len(np.unique(groups))} good images that differ, {LEAST} are needed",
            "take more, over a day or more: what good images differ in must be among them",
        )
    features = torch.stack(list(network.of_images(images)))
    strange = None
    if defects:
        strange = torch.stack(
            list(network.of_images(_load(find_images([defects]), size, track)[0]))
        )
    held_out, of_defects = cross_validate(features, groups, strange)
    judgement = Judgement.of(held_out)
    detector = _Detector(network, PatchDensity.fit(features), judgement)
    detected = None if of_defects is None else _proportion(judgement.rejects(of_defects))
    auroc = None if of_defects is None else _auroc(held_out, of_defects)
    report = AnomalyReport(
        bundle=str(target),
        images=len(images),
        threshold=float(np.exp(judgement.threshold)),
        false_rejects=_proportion(judgement.rejects(held_out)),
        found=detected,
        auroc=auroc,
    )
    _write(target, detector, size, report)
    return report


def _load(files: Sequence[Image], size: int, track: Track) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [n, size, size, 3], and the numbers [n] of the groups of those that look
    alike.
    """
    pixels = []
    thumbnails = []
    for file in track(files):
        photo = read_image(file.path, file.name)
        pixels.append(photo.resize(size))
        thumbnails.append(make_thumbnail(photo.image.convert("L")))
    links = [(pair.one, pair.other) for pair in find_alike(thumbnails)]
    return np.stack(pixels), unite(len(pixels), links)


def _proportion(outcomes: np.ndarray) -> Proportion:
    found = Proportion.of(outcomes.tolist())
    assert found is not None  # there are images
    return found


def _auroc(good: np.ndarray, strange: np.ndarray) -> float:
    truths = np.repeat([0, 1], [len(good), len(strange)])
    return float(roc_auc_score(truths, np.concatenate([good, strange])))


def _write(target: Path, detector: _Detector, size: int, report: AnomalyReport) -> None:
    content = fill_values(trace(detector, size, ("probabilities", "maps")), detector)
    for count in BATCHES:
        images = draw_test_images(size, count)
        with torch.no_grad():
            expected = dict(
                zip(("probabilities", "maps"), detector(torch.from_numpy(images)), strict=True)
            )
        compare(content, images, {name: value.numpy() for name, value in expected.items()}, target)
    [golden] = draw_test_images(size, 1)
    [probabilities] = (
        open_session(content).run(["probabilities"], {"image": golden[None]})[0].tolist()
    )
    metrics = {bundle_format.FALSE_REJECTS: report.false_rejects.share}
    if report.auroc is not None:
        metrics["auroc"] = report.auroc
    description = bundle_format.Description(
        federation="",
        run="",
        node=target.name,
        method="patch_density",
        model=MODEL,
        round=0,
        classes=_CLASSES,
        input=bundle_format.Input(size=size),
        extras=("maps",),
        encoders=("received",),
        metrics=metrics,
    )
    bundle_format.write_bundle(target, description, content, golden, probabilities)
