"""An encoder's description: what is known of it before torch is imported,
and how it is built then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from trainer.models.encoders.encoder_module import EncoderModule
    from trainer.models.named_tensors import Arrays


class Shipped(NamedTuple):
    """Weights that come with the package edge-node-weights."""

    weights: str  # what `--weights` calls them
    files: tuple[str, ...]  # their names there; each holds some of the tensors


class Beginning(NamedTuple):
    """First layers that an encoder takes from published weights; the others are drawn."""

    part: str  # the child module that these layers are
    source: str  # what a file that holds them is of, in words: "VGG19's first layers"
    # the published tensors of these layers, by the encoder's own names; empty if there are none
    rename: Callable[[Arrays], Arrays]


class Encoder(NamedTuple):
    """A network without its classifier: images [n, 3, S, S] -> features [n, F]."""

    features: int  # F
    values: int  # how many numbers it holds
    build: Callable[[], EncoderModule]  # imports torch
    imagenet: str = (
        # torchvision's name of published weights whose tensors are called like its own, if there
        # are any
        ""
    )
    shipped: Shipped | None = None
    # what published and shipped weights hold beside its own tensors: beginnings of names
    lacks: tuple[str, ...] = ()
    size: int = 128  # pixels of the images, if a federation names none
    only_size: bool = False  # whether it takes images of that size alone
    # what it takes from published weights, unless they are those of all its layers
    beginning: Beginning | None = None
