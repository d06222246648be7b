"""A small federation that a plant audits, and images that it has."""

from pathlib import Path
from typing import Any

import numpy as np

from broker_config.protocol.messages import Spec
from tests.support.plants import CLASSES
from trainer.data.class_folders import LabelledImages
from trainer.federation.server.spec import Request, draft
from trainer.models.named_tensors import Arrays


def drafted(method: str, *, nodes: int = 4, **changes: Any) -> tuple[Spec, Arrays]:
    """Spec and first broadcast of a federation of small encoders."""
    request = Request(method, model="small", weights="none", size=32, seed=7)._replace(**changes)
    request = request if method == "gaussian" else request._replace(rounds=2)
    return draft(request, federation="steel", classes=CLASSES, nodes=nodes, encryption="group")


def striped(counts: list[int], seed: int, size: int = 32) -> LabelledImages:
    """counts[c] images of class c, gray: stripes of a width by class,
    each with a look of its own.
    """
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(counts)), counts)
    across = np.arange(size)
    images = np.empty((len(labels), size, size, 3), np.uint8)
    for number, label in enumerate(labels):
        stripes = np.sin(across * (0.4 + 0.5 * label) + random.uniform(0, 6))
        coarse = np.kron(random.normal(0, 40, (4, 4)), np.ones((size // 4, size // 4)))
        pixels = 120 + 50 * stripes[:, None] + coarse + random.normal(0, 10, (size, size))
        images[number] = pixels.clip(0, 255)[..., None].astype(np.uint8)
    names = tuple(f"{seed}-{number}" for number in range(len(labels)))
    return LabelledImages(images, labels.astype(np.int64), names, tuple(map(Path, names)))
