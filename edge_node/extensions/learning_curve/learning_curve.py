"""Learning curve of the consensus head: its accuracy by a plant's images a class,
and which class wants more of them.

Nothing is trained: the features are there, and a head of fewer images is a sum of fewer terms.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np

from edge.uncertainty.performance import wilson_interval
from trainer.seeding import generator
from trainer.statistics.label_doubts import Doubt, describe_doubts
from trainer.statistics.lda_head import Head, Spread, fit
from trainer.statistics.sums import Sums, collect
from trainer.training.evaluation import predict_among

DRAWS = 5
"""How often images are drawn: each curve is the mean over so many."""
_STUDENT = 2.776  # 97.5 % of Student's t with four degrees of freedom
_NORMAL = 1.96  # of the normal distribution, likewise
_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
_APART = 1.5  # how many times as many images all are as those of the point before, at least
# what the last doubling has brought at most where more images are said to be hardly worth it
_HARDLY = 0.02


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A share, or a difference of shares, with its 95 % interval over held-out images and draws."""

    value: float
    low: float
    high: float


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Accuracy among the plant's own classes with at most so many images of each."""

    images: int
    accuracy: Estimate


class ClassCurve(msgspec.Struct, frozen=True, kw_only=True):
    """One of the plant's classes."""

    name: str
    images: int  # that the plant has to train with
    # share of its images that are right, at each size; empty if none is judged
    points: list[CurvePoint]
    # of the last one over a head with half of this class's images; None without two
    gain: Estimate | None


class LearningCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a plant has enough images."""

    judged: int  # images that no head has seen that judges them
    cross_validated: bool  # they are the training images, each left out in its turn
    others: int  # images of other plants behind each head
    points: list[CurvePoint]
    gain: Estimate | None  # of all images over half of each class's; None if no class has two
    classes: list[ClassCurve]
    # class that gained most from its last doubling, its interval above zero; empty if none did
    wanted: str
    doubts: list[Doubt]  # images that do not look like their class, the most doubtful first

    def describe(self, everything: str) -> list[str]:
        """What a person wants to know of it, line by line;
        `everything` says where all doubts are.
        """
        return [
            self.describe_curve(),
            self.describe_class(),
            *describe_doubts(self.doubts, everything),
        ]

    def describe_curve(self) -> str:
        """What the last doubling brought, and what follows for more images."""
        last = self.points[-1]
        reached = (
            f"{_percent(last.accuracy)} of {self.judged} images that it has not seen are right"
        )
        if self.gain is None:
            return f"{reached}; with one image of each class, nothing can be said of more"
        brought = (
            f"the second half of the images brought {_points(self.gain)}, all classes counting "
            "alike"
        )
        if self.gain.low > 0:
            return (
                f"{reached}; {brought}: more are likely to help, though twice as many usually "
                "bring less than that"
            )
        if self.gain.high <= _HARDLY:
            return f"{reached}; {brought}: more of the same kind will hardly help"
        return f"{reached}; {brought}: these images cannot tell whether more would help"

    def describe_class(self) -> str:
        """Which class wants more images."""
        single = [each.name for each in self.classes if each.gain is None]
        least = f"; too few images to tell of: {', '.join(single)}" if single else ""
        if self.wanted:
            (wanted,) = [each for each in self.classes if each.name == self.wanted]
            assert wanted.gain is not None
            return (
                f"{self.wanted} wants more images most: the second half of its {wanted.images} "
                f"brought {_points(wanted.gain)}{least}"
            )
        known = [each for each in self.classes if each.points]
        lowest = min(known, key=lambda each: each.points[-1].accuracy.value)
        return (
            "no class has clearly gained from the second half of its images; fewest are right "
            f"of {lowest.name}: {_percent(lowest.points[-1].accuracy)}{least}"
        )


def _percent(share: Estimate) -> str:
    return f"{share.value:.0%} ({share.low:.0%} to {share.high:.0%})"


def _points(gain: Estimate) -> str:
    return f"{100 * gain.value:+.1f} points ({100 * gain.low:+.1f} to {100 * gain.high:+.1f})"


class Split(NamedTuple):
    """Positions of images that a head is made of, and of images that it has not seen."""

    train: np.ndarray
    held_out: np.ndarray


class _Drawn(NamedTuple):
    """Which images are right in one draw: bool [n] each, in the order of `judged`."""

    judged: np.ndarray  # positions
    sizes: list[np.ndarray]
    halved: np.ndarray  # with half of each class's images
    halves: dict[int, np.ndarray]  # with half of this class's


def trace(
    features: np.ndarray,
    labels: np.ndarray,
    classes: Sequence[str],
    splits: Sequence[Sequence[Split]],
    others: Sums | None = None,
    doubts: Sequence[Doubt] = (),
) -> LearningCurve:
    """The learning curve of a plant.

    Each head is made anew of so many images of each class, or all where a class has fewer, and the
    other plants' sums. Within a split the draws are nested. An interval is Wilson's (for a gain
    that of `_gain`) widened by what draws differ by; it takes images for independent, and knows
    nothing of images that are unlike these.

    A gain is that of the mean over classes of the share of their images that are right. For a
    class, it is what the second half of its images has brought, with all images of the others, and
    images spread as all do. Its own share would not do: of two classes that look alike, one gains
    by more images what the other loses. Nor would the lowest share: such classes stay low.

    Args:
        features: [n, VIEWS, d], each vector of at most length one.
        labels: [n].
        classes: of the federation.
        splits: for each of DRAWS draws; held-out images of its splits are disjoint.
        others: of the other plants, as they travel.
        doubts: of the images.

    Raises:
        ValueError: there are no two classes, or no held-out image is of a class that others are
            left of.
    """
    nothing = collect(features[:0], labels[:0], len(classes))
    others = others or nothing
    largest = max(int(np.bincount(labels[split.train]).max(initial=0)) for split in splits[0])
    sizes = [size for size in _SIZES if size * _APART <= largest] + [largest]
    drawn = [
        _draw(features, labels, nothing, others, sizes, draw, each)
        for draw, each in enumerate(splits)
    ]
    if not all(len(each.judged) for each in drawn):
        raise ValueError("no image can be left out and judged by others of its class")
    own = sorted(set(chain.from_iterable(labels[split.train].tolist() for split in splits[0])))
    if len(own) < 2:
        raise ValueError("its images are of one class, and there is nothing to tell apart")
    trained = set()
    for split in splits[0]:
        for position in split.train:
            trained.add(int(position))
    counts = np.bincount(labels[sorted(trained)], minlength=len(classes))
    curves = [
        _class_curve(label, classes[label], int(counts[label]), labels, sizes, drawn)
        for label in own
    ]
    clear = [each for each in curves if each.gain and each.gain.low > 0]

    def gain_of(curve: ClassCurve) -> float:
        return curve.gain.value if curve.gain else 0

    gain = _gain(labels, drawn, lambda each: each.halved) if (counts > 1).any() else None
    wanted = max(clear, key=gain_of).name if clear else ""
    return LearningCurve(
        judged=len(drawn[0].judged),
        cross_validated=len(splits[0]) > 1,
        others=int(others.images.sum()),
        points=_points_of(sizes, drawn, lambda each: np.ones(len(each.judged), bool)),
        gain=gain,
        classes=curves,
        wanted=wanted,
        doubts=list(doubts),
    )


def _draw(
    features: np.ndarray,
    labels: np.ndarray,
    nothing: Sums,
    others: Sums,
    sizes: Sequence[int],
    draw: int,
    splits: Sequence[Split],
) -> _Drawn:
    parts = [
        _judge(
            features,
            labels,
            nothing,
            others,
            sizes,
            generator(0, "learning curve", draw, number),
            split,
        )
        for number, split in enumerate(splits)
    ]
    labelled = sorted(set(chain.from_iterable(part.halves for part in parts)))
    pairs = zip(*(part.sizes for part in parts), strict=True)
    halves = {}
    for label in labelled:
        halves[label] = np.concatenate([part.halves.get(label, part.sizes[-1]) for part in parts])
    return _Drawn(
        np.concatenate([part.judged for part in parts]),
        [np.concatenate(each) for each in pairs],
        np.concatenate([part.halved for part in parts]),
        halves,
    )


def _judge(
    features: np.ndarray,
    labels: np.ndarray,
    nothing: Sums,
    others: Sums,
    sizes: Sequence[int],
    random: np.random.Generator,
    split: Split,
) -> _Drawn:
    own = sorted(set(labels[split.train].tolist()))
    orders = {label: random.permutation(split.train[labels[split.train] == label]) for label in own}
    judged = split.held_out[np.isin(labels[split.held_out], own)]
    made: dict[tuple[int, int], Sums] = {}

    def sums_of(label: int, count: int) -> Sums:
        if (label, count) not in made:
            positions = orders[label][:count]
            made[label, count] = collect(
                features[positions], labels[positions], len(nothing.images)
            )
        return made[label, count]

    def head(counts: dict[int, int], spread: Spread | None = None) -> Head:
        parts = (sums_of(*each) for each in counts.items())
        mine = reduce(lambda one, other: one.combine(other, np.add), parts, nothing)
        return fit(others.combine(mine, np.add), mine, spread)

    def right(made_of: Head) -> np.ndarray:
        return np.asarray(predict_among(made_of.logits(features[judged, 0]), own) == labels[judged])

    counts = {label: len(order) for label, order in orders.items()}
    halves = {label: count // 2 for label, count in counts.items() if count > 1}
    smaller = []
    for size in sizes[:-1]:
        smaller.append({label: min(size, count) for label, count in counts.items()})
    whole = head(counts)
    return _Drawn(
        judged,
        [*(right(head(each)) for each in smaller), right(whole)],
        right(head({**counts, **halves})),
        {
            label: right(head({**counts, label: half}, whole.spread))
            for label, half in halves.items()
        },
    )


def _class_curve(
    label: int,
    name: str,
    images: int,
    labels: np.ndarray,
    sizes: Sequence[int],
    drawn: Sequence[_Drawn],
) -> ClassCurve:
    def of_class(each: _Drawn) -> np.ndarray:
        return np.asarray(labels[each.judged] == label)

    judged = all(of_class(each).any() for each in drawn)
    halved = judged and all(label in each.halves for each in drawn)
    points = _points_of(sizes, drawn, of_class) if judged else []
    gain = _gain(labels, drawn, lambda each: each.halves[label]) if halved else None
    return ClassCurve(name=name, images=images, points=points, gain=gain)


def _points_of(
    sizes: Sequence[int], drawn: Sequence[_Drawn], chosen: Callable[[_Drawn], np.ndarray]
) -> list[CurvePoint]:
    points = []
    for number, size in enumerate(sizes):
        right = [each.sizes[number][chosen(each)] for each in drawn]
        intervals = [wilson_interval(int(each.sum()), len(each)) for each in right]
        points.append(
            CurvePoint(
                images=size, accuracy=_average([each.mean() for each in right], intervals, 0)
            )
        )
    return points


def _gain(
    labels: np.ndarray, drawn: Sequence[_Drawn], fewer: Callable[[_Drawn], np.ndarray]
) -> Estimate:
    """The balanced gain of all images over `fewer`:
    what of it an image brings is its mean over draws.

    With half an image more in each cell of a class's table (Agresti and Min, Statistics in Medicine
    24:729, 2005), so that no interval is empty where all heads agree.
    """
    gained = np.zeros((len(drawn), len(labels)))
    for row, each in zip(gained, drawn, strict=True):
        row[each.judged] = each.sizes[-1].astype(float) - fewer(each)
    judged = drawn[0].judged
    members = [judged[labels[judged] == label] for label in np.unique(labels[judged])]
    of_draws = np.mean([gained[:, positions].mean(1) for positions in members], 0)
    means = gained.mean(0)
    variance = 0.0
    for positions in members:
        count = len(positions) + 2
        each = means[positions]
        variance += (float(np.square(each).sum()) + 1 - float(each.sum()) ** 2 / count) / count**2
    half = _NORMAL * float(np.sqrt(variance)) / len(members)
    return _average(of_draws.tolist(), [(gain - half, gain + half) for gain in of_draws], -1)


def _average(
    values: Sequence[float], intervals: Sequence[tuple[float, float]], least: float
) -> Estimate:
    """The mean over draws: one draw's interval, on average,
    and what the mean of so many draws varies by.
    """
    value = float(np.mean(values))
    error = _STUDENT * float(np.std(values, ddof=1)) / np.sqrt(len(values))
    below, above = np.abs(np.array(intervals) - np.array(values)[:, None]).mean(0)
    return Estimate(
        value=value,
        low=max(least, value - float(np.hypot(below, error))),
        high=min(1.0, value + float(np.hypot(above, error))),
    )
