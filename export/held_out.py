"""Images that judged a personal model: later images are compared with them.

A model of this version is calibrated by its plant. One of an older version is calibrated here, on
the images that it held out.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from broker_config.protocol.errors import UsageError
from edge.bundle.bundle_format import Confidence
from edge.bundle.reference import ClassAxes, Reference
from edge.inference.class_prior import Prior, reweight
from export.model_images import ImageFinder
from export.parity import open_session
from trainer.data.class_folders import LabelledImages
from trainer.models.fusion import NOVELTY
from trainer.models.named_tensors import strip_prefix
from trainer.models.network import Tensors
from trainer.training import personal_model
from trainer.training.calibration import calibrate
from trainer.training.personal_model import ModelMetadata

_BATCH = 32
_LEAST = 2  # images with which later ones can be compared


class Outputs(NamedTuple):
    """A graph's outputs for images."""

    probabilities: np.ndarray  # [n, C]
    opinions: np.ndarray  # [n, E, C]
    features: np.ndarray  # [n, F]


def load(source: Path, metadata: ModelMetadata, finder: ImageFinder) -> LabelledImages | str:
    """Return the images that judged the model in `source`; or why there are too few, as words."""
    if not metadata.metrics:
        return "none of its plant's images can judge it"
    if metadata.confidence is None and metadata.metrics.get("cross_validated"):
        return "all of its images trained it"
    try:
        verdicts = personal_model.load_predictions(source)
    except UsageError as error:
        return str(error)
    found = finder.find(verdicts, metadata)
    count = 0 if found is None else len(found.labels)
    if found is None or count < _LEAST:
        return f"{count} of the {len(verdicts)} images that judged it are where they were"
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
    """Return how sure a model may be whose graph, at temperature 1, is `content`.

    Its line has the default prior. Images are taken as if none looked like another.
    """
    if metadata.confidence:
        return metadata.confidence
    probabilities = run_graph(content, held_out.images).probabilities
    logits = np.log(np.maximum(probabilities, 1e-30))
    weights = _weights(metadata)
    return calibrate(logits, held_out.labels, metadata.classes, weights).confidence


def build_reference(
    content: bytes,
    held_out: LabelledImages,
    metadata: ModelMetadata,
    tensors: Tensors,
    novelty: Mapping[str, float],
) -> bytes:
    """Return how the graph that is served sees the images.

    They have the classes that a line with the default prior gives them. `tensors` are the personal
    model's; `novelty` is that of images by digest, where a head told it that had not seen them.
    """
    outputs = run_graph(content, held_out.images)
    taken = reweight(outputs.probabilities, _weights(metadata)).argmax(1)
    parts = {name: value.numpy() for name, value in strip_prefix(NOVELTY, tensors).items()}
    axes = ClassAxes(**parts) if parts else None
    classes = outputs.probabilities.shape[1]
    reference = Reference.from_features(outputs.features, taken, classes, outputs.opinions, axes)
    unseen = [novelty[digest] for digest in held_out.digests if digest in novelty]
    if axes and unseen:
        reference = reference._replace(novelty=np.sort(unseen).astype(np.float32))
    return reference.encode()


def _weights(metadata: ModelMetadata) -> np.ndarray:
    return Prior().weights(metadata.classes, metadata.trained)
