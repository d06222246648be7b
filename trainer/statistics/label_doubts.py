"""Images that do not look like their class, by what the head without each of them says."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from trainer.statistics.lda_head import fit_scale
from trainer.statistics.sums import Sums

# Times that another class is as probable as an image's label, from which it is doubted: with its
# whitened features on its class's side, or turned away from it. It looks like another class from
# this cosine on; below, like none. At plants with 10 and 20 tuning images this finds 68 % of wrong
# labels and 58 % of foreign images, and doubts 4 % of the rest;
# 69 % of the foreign ones found, and 26 % of the wrong labels, are said to be unlike all classes.
_LIKELIER = 8.0
_LIKELIER_TURNED = 2.0
_LIKE = 0.2
_MOST = 10  # that are shown


class Doubt(msgspec.Struct, frozen=True, kw_only=True):
    """An image that does not look like its class."""

    path: str
    label: str
    looks_like: str  # a class; empty if it is like none


def find_judged(total: Sums, labels: np.ndarray, groups: Sequence[Sequence[int]]) -> np.ndarray:
    """Positions of the images of whose class the totals hold others, too,
    than those left out with them.
    """
    left = [
        total.images - np.bincount(labels[group], minlength=len(total.images)) for group in groups
    ]
    found = []
    for group, rest in zip(groups, left, strict=True):
        for image in group:
            if rest[labels[image]]:
                found.append(image)
    return np.array(sorted(found), np.int64)


def find_doubts(
    logits: np.ndarray,
    cosines: np.ndarray,
    labels: np.ndarray,
    paths: Sequence[Path],
    classes: Sequence[str],
) -> list[Doubt]:
    """Images that another class fits far better, or better with their own turned away;
    the most doubtful first.

    Args:
        logits: of each image by the head without it, [n, C], as `leave_one_out` gives them.
        cosines: likewise.
        labels: [n].
        paths: of the images.
        classes: of the federation.
    """
    if not len(labels):
        return []
    log_probabilities = log_softmax(logits * fit_scale(logits, labels))
    each = np.arange(len(labels))
    likeliest = log_probabilities.argmax(1)
    ratios = log_probabilities[each, likeliest] - log_probabilities[each, labels]
    turned = cosines[each, labels] < 0
    others = np.where(np.arange(len(classes)) == labels[:, None], -1, cosines).max(1)
    doubted = np.flatnonzero(
        (ratios > np.log(_LIKELIER)) | (turned & (ratios > np.log(_LIKELIER_TURNED)))
    )
    doubts: list[Doubt] = []
    for image in doubted[np.argsort(-ratios[doubted], kind="stable")]:
        looks_like = classes[likeliest[image]] if others[image] > _LIKE else ""
        doubts.append(
            Doubt(path=str(paths[image]), label=classes[labels[image]], looks_like=looks_like)
        )
    return doubts


def describe_doubts(doubts: Sequence[Doubt], everything: str) -> Iterator[str]:
    """A line for each of the first; of more, that `everything` has them."""
    for doubt in doubts[:_MOST]:
        what = f"looks like {doubt.looks_like}" if doubt.looks_like else "is unlike all classes"
        yield f"{doubt.path}: labelled {doubt.label}, {what}"
    if (more := len(doubts) - _MOST) > 0:
        yield f"and {more} more images that do not look like their class: see {everything}"


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Logarithms of the classes' probabilities [n, C]."""
    shifted = logits - logits.max(1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))
