"""Scores of attacks: what was sent is compared with images of the same plant that were not."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from edge_node.extensions.audit import measures
from edge_node.extensions.audit.exposure import Exposure, Pictures, Seen
from trainer.data.class_folders import LabelledImages


def agreement(guess: np.ndarray, sent: LabelledImages, seen: Seen, attack: str) -> Exposure:
    """How far a guess of counts or shares [C], which may be negative,
    agrees with those of what was sent.

    Who sees nothing guesses that all are equal. Chance is what that reaches on average, if any
    shares are as likely, or here, if that is more.
    """
    classes = len(guess)
    guess = np.maximum(guess, 0)
    truth = np.bincount(sent.labels, minlength=classes) / len(sent.labels)
    chance = max(
        1 - (1 - 1 / classes) ** classes, measures.overlap(np.full(classes, 1 / classes), truth)
    )
    # no guess tells nothing
    value = measures.overlap(guess / guess.sum(), truth) if guess.sum() > 0 else 0.0
    return Exposure(what="counts", seen=seen, attack=attack, value=value, chance=chance)


def membership(scores: np.ndarray, sent: int, seen: Seen, attack: str) -> list[Exposure]:
    """What scores say of images, of which the first `sent` were in what was seen and the others
    were not.
    """
    positive = np.arange(len(scores)) < sent
    if positive.all() or not positive.any():
        return []
    area = measures.auc(scores, positive)
    low, high = measures.auc_interval(area, sent, len(scores) - sent)
    return [
        Exposure(
            what="membership", seen=seen, attack=attack, value=area, chance=0.5, low=low, high=high
        )
    ]


def compare_pictures(
    made: Sequence[Tensor],
    labels: Sequence[int] | None,
    sent: LabelledImages,
    unsent: LabelledImages,
    seen: Seen,
    attack: str,
    blind: Tensor,
) -> tuple[list[Exposure], tuple[Pictures, ...]]:
    """How like the plant's images some pictures [3, SIDE, SIDE] are.

    Each is compared with the images of its label, or with all; and with those that were not sent,
    of which an attack cannot know anything. What that reaches is chance, or what `blind`, the
    attacker's mean image, does if it is more.
    """
    pixels, others = (to_pictures(images) for images in (sent, unsent))
    alike = []
    by_chance = []
    shown = []
    nearest = []
    for number, picture in enumerate(made):
        candidates = []
        for images in (sent, unsent):
            candidate = (
                np.arange(len(images.labels))
                if labels is None
                else np.flatnonzero(images.labels == labels[number])
            )
            candidates.append(candidate)
        places, elsewhere = candidates
        if not min(len(places), len(elsewhere)):
            continue
        value, place = measures.nearest(picture, pixels[places])
        alike.append(value)
        chances = (
            measures.nearest(picture, others[elsewhere]),
            measures.nearest(blind, pixels[places]),
        )
        by_chance.append(max(each for each, _ in chances))
        shown.append((255 * picture.permute(1, 2, 0).numpy()).round().astype(np.uint8))
        nearest.append(sent.images[places[place]])
    if not alike:
        return [], ()
    value, chance = (float(np.mean(each).clip(0, 1)) for each in (alike, by_chance))
    exposure = Exposure(what="pictures", seen=seen, attack=attack, value=value, chance=chance)
    return [exposure], (Pictures(seen, attack, np.stack(shown), np.stack(nearest)),)


def to_pictures(images: LabelledImages) -> Tensor:
    """Images as they are compared, [n, 3, SIDE, SIDE] in 0..1."""
    return measures.shrink(
        torch.from_numpy(np.ascontiguousarray(images.images)).permute(0, 3, 1, 2).float() / 255
    )
