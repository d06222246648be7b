"""A second look at the images that judged a personal model: its view of them, and what counted in each."""

import base64
import hashlib
import io
from collections.abc import Iterator
from itertools import islice, zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from edge.inference.image_decoding import decode_image
from trainer.data.class_folders import LabelledImages
from trainer.models.network import Network, Tensors
from trainer.report.run_files import Node
from trainer.training import personal_model as personal
from trainer.training.personal_model import Verdict
from trainer.training.training_set import TrainingSet

_PICTURED = 160  # pixels of a picture's side on the page
_EACH = 4  # pictures judged right, and as many wrong
_MOST = 400  # images that are looked at, a node
_BATCH = 32
_GRID = 6  # places, down and across, that are hidden one after the other
_HIDDEN = 0.11  # standard deviation of what is hidden, share of the image
_LEAST = 5  # images, below which there is no map to draw
# Dark violet over red to pale yellow, ever lighter: it can be read without telling hues apart.
_HEAT = np.array([(40, 11, 84), (101, 21, 110), (159, 42, 99), (212, 72, 66), (245, 125, 21), (252, 255, 164)], float)


class Picture(NamedTuple):
    """An image, and the same under the map of what its verdict hangs on; both as data URIs."""

    verdict: Verdict
    plain: str
    heat: str


class Examined(NamedTuple):
    """What was found."""

    verdicts: list[Verdict]  # those whose images are still where they were
    places: np.ndarray  # [n, 2] of those, or [0, 2] when they are too few
    right: list[Picture]
    wrong: list[Picture]


def examine(node: Node, *, pictures: bool) -> Examined | None:
    """Look at a node's held-out images with its personal model; None when none is where it was, unchanged.

    A cross-validated node has none either: all its images trained the model.

    Args:
        node: whose.
        pictures: whether to make pictures of some.
    """
    found = [] if node.facts.metrics["cross_validated"] else list(islice(_present(node), _MOST))
    if not found:
        return None
    seen = dict(found)
    verdicts = list(seen)
    facts, tensors, *_ = personal.load(node.model)
    network = Network(facts.model, len(facts.classes))
    with torch.no_grad():
        features = np.concatenate(
            [network.features(tensors, batch).numpy() for batch in _inputs(node, list(seen.values()))]
        )

        def picture(verdict: Verdict) -> Picture:
            (image,) = _inputs(node, [seen[verdict]])
            return _picture(verdict, occlusion(network, tensors, image[0], facts.classes.index(verdict.verdict)))

        right = [picture(verdict) for verdict in _pick_right(verdicts)] if pictures else []
        wrong = [picture(verdict) for verdict in _pick_wrong(verdicts)] if pictures else []
    return Examined(verdicts, project(features), right, wrong)


def _present(node: Node) -> Iterator[tuple[Verdict, np.ndarray]]:
    """The images as the network takes them, uint8 [S, S, 3]; those that are gone or have changed are left out."""
    for verdict in node.verdicts:
        try:
            content = Path(verdict.path).read_bytes()
        except OSError:
            continue
        if hashlib.sha256(content).hexdigest() == verdict.digest:
            yield verdict, decode_image(content, node.facts.preprocessing.size, verdict.path)


def _inputs(node: Node, pixels: list[np.ndarray]) -> Iterator[Tensor]:
    """Images uint8 [S, S, 3] as the network takes them, in batches [b, 3, S, S]."""
    for start in range(0, len(pixels), _BATCH):
        batch = np.stack(pixels[start : start + _BATCH])
        images = LabelledImages(batch, np.zeros(len(batch), np.int64), (), ())
        yield TrainingSet.of(images, node.facts.preprocessing).network_input(slice(None))


def occlusion(network: Network, personal: Tensors, image: Tensor, label: int) -> np.ndarray:
    """What speaks for a class: by how much its score falls when a place is hidden (Zeiler and Fergus 2014).

    A place is hidden by blurring it out softly, since a gray square would look like a defect of its own. The score is
    the class's logit less the mean of all.

    Args:
        network: the structure of `personal`.
        personal: a personal model.
        image: [3, S, S].
        label: of the class.

    Returns:
        The fall [6, 6], positive where hiding hurts.
    """
    size = image.shape[-1]
    coarse = functional.adaptive_avg_pool2d(image[None], 3)
    blurred = functional.interpolate(coarse, (size, size), mode="bicubic", align_corners=False)[0]
    places = (torch.arange(_GRID) + 0.5) / _GRID
    near = torch.exp(-(((torch.arange(size) + 0.5) / size - places[:, None]) ** 2) / (2 * _HIDDEN**2))
    masks = (near[:, None, :, None] * near[None, :, None, :]).reshape(-1, 1, size, size)
    hidden = (image + masks * (blurred - image)).contiguous(memory_format=torch.channels_last)
    logits = network.predict(personal, torch.cat([image[None], hidden]))
    score = logits[:, label] - logits.mean(1)
    return np.asarray((score[0] - score[1:]).reshape(_GRID, _GRID).numpy())


def project(features: np.ndarray) -> np.ndarray:
    """t-SNE of features [n, F] in the plane [n, 2] (van der Maaten and Hinton 2008); [0, 2] of too few."""
    if len(features) < _LEAST:
        return np.empty((0, 2))
    from sklearn.manifold import TSNE  # noqa: PLC0415  (slow to import)
    from threadpoolctl import threadpool_limits  # noqa: PLC0415

    view = TSNE(perplexity=min(20.0, (len(features) - 1) / 3), init="pca", random_state=0)
    with threadpool_limits(1):  # so few points; on a busy machine threads would wait for each other
        return np.asarray(view.fit_transform(features))


# Pictures


def _pick_right(verdicts: list[Verdict]) -> list[Verdict]:
    """Right ones, of each class in turn; which of a class is left to its digest, not to how well they look."""
    right = [verdict for verdict in verdicts if verdict.verdict == verdict.label]
    classes = [[v for v in right if v.label == name] for name in sorted({v.label for v in right})]
    return list(islice((v for turn in zip_longest(*classes) for v in turn if v), _EACH))


def _pick_wrong(verdicts: list[Verdict]) -> list[Verdict]:
    """The wrong ones that it was surest of."""
    wrong = [verdict for verdict in verdicts if verdict.verdict != verdict.label]
    return sorted(wrong, key=lambda verdict: -verdict.confidence)[:_EACH]


def _picture(verdict: Verdict, evidence: np.ndarray) -> Picture:
    pixels = decode_image(Path(verdict.path), _PICTURED)
    return Picture(verdict, _data_uri(pixels), _data_uri(heat(pixels, evidence)))


def heat(pixels: np.ndarray, evidence: np.ndarray) -> np.ndarray:
    """An image uint8 [S, S, 3] under what speaks for a class [h, w]; what speaks against it stays as it is."""
    positive = Image.fromarray(np.maximum(evidence, 0).astype(np.float32))
    smooth = np.asarray(positive.resize(pixels.shape[1::-1], Image.Resampling.BICUBIC)).clip(0)
    strength = smooth / (smooth.max() or 1.0)
    steps = np.linspace(0, 1, len(_HEAT))
    colour = np.stack([np.interp(strength, steps, _HEAT[:, channel]) for channel in range(3)], 2)
    opacity = 0.6 * strength[..., None]
    return np.asarray((pixels * (1 - opacity) + colour * opacity).clip(0, 255).astype(np.uint8))


def _data_uri(pixels: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=80, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
