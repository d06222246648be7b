"""Performance of a model on labelled images: accuracy, doubts,
missed defects and false rejects, with intervals.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from edge.bundle.bundle_format import Confidence, HeldOut, Manifest
from edge.inference.class_prior import Prior, reweight
from edge.inference.outcomes import Box
from edge.inference.part_decision import decide, no_defect_class
from edge.inference.tiling import View
from edge.terminal.formatting import pluralize

_CONFUSIONS = 3  # that a sentence tells
_NORMAL = 1.959964  # quantile of the normal distribution for 95 %


class Proportion(Struct, frozen=True, kw_only=True):
    """A share of images with its 95 % interval (Wilson 1927)."""

    share: float
    low: float
    high: float
    count: int
    images: int

    @staticmethod
    def of(outcomes: Iterable[bool], independent: float = 1.0) -> "Proportion | None":
        """Return the share of those that are true; None if there are none at all.

        `independent` is the number of groups of look-alikes for each image: images that look alike
        are one piece of evidence, and widen the interval.
        """
        found = list(outcomes)
        if not found:
            return None
        count = sum(found)
        images = len(found)
        low, high = wilson_interval(independent * count, independent * images)
        return Proportion(share=count / images, low=low, high=high, count=count, images=images)

    @staticmethod
    def of_left_out(outcomes: Sequence[bool], independent: float, credit: float) -> "Proportion":
        """Return the accuracy of a model, from images that were left out of others like it.

        The others had fewer images, and were never better on tuning images. So the share of errors
        is `credit` times theirs. The interval begins where theirs does; it ends where that of
        fewer errors would: `credit` times theirs, less one.
        """
        count = sum(outcomes)
        images = len(outcomes)
        groups = independent * images
        errors = (images - count) / images
        low, _ = wilson_interval(groups * (1 - errors), groups)
        _, high = wilson_interval(groups - max(groups * credit * errors - 1, 0), groups)
        share = 1 - credit * errors
        return Proportion(share=share, low=low, high=high, count=count, images=images)

    def difference(self, other: "Proportion") -> tuple[float, float]:
        """The 95 % interval of this share less that of other images (Newcombe 1998)."""
        apart = self.share - other.share
        below = math.hypot(self.share - self.low, other.high - other.share)
        return apart - below, apart + math.hypot(self.high - self.share, other.share - other.low)

    def __str__(self) -> str:
        return (
            f"{self.share:.1%} ({100 * self.low:.0f} to {100 * self.high:.0f}; {self.count} of "
            f"{self.images})"
        )


def wilson_interval(correct: float, count: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of `correct` among `count`."""
    z = _NORMAL
    share = correct / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = (
        z
        / (1 + z * z / count)
        * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    )
    # in spite of rounding
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


class Labelled(NamedTuple):
    """A verdict on an image whose class is known."""

    truth: str
    label: str  # of the verdict
    defect: bool  # likewise
    doubted: bool


class Performance(Struct, frozen=True, kw_only=True):
    """What verdicts on labelled images are worth."""

    accuracy: Proportion
    in_doubt: Proportion
    accepted: Proportion | None  # accuracy of verdicts that are not in doubt; None if all are
    # of images with a defect: called good. None without a class that means no defect
    missed: Proportion | None
    # of images without a defect: called defective. Likewise, or if there are none
    false_rejects: Proportion | None
    # accuracy of whoever always names the commonest class; if there is but one, by chance
    guessing: float
    confusion: dict[str, dict[str, int]]  # by true class, then by the verdict's

    @property
    def errors(self) -> str:
        """The errors that cost: missed defects and false rejects;
        of a model that knows defects only, confusions.
        """
        if self.missed or self.false_rejects:
            missed = self.missed or "unknown, no image has a defect"
            rejects = self.false_rejects or "unknown, each image has a defect"
            return f"missed defects {missed}, false rejects {rejects}"
        pairs = []
        for truth, row in self.confusion.items():
            for label, count in row.items():
                if label != truth:
                    pairs.append((count, truth, label))
        told = [
            (
                f"{truth} taken for {label} {count} of "
                f"{pluralize(sum(self.confusion[truth].values()), 'time')}"
            )
            for count, truth, label in sorted(pairs, key=lambda pair: -pair[0])[:_CONFUSIONS]
        ]
        return (
            "no class means no defect, so defects are confused, not missed: "
            f"{', '.join(told) or 'none was'}"
        )

    def statements(self) -> list[str]:
        """Accuracy, doubts and errors, in words."""
        doubt = f"in doubt {self.in_doubt.share:.0%}"
        if self.accepted:
            doubt += f", of the others {self.accepted} are right"
        return [f"accuracy {self.accuracy}, with 95 % intervals", doubt, self.errors]

    def __str__(self) -> str:
        return "; ".join(self.statements())


def measure(
    verdicts: Sequence[Labelled],
    classes: int,
    no_defect: str | None,
    independent: float = 1.0,
    credit: float | None = None,
) -> Performance:
    """Return the performance of verdicts, one at least, of a model that knows so many classes.

    `independent` is as `Proportion.of` takes it, `credit` as `Proportion.of_left_out`; it is None
    where the model itself gave the verdicts.
    """
    truths = Counter(each.truth for each in verdicts)

    def proportion(outcomes: Iterable[bool]) -> Proportion | None:
        return Proportion.of(outcomes, independent)

    right = [each.label == each.truth for each in verdicts]
    accuracy = proportion(right)
    if verdicts and credit is not None:
        accuracy = Proportion.of_left_out(right, independent, credit)
    in_doubt = proportion(each.doubted for each in verdicts)
    if accuracy is None or in_doubt is None:
        raise ValueError("no verdict, no performance")
    missed = rejects = None
    if no_defect:
        missed = proportion(not each.defect for each in verdicts if each.truth != no_defect)
        rejects = proportion(each.defect for each in verdicts if each.truth == no_defect)
    confusion: dict[str, dict[str, int]] = {truth: {} for truth in sorted(truths)}
    for each in verdicts:
        confusion[each.truth][each.label] = confusion[each.truth].get(each.label, 0) + 1
    guessing = max(truths.values()) / len(verdicts) if len(truths) > 1 else 1 / classes
    return Performance(
        accuracy=accuracy,
        in_doubt=in_doubt,
        accepted=proportion(each.label == each.truth for each in verdicts if not each.doubted),
        missed=missed,
        false_rejects=rejects,
        guessing=guessing,
        confusion=confusion,
    )


def held_out_performance(manifest: Manifest, view: View, prior: Prior) -> Performance | None:
    """What the bundle's own held-out images say of verdicts under a view and a prior;
    None if it has none.

    They were not cut into tiles: with tiles, the errors are those of one. Temperature and
    thresholds of doubt are cross-fitted, so no image had a part in its own verdict. Which are in
    doubt is that of the default prior.
    """
    if manifest.confidence is None:
        return None
    return unseen_performance(
        manifest.confidence, manifest.classes, manifest.trained, view=view, prior=prior
    )


def unseen_performance(
    confidence: Confidence,
    classes: Sequence[str],
    trained: Collection[str],
    *,
    view: View = View(),  # noqa: B008  (immutable)
    prior: Prior = Prior(),  # noqa: B008  (immutable)
) -> Performance | None:
    """Return the performance on the images that calibrated a model; None if none are kept.

    This is the one accuracy of a model: what its plant is told, what its bundle says, and what the
    line shows.
    """
    if confidence.held_out is None:
        return None
    weights = tuple(prior.weights(classes, trained).tolist())
    independent = confidence.groups / confidence.images if confidence.groups else 1.0
    credit = confidence.credit if confidence.left_out else None
    return _performance(confidence.held_out, tuple(classes), view, weights, independent, credit)


@lru_cache(4)  # thousands of images take 0.1 s, and Prometheus asks again and again
def _performance(
    kept: HeldOut,
    classes: tuple[str, ...],
    view: View,
    weights: tuple[float, ...],
    independent: float,
    credit: float | None,
) -> Performance:
    whole = [Box(0, 0, 1, 1)]
    found = []
    labels, probabilities, decisions = kept.arrays(len(classes))
    for truth, row, accepted in zip(
        labels, reweight(probabilities, np.array(weights)), decisions, strict=True
    ):
        decision = decide(row[None], whole, classes, view)
        found.append(Labelled(classes[truth], decision.label, decision.defect, not accepted))
    return measure(found, len(classes), no_defect_class(view, classes), independent, credit)
