"""Examination of a personal model by its held-out images: their features in the plane,
and occlusion heat maps.
"""

import base64
import io
from collections.abc import Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from broker_config.storage import checksums
from edge.inference.image_decoding import decode_image
from trainer.data.class_folders import LabelledImages
from trainer.data.training_set import TrainingSet
from trainer.models.network import Network, Tensors
from trainer.report.run_files import Node
from trainer.training import personal_model as personal
from trainer.training.personal_model import HeldOutPrediction

_PICTURE_SIZE = 160  # pixels, width and height on the page
_MAX_EXAMPLES = 4  # classified correctly, and as many wrongly
_MAX_IMAGES = 400  # examined, per node
_BATCH = 32
_GRID = 6  # patches, down and across, that are occluded one after the other
_OCCLUSION = 0.11  # standard deviation of an occluded patch, as a share of the image's width
_MIN_PROJECTED = 5  # images
# Dark violet over red to pale yellow, with increasing lightness: it can be read without telling
# hues apart.
_HEAT_COLOURS = np.array(
    [(40, 11, 84), (101, 21, 110), (159, 42, 99), (212, 72, 66), (245, 125, 21), (252, 255, 164)],
    float,
)


class Example(NamedTuple):
    """An image, alone and under the heat map of what its verdict depends on, both as data URIs."""

    prediction: HeldOutPrediction
    image: str
    heatmap: str


class Examination(NamedTuple):
    """Result of examining a node's model."""

    predictions: list[HeldOutPrediction]  # those whose images still exist unchanged
    projection: np.ndarray  # of their features, [n, 2]; [0, 2] if they are too few
    correct: list[Example]
    wrong: list[Example]


def examine(node: Node, *, examples: bool) -> Examination | None:
    """Examine a node's model by its held-out images; None if none of these still exists unchanged.

    A cross-validated node has none either: all its images trained the model.

    Args:
        node: has the model and its predictions.
        examples: whether to make examples of some images.
    """
    if node.metadata.metrics["cross_validated"]:
        return None
    images = dict(islice(_unchanged_images(node), _MAX_IMAGES))
    if not images:
        return None
    predictions = list(images)
    metadata, tensors, *_ = personal.load(node.model)
    network = Network(metadata.model, len(metadata.classes))
    with torch.no_grad():
        features = np.concatenate(
            [
                network.features(tensors, batch).numpy()
                for batch in _batches(node, list(images.values()))
            ]
        )

        def example(prediction: HeldOutPrediction) -> Example:
            (batch,) = _batches(node, [images[prediction]])
            return _example(
                prediction,
                occlusion_map(
                    network, tensors, batch[0], metadata.classes.index(prediction.verdict)
                ),
            )

        correct = (
            [example(prediction) for prediction in _pick_correct(predictions)] if examples else []
        )
        wrong = [example(prediction) for prediction in _pick_wrong(predictions)] if examples else []
    return Examination(predictions, project(features), correct, wrong)


def _unchanged_images(node: Node) -> Iterator[tuple[HeldOutPrediction, np.ndarray]]:
    """Images uint8 [S, S, 3] at the network's size;
    those that are gone or have changed are left out.
    """
    for prediction in node.predictions:
        content = checksums.read_unchanged(Path(prediction.path), prediction.digest)
        if content is not None:
            yield (
                prediction,
                decode_image(content, node.metadata.preprocessing.size, prediction.path),
            )


def _batches(node: Node, pixels: list[np.ndarray]) -> Iterator[Tensor]:
    """The network's input for images uint8 [S, S, 3], in batches [b, 3, S, S]."""
    for start in range(0, len(pixels), _BATCH):
        batch = np.stack(pixels[start : start + _BATCH])
        images = LabelledImages(batch, np.zeros(len(batch), np.int64), (), ())
        yield TrainingSet.of(images, node.metadata.preprocessing).network_input(slice(None))


def occlusion_map(network: Network, personal: Tensors, image: Tensor, label: int) -> np.ndarray:
    """Evidence for a class: by how much its score falls when a patch is occluded
    (Zeiler and Fergus 2014).

    A patch is occluded by a soft blur, since a gray square would look like a defect itself. The
    score is the class's logit less the mean of all logits.

    Args:
        network: the structure of `personal`.
        personal: a personal model.
        image: [3, S, S].
        label: index of the class.

    Returns:
        The decrease [6, 6], positive where occlusion lowers the score.
    """
    size = image.shape[-1]
    coarse = functional.adaptive_avg_pool2d(image[None], 3)
    blurred = functional.interpolate(coarse, (size, size), mode="bicubic", align_corners=False)[0]
    centres = (torch.arange(_GRID) + 0.5) / _GRID
    near = torch.exp(
        -(((torch.arange(size) + 0.5) / size - centres[:, None]) ** 2) / (2 * _OCCLUSION**2)
    )
    masks = (near[:, None, :, None] * near[None, :, None, :]).reshape(-1, 1, size, size)
    occluded = (image + masks * (blurred - image)).contiguous(memory_format=torch.channels_last)
    logits = network.predict(personal, torch.cat([image[None], occluded]))
    score = logits[:, label] - logits.mean(1)
    return np.asarray((score[0] - score[1:]).reshape(_GRID, _GRID).numpy())


def project(features: np.ndarray) -> np.ndarray:
    """t-SNE of features [n, F] in the plane [n, 2] (van der Maaten and Hinton 2008); [0,
    2] if they are too few.
    """
    if len(features) < _MIN_PROJECTED:
        return np.empty((0, 2))
    from sklearn.manifold import TSNE  # noqa: PLC0415  (slow to import)
    from threadpoolctl import threadpool_limits  # noqa: PLC0415

    view = TSNE(perplexity=min(20.0, (len(features) - 1) / 3), init="pca", random_state=0)
    # for so few points threads would only wait for each other on a busy machine
    with threadpool_limits(1):
        return np.asarray(view.fit_transform(features))


# Examples


def _pick_correct(predictions: list[HeldOutPrediction]) -> list[HeldOutPrediction]:
    """Correct ones, of each class in turn; within a class in the order of their digests,
    not of their looks.
    """
    correct = [prediction for prediction in predictions if prediction.verdict == prediction.label]
    classes = []
    for name in sorted({v.label for v in correct}):
        classes.append([v for v in correct if v.label == name])
    return list(islice((v for v in chain.from_iterable(zip_longest(*classes)) if v), _MAX_EXAMPLES))


def _pick_wrong(predictions: list[HeldOutPrediction]) -> list[HeldOutPrediction]:
    """The wrong ones with the highest confidence."""
    wrong = [prediction for prediction in predictions if prediction.verdict != prediction.label]
    return sorted(wrong, key=lambda prediction: -prediction.confidence)[:_MAX_EXAMPLES]


def _example(prediction: HeldOutPrediction, evidence: np.ndarray) -> Example:
    pixels = decode_image(Path(prediction.path), _PICTURE_SIZE)
    return Example(prediction, _data_uri(pixels), _data_uri(overlay_heatmap(pixels, evidence)))


def overlay_heatmap(pixels: np.ndarray, evidence: np.ndarray) -> np.ndarray:
    """An image uint8 [S, S, 3] under the evidence for a class [h, w];
    evidence against it is not drawn.
    """
    positive = Image.fromarray(np.maximum(evidence, 0).astype(np.float32))
    smooth = np.asarray(positive.resize(pixels.shape[1::-1], Image.Resampling.BICUBIC)).clip(0)
    strength = smooth / (smooth.max() or 1.0)
    steps = np.linspace(0, 1, len(_HEAT_COLOURS))
    colour = np.stack(
        [np.interp(strength, steps, _HEAT_COLOURS[:, channel]) for channel in range(3)], 2
    )
    opacity = 0.6 * strength[..., None]
    return np.asarray((pixels * (1 - opacity) + colour * opacity).clip(0, 255).astype(np.uint8))


def _data_uri(pixels: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=80, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
