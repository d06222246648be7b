"""Candidates for what a node deploys: its own training, the federation's model,
both mixed; rules that choose one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from msgspec import UNSET

from research.afedcl.cell import Finished, NodeResult
from trainer.models.fusion import mix_logits, spread_ratio
from trainer.seeding import generator
from trainer.training.evaluation import paired_interval, predict_in_service

MARGIN = -0.03  # a node is worse off for certain if its paired interval lies wholly below
SIZES = (4, 6, 8, 10, 20)  # held-out images that a choice may look at
_DRAWS = 20

# What the tuning pool prefers.
MIXING, DEPLOYED, VALIDATION = "logits of equal spread", "most accurate, else mixed", 10

Array = np.ndarray
Mixing = Callable[[Array, Array], Array]  # of two log-probabilities [n, classes], not normalised
ALONE, TOGETHER, MIXED = range(3)


def _mean_of_logits(alone: Array, together: Array) -> Array:
    return np.asarray((alone + together) / 2)


def _mean_of_probabilities(alone: Array, together: Array) -> Array:
    return np.asarray(np.logaddexp(alone, together))


def _equal_spreads(alone: Array, together: Array) -> Array:
    """A model that was trained alone on few images is overconfident:
    its logits would drown the other's.

    The spread is known without labels; the mean keeps the larger one, so that it stays as
    confident.
    """
    centred = np.stack([each - each.mean(1, keepdims=True) for each in (alone, together)])
    spreads = centred.std((1, 2), keepdims=True)
    return _mean_of_logits(*(centred * spreads.max() / np.where(spreads > 0, spreads, 1)))


MIXINGS: dict[str, Mixing] = {
    "mean of logits": _mean_of_logits,
    "mean of probabilities": _mean_of_probabilities,
    "logits of equal spread": _equal_spreads,
}


class Validation(NamedTuple):
    """What a rule may look at: the images of one draw as alone, together and mixed see them."""

    right: Array  # bool [3, images]
    loss: Array  # -log p of the true class, [3, images]


Rule = Callable[[Validation], int]  # to alone, together or mixed


def _by_accuracy(*preferred: int) -> Rule:
    """The most accurate one; of equals the first of `preferred`."""
    return lambda seen: max(preferred, key=lambda each: seen.right[each].sum())


def _unless_alone_is_better(otherwise: int) -> Rule:
    return lambda seen: (
        ALONE if paired_interval(seen.right[otherwise], seen.right[ALONE])[0] > 0 else otherwise
    )


RULES: dict[str, Rule] = {
    "together": lambda _: TOGETHER,
    "mixed": lambda _: MIXED,
    "most accurate, else together": _by_accuracy(TOGETHER, MIXED, ALONE),
    "most accurate, else mixed": _by_accuracy(MIXED, TOGETHER, ALONE),
    "least log-loss": lambda seen: int(seen.loss.mean(1).argmin()),
    "together unless alone is better for certain": _unless_alone_is_better(TOGETHER),
    "mixed unless alone is better for certain": _unless_alone_is_better(MIXED),
}


class Candidates(NamedTuple):
    """A node's held-out images as alone, together and mixed see them among the node's own
    classes.
    """

    right: Array  # bool [3, images]
    loss: Array  # [3, images]
    labels: Array  # [images]


class Outcome(NamedTuple):
    """What one of the three reached on held-out images, against training alone."""

    gain: float  # its accuracy minus alone's
    below: bool  # by anything
    worse: bool  # for certain: the paired interval lies wholly below the margin
    regret: float  # the accuracy of the best of the three minus its own


def candidates(alone: NodeResult, joined: NodeResult, mixing: Mixing) -> Candidates | None:
    """Of one node, from the cell that trained alone and the one that joined;
    None if either is not stored.
    """
    if alone.log_probabilities is UNSET or joined.log_probabilities is UNSET:
        return None
    if (alone.labels, alone.trained) != (joined.labels, joined.trained):
        raise ValueError(f"{alone.name} has other images in the two cells")
    labels, first, second = _own_log_probabilities(alone, joined)
    views = np.stack([first, second, _normalised(mixing(first, second))])
    loss = -views[:, np.arange(len(labels)), labels]
    return Candidates(views.argmax(2) == labels, loss, labels)


def served(alone: NodeResult, joined: NodeResult) -> Candidates | None:
    """As `candidates`, but as a line predicts by default: all classes are candidates,
    others' at less weight.
    """
    if alone.log_probabilities is UNSET or joined.log_probabilities is UNSET:
        return None
    labels = np.frombuffer(alone.labels, np.uint8).astype(int)  # type: ignore[arg-type]
    own = sorted(set(labels.tolist()))
    first, second = (
        np.frombuffer(each.log_probabilities, np.float16).reshape(each.tested, -1).astype(float)  # type: ignore[arg-type]
        for each in (alone, joined)
    )
    views = np.stack(
        [first, second, mix_logits(second, first, own, spread_ratio(second, first, own))]
    )
    right = np.stack([predict_in_service(view, own) == labels for view in views])
    return Candidates(right, np.zeros(right.shape), labels)


def _own_log_probabilities(alone: NodeResult, joined: NodeResult) -> tuple[Array, Array, Array]:
    """Labels as indices of the node's own classes,
    and both models' log-probabilities among these.
    """
    assert isinstance(alone.labels, bytes)
    # Held-out images are of the node's own classes, at least one of each.
    own, labels = np.unique(np.frombuffer(alone.labels, np.uint8), return_inverse=True)
    first, second = (
        np.frombuffer(each.log_probabilities, np.float16)
        .reshape(each.tested, -1)
        .astype(float)[:, own]
        for each in (alone, joined)
        if isinstance(each.log_probabilities, bytes)
    )
    return labels, _normalised(first), _normalised(second)


def _normalised(log_probabilities: Array) -> Array:
    return log_probabilities - np.logaddexp.reduce(log_probabilities, 1, keepdims=True)


def choose(found: Candidates, rules: Mapping[str, Rule], size: int) -> dict[str, list[Outcome]]:
    """What each rule's choices give: `size` held-out images, drawn class by class,
    are chosen on, the others judge.
    """
    outcomes: dict[str, list[Outcome]] = {name: [] for name in rules}
    for draw in range(_DRAWS):
        order = _in_turn(found.labels, generator(draw, "joining", size))
        seen, rest = order[:size], found.right[:, order[size:]]
        validation = Validation(found.right[:, seen], found.loss[:, seen])
        judged = [_judge(rest, each) for each in (ALONE, TOGETHER, MIXED)]
        for name, rule in rules.items():
            outcomes[name].append(judged[rule(validation)])
    return outcomes


def judge(found: Candidates, side: int) -> Outcome:
    """What one of the three reaches on all held-out images."""
    return _judge(found.right, side)


def _judge(right: Array, side: int) -> Outcome:
    accuracies = right.mean(1)
    gain = float(accuracies[side] - accuracies[ALONE])
    worse = paired_interval(right[ALONE], right[side])[1] < MARGIN
    return Outcome(gain, gain < 0, worse, float(accuracies.max() - accuracies[side]))


def _in_turn(labels: Array, random: np.random.Generator) -> Array:
    """Images in random order, but one of each class before the second of any."""
    shuffled = random.permutation(len(labels))
    by_class = [shuffled[labels[shuffled] == label] for label in np.unique(labels)]
    return np.array([each for turn in zip_longest(*by_class) for each in turn if each is not None])


def pairs(finished: Sequence[Finished]) -> Iterator[tuple[Finished, Finished]]:
    """Each cell that joined, and the one of its setting and seed that trained alone."""
    alone = {
        (each.cell.setting, each.cell.seed): each
        for each in finished
        if each.cell.method == "local"
    }
    for each in finished:
        place = (each.cell.setting, each.cell.seed)
        if each.cell.method != "local" and place in alone:
            yield alone[place], each
