"""The heads of a frozen encoder, each judged by leaving out groups of look-alike images.

Three heads are cheap enough to be made anew without each group: the consensus head of all plants'
sums (*together*), the plant's own logistic regression (*alone*), and the sum of their
log-probabilities (*mixed*). They fail on different plants. How much of each is deployed follows
from the cross-entropy of the images that they have not seen; the prediction for a group is made
with the shares that the other groups give, so that the choice does not flatter it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from edge.bundle.comparison import CandidateName
from trainer.progress.long_work import check_stop, steps
from trainer.statistics import logistic_head
from trainer.statistics.label_doubts import log_softmax
from trainer.statistics.lda_head import fit_scale
from trainer.statistics.logistic_head import STRENGTHS, Linear

FOLDS = 20
"""Folds of groups: with fewer groups, each is left out by itself."""

FOLDS_OF_MANY = 5
"""Folds of groups of a plant with more than MANY images."""

MANY = 200

# How much of the difference of the cross-entropies counts: one plant's images resemble each other,
# and so are less evidence than as many independent ones.
_TEMPER = 0.5
_PRIOR = 8.0  # odds of the consensus head before any evidence
_SNAP = 0.05  # a share below that is not worth a second head


class Together(NamedTuple):
    """The consensus head of all plants' sums, without some images of the plant."""

    head: Linear
    # features [n, d] -> how far they are from every class, [n]; None if the head does not tell
    novelty: Callable[[np.ndarray], np.ndarray] | None = None


class Mixture(NamedTuple):
    """How the two heads become one."""

    strength: float  # of the plant's own logistic regression
    together_scale: float  # factors of the heads' logits
    alone_scale: float
    share: float  # of the consensus head, in 0..1

    @property
    def name(self) -> CandidateName:
        """The candidate that it amounts to."""
        if self.share == 1:
            return "together"
        return "alone" if self.share == 0 else "mixed"

    def combine(self, together: np.ndarray, alone: np.ndarray, own: Sequence[int]) -> np.ndarray:
        """Return the logits [n, C] of the mixture.

        It mixes among the plant's own classes. Their level against other classes, which only the
        consensus head knows, stays.
        """
        scaled = self.together_scale * together
        level = scaled[:, own].mean(1, keepdims=True)
        among = self.alone_scale * alone[:, own]
        centred = among - among.mean(1, keepdims=True)
        mixed = scaled.copy()
        mixed[:, own] = level + self.share * (scaled[:, own] - level) + (1 - self.share) * centred
        return mixed

    def head(self, together: Linear, alone: Linear, own: Sequence[int]) -> Linear:
        """Return the mixture as one linear classifier."""
        weight = self.combine(together.weight.T, alone.weight.T, own).T
        bias = self.combine(together.bias[None], alone.bias[None], own)[0]
        return Linear(weight, bias)


class LeftOut(NamedTuple):
    """Predictions for a plant's images, each by heads that have not seen its group."""

    folds: list[np.ndarray]  # positions of the images that are left out together
    together: np.ndarray  # logits [n, C]
    alone: dict[float, np.ndarray]  # logits [n, C] by strength
    known: np.ndarray  # bool [n]: whether anything else shows the image's class
    repeated: np.ndarray  # bool [n]: whether another group of the plant does
    remaining: np.ndarray  # [n]: the part of its class's images, of all plants, that was left
    novelty: np.ndarray | None  # [n]


class Judged(NamedTuple):
    """The head that is deployed, and what each candidate says of unseen images."""

    head: Linear
    deployed: CandidateName
    logits: dict[CandidateName, np.ndarray]  # [n, C]; of the deployed one with the choice nested
    heads: dict[CandidateName, Linear]
    known: np.ndarray  # bool [n]: the images that can be judged
    remaining: np.ndarray  # [n]: as in `LeftOut`
    novelty: np.ndarray | None  # [n]


def leave_out(
    features: np.ndarray,
    labels: np.ndarray,
    folds: Sequence[np.ndarray],
    elsewhere: np.ndarray,
    fit_together: Callable[[np.ndarray], Together],
) -> LeftOut:
    """Predict each fold by heads that are made without it.

    Args:
        features: [n, V, d] of the plant's images, of length one; the first view is classified.
        labels: [n].
        folds: positions, each once.
        elsewhere: [C], images that other plants have of each class.
        fit_together: makes the consensus head with the plant's images at these positions alone.
    """
    count = len(labels)
    classes = len(elsewhere)
    totals = elsewhere + np.bincount(labels, minlength=classes)
    remaining = np.empty(count)
    together = np.empty((count, classes))
    alone = {strength: np.empty((count, classes)) for strength in STRENGTHS}
    novelty: np.ndarray | None = np.empty(count)
    known = np.empty(count, bool)
    repeated = np.empty(count, bool)
    for fold in steps("judging: images left out in turn", folds):
        kept = np.setdiff1d(np.arange(count), fold)
        made = fit_together(kept)
        seen = features[fold, 0]
        together[fold] = made.head.logits(seen)
        left = totals - np.bincount(labels[fold], minlength=classes)
        remaining[fold] = (left / np.maximum(totals, 1))[labels[fold]]
        repeated[fold] = np.isin(labels[fold], labels[kept])
        # A class that nobody has an image of has no weight.
        known[fold] = made.head.weight[labels[fold]].any(1)
        for strength, logits in alone.items():
            check_stop()
            head = logistic_head.fit(features[kept], labels[kept], classes, strength)
            logits[fold] = head.logits(seen)
        if made.novelty is None:
            novelty = None
        elif novelty is not None:
            novelty[fold] = made.novelty(seen)
    return LeftOut(list(folds), together, alone, known, repeated, remaining, novelty)


def fit_mixture(
    left_out: LeftOut, labels: np.ndarray, own: Sequence[int], rows: np.ndarray
) -> Mixture:
    """Fit the mixture to the images `rows`, by what heads say that have not seen them.

    With few images the share stays near that of _PRIOR. Where no image can judge the plant's own
    head, the consensus head is taken alone.
    """
    together = left_out.together[rows]
    truth = labels[rows]
    known = left_out.known[rows]
    together_scale = fit_scale(together[known], truth[known], 1)
    repeated = left_out.repeated[rows]
    positions = np.searchsorted(own, truth[repeated])
    if len(own) < 2 or not len(positions):
        return Mixture(STRENGTHS[1], together_scale, 1.0, 1.0)

    def cost(logits: np.ndarray, scale: float) -> float:
        likelihoods = log_softmax(scale * logits)
        return -float(likelihoods[np.arange(len(positions)), positions].sum())

    costs = {}
    for strength, logits in left_out.alone.items():
        among = logits[rows][repeated][:, own]
        scale = fit_scale(among, positions, 1)
        costs[strength] = (cost(among, scale), scale)
    strength = min(costs, key=lambda each: costs[each][0])
    alone_cost, alone_scale = costs[strength]
    among = together[repeated][:, own]
    together_cost = cost(among, together_scale)
    odds = np.log(_PRIOR) + _TEMPER * (alone_cost - together_cost)
    share = float(1 / (1 + np.exp(-np.clip(odds, -50, 50))))
    if min(share, 1 - share) < _SNAP:
        share = round(share)
    return Mixture(strength, together_scale, alone_scale, float(share))


def judge(
    features: np.ndarray,
    labels: np.ndarray,
    own: Sequence[int],
    left_out: LeftOut,
    together: Linear,
) -> Judged:
    """Choose what is deployed, and predict each image without its part in the choice.

    Args:
        features: [n, V, d] of all of the plant's images.
        labels: [n].
        own: labels of the plant's classes, in order.
        left_out: what heads say that have not seen the images.
        together: the consensus head of all of them.
    """
    everything = np.arange(len(labels))
    chosen = fit_mixture(left_out, labels, own, everything)
    classes = together.weight.shape[0]
    alone = logistic_head.fit(features, labels, classes, chosen.strength)
    nested = np.empty_like(left_out.together)
    for fold in left_out.folds:
        mixture = fit_mixture(left_out, labels, own, np.setdiff1d(everything, fold))
        nested[fold] = _mix(mixture, left_out, own, fold)
    by_itself = left_out.alone[chosen.strength]
    scale = chosen.alone_scale
    logits: dict[CandidateName, np.ndarray] = {"alone": scale * by_itself}
    heads: dict[CandidateName, Linear] = {"alone": Linear(scale * alone.weight, scale * alone.bias)}
    candidates: tuple[tuple[CandidateName, float], ...] = (("together", 1.0), ("mixed", 0.5))
    for name, share in candidates:
        mixture = chosen._replace(share=share)
        logits[name] = _mix(mixture, left_out, own, everything)
        heads[name] = mixture.head(together, alone, own)
    logits[chosen.name] = nested
    head = chosen.head(together, alone, own)
    heads[chosen.name] = head
    return Judged(
        head, chosen.name, logits, heads, left_out.known, left_out.remaining, left_out.novelty
    )


def _mix(mixture: Mixture, left_out: LeftOut, own: Sequence[int], rows: np.ndarray) -> np.ndarray:
    """Return the mixture's logits [r, C] for some images.

    Where all of the plant's images of a class are left out, its own head would veto the class,
    which the one that is deployed does not: the consensus head predicts these images alone.
    """
    together = left_out.together[rows]
    mixed = mixture.combine(together, left_out.alone[mixture.strength][rows], own)
    single = ~left_out.repeated[rows]
    mixed[single] = mixture.together_scale * together[single]
    return mixed
