"""A second look at the images that judged a personal model: where they lie in its feature space, what it looked at."""

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

from edge.images import decode
from trainer import personal
from trainer.data import LabelledImages
from trainer.engine import TrainingSet
from trainer.network import Network
from trainer.page.gather import Node
from trainer.personal import Verdict

_PICTURED = 160  # pixels of a picture's side on the page
_EACH = 4  # pictures judged right, and as many wrong
_MOST = 400  # images that are looked at, a node
_BATCH = 32
_LEAST = 5  # images, below which there is no map to draw
# Dark violet over red to pale yellow, ever lighter: it can be read without telling hues apart.
_HEAT = np.array([(40, 11, 84), (101, 21, 110), (159, 42, 99), (212, 72, 66), (245, 125, 21), (252, 255, 164)], float)


class Picture(NamedTuple):
    """An image, and the same under the class activation map of its verdict; both as data URIs."""

    verdict: Verdict
    plain: str
    heat: str


class Examined(NamedTuple):
    """What was found."""

    verdicts: list[Verdict]  # those whose images are still where they were
    places: np.ndarray  # [n, 2] of those, or [0, 2] when they are too few
    right: list[Picture]
    wrong: list[Picture]
    cells: tuple[int, int]  # height and width of the maps before they are smoothed


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
    verdicts = [verdict for verdict, _ in found]
    features, maps = _see(node, np.stack([pixels for _, pixels in found]))
    right, wrong = [], []
    if pictures:
        own = {
            verdict: evidence[node.facts.classes.index(verdict.verdict)]
            for verdict, evidence in zip(verdicts, maps, strict=True)
        }
        right = [_picture(verdict, own[verdict]) for verdict in _pick_right(verdicts)]
        wrong = [_picture(verdict, own[verdict]) for verdict in _pick_wrong(verdicts)]
    return Examined(verdicts, _embed(features), right, wrong, maps.shape[2:])


def _present(node: Node) -> Iterator[tuple[Verdict, np.ndarray]]:
    """The images as the network takes them, uint8 [S, S, 3]; those that are gone or have changed are left out."""
    for verdict in node.verdicts:
        try:
            content = Path(verdict.path).read_bytes()
        except OSError:
            continue
        if hashlib.sha256(content).hexdigest() == verdict.digest:
            yield verdict, decode(content, node.facts.preprocessing.size, verdict.path)


def _see(node: Node, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Features [n, F] and class activation maps [n, classes, h, w] of images uint8 [n, S, S, 3]."""
    facts, tree, _ = personal.load(node.model)
    network = Network(facts.model, len(facts.classes))
    seen = []
    with torch.no_grad():
        for batch in np.array_split(pixels, -(-len(pixels) // _BATCH)):
            images = LabelledImages(batch, np.zeros(len(batch), np.int64), (), ())
            data = TrainingSet.of(images, facts.preprocessing)
            seen.append(network.evidence(tree, data.network_input(slice(None))))
    features, maps = (torch.cat(parts).numpy() for parts in zip(*seen, strict=True))
    return features, maps


def _embed(features: np.ndarray) -> np.ndarray:
    """t-SNE of features [n, F] in the plane (van der Maaten and Hinton 2008)."""
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
    pixels = decode(Path(verdict.path), _PICTURED)
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
