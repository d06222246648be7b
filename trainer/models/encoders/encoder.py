"""An encoder's description: what is known of it before torch is imported,
and how it is built then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import nn


class Shipped(NamedTuple):
    """Weights that come with the package edge-node-weights."""

    weights: str  # what `--weights` calls them
    files: tuple[str, ...]  # their names there; each holds some of the tensors


class Encoder(NamedTuple):
    """A network without its classifier: images [n, 3, S, S] -> features [n, F]."""

    features: int  # F
    values: int  # how many numbers it holds
    build: Callable[[], nn.Module]  # imports torch
    imagenet: str = (
        # torchvision's name of published weights whose tensors are called like its own, if there
        # are any
        ""
    )
    shipped: Shipped | None = None
    # what published and shipped weights hold beside its own tensors: beginnings of names
    lacks: tuple[str, ...] = ()
    size: int = 128  # pixels of the images, if a federation names none
