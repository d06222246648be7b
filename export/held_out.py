"""Held-out images of a personal model: they calibrate its graph,
and later images are compared with them.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from broker_config.protocol.errors import UsageError
from edge.bundle.bundle_format import Confidence
from edge.inference.class_prior import Prior, reweight
from edge.uncertainty.reference import ClassAxes, Reference
from export.calibration import MIN_IMAGES, calibrate
from export.model_images import ImageFinder
from export.parity import open_session
from trainer.data.class_folders import LabelledImages
from trainer.models.fusion import NOVELTY
from trainer.models.named_tensors import strip_prefix
from trainer.models.network import Tensors
from trainer.training import personal_model
from trainer.training.personal_model import ModelMetadata

_BATCH = 32


class Outputs(NamedTuple):
    """A graph's outputs for images."""

    probabilities: np.ndarray  # [n, C]
    opinions: np.ndarray  # [n, E, C]
    features: np.ndarray  # [n, F]


def load(source: Path, metadata: ModelMetadata, finder: ImageFinder) -> LabelledImages | str:
    """The held-out images of the model in `source`; or why there are too few of them, as words."""
    if not metadata.metrics:
        return "its plant had no labelled image"
    if metadata.metrics.get("cross_validated"):
        return "all of its images trained it"
    try:
        verdicts = personal_model.load_predictions(source)
    except UsageError as error:
        return str(error)
    found = finder.find(verdicts, metadata)
    count = 0 if found is None else len(found.labels)
    if found is None or count < MIN_IMAGES:
        return (
            f"{count} of {len(verdicts)} held-out images are where they were, at least "
            f"{MIN_IMAGES} are needed"
        )
    return found


def run_graph(content: bytes, images: np.ndarray) -> Outputs:
    """The outputs for images uint8 [n, S, S, 3] of a graph that gives opinions and features."""
    running = open_session(content)
    parts = [
        running.run(Outputs._fields, {"image": images[start : start + _BATCH]})
        for start in range(0, len(images), _BATCH)
    ]
    return Outputs(*(np.concatenate(values) for values in zip(*parts, strict=True)))


def calibrate_confidence(
    content: bytes, held_out: LabelledImages, metadata: ModelMetadata
) -> Confidence:
    """How sure a model may be whose graph, at temperature 1, is `content`,
    on a line with the default prior.
    """
    probabilities = run_graph(content, held_out.images).probabilities
    logits = np.log(np.maximum(probabilities, 1e-30))
    return calibrate(logits, held_out.labels, metadata.classes, _weights(metadata))


def build_reference(
    content: bytes, held_out: LabelledImages, metadata: ModelMetadata, tensors: Tensors
) -> bytes:
    """How the graph that is served sees the images,
    by the classes that a line with the default prior gives them.

    `tensors` are the personal model's.
    """
    outputs = run_graph(content, held_out.images)
    taken = reweight(outputs.probabilities, _weights(metadata)).argmax(1)
    parts = {name: value.numpy() for name, value in strip_prefix(NOVELTY, tensors).items()}
    axes = ClassAxes(**parts) if parts else None
    classes = outputs.probabilities.shape[1]
    return Reference.from_features(
        outputs.features, taken, classes, outputs.opinions, axes
    ).encode()


def _weights(metadata: ModelMetadata) -> np.ndarray:
    return Prior().weights(metadata.classes, metadata.trained)
