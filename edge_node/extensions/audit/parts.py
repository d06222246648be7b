"""The images of an audit: those that are sent, those of the same plant that are not,
and what the attacker has.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.data import drawn_surfaces
from trainer.data.class_folders import Images, LabelledImages, split_folds

_DRAWN = 20  # surfaces of each class that an attacker draws for itself


class Parts(NamedTuple):
    """A plant's images in three parts, look-alikes together."""

    sent: LabelledImages  # a contribution is made of them
    unsent: LabelledImages  # nobody outside has seen anything of them
    # the attacker has them: one who knows such products, or another plant that makes them
    known: LabelledImages


def split(images: Images, seed: int, *, as_trained: bool) -> Parts:
    """The parts of a plant's images: half are sent and a quarter each is the rest,
    or as they were in a federation.

    Fewer images count more each, so half of them are told more surely than all would be.

    Args:
        images: the plant's.
        seed: of the parts.
        as_trained: whether all training images have been sent already, and half each of the
            held-out ones is the rest.
    """
    if as_trained:
        held_out = images.test if images.test is not None else images.train.take(np.arange(0))
        folds = split_folds(held_out, 2, seed) if len(held_out.labels) else []
        takes = []
        for place in (0, 1):
            fold = folds[place] if place < len(folds) else np.arange(0)
            takes.append(held_out.take(fold))
        unsent, known = takes
        return Parts(images.train, unsent, known)
    whole = images.train
    folds = split_folds(whole, 4, seed)
    places = [
        np.sort(np.concatenate(folds[start:stop] or [np.arange(0)]))
        for start, stop in ((0, 2), (2, 3), (3, 4))
    ]
    return Parts(*(whole.take(each) for each in places))


def attackers_own(known: LabelledImages, classes: int, size: int, seed: int) -> LabelledImages:
    """The images that the attacker has: those of the plant's kind that it knows,
    and surfaces that it draws.
    """
    drawn = draw_labelled(np.resize(np.arange(classes), _DRAWN * classes), size, seed, plant=0)
    return LabelledImages(
        np.concatenate([known.images, drawn.images]),
        np.concatenate([known.labels, drawn.labels]),
        known.digests + drawn.digests,
        known.paths + drawn.paths,
    )


def draw_labelled(labels: np.ndarray, size: int, seed: int, plant: int) -> LabelledImages:
    """Drawn surfaces with these labels [n], as one of the plants that are drawn sees them."""
    pixels = drawn_surfaces.draw_images(labels % len(drawn_surfaces.CLASSES), size, seed, plant)
    names = tuple(f"drawn {plant} {number}" for number in range(len(labels)))
    return LabelledImages(pixels, labels.astype(np.int64), names, tuple(map(Path, names)))
