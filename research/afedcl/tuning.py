"""Tuning: the same number of trials for every method, on images that no report uses.

Which trial is taken is read from the finished cells of the tuning pool: nothing else is written down.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from statistics import mean
from typing import NamedTuple, TypeVar

import msgspec

from broker_config.protocol.messages import Option, Training
from research.afedcl.cell import Cell, Finished
from trainer.methods import METHODS, complete_options

K = TypeVar("K", bound=Hashable)  # what is tuned
Place = Hashable  # where trials are compared: a setting and a seed
TRIALS = 6  # of each method
_RATES, _BATCH_NORMS = (3e-4, 1e-4, 1e-3), ("eval", "train")
# What a method has of its own to tune; the choices are taken in turn.
_OWN: Mapping[str, Sequence[Mapping[str, Option]]] = {
    "afedcl": (
        {"lambda": 0.1, "fusion_rate": 0.0},
        {"lambda": 1.0, "fusion_rate": 0.02},
        {"lambda": 0.01, "fusion_rate": 0.0},
    ),
    "ditto": ({"lambda": 0.1}, {"lambda": 1.0}, {"lambda": 0.01}),
    "fedala": ({"eta": 1.0}, {"eta": 0.1}, {"eta": 0.01}),
    "fednova": (
        {"rate": 0.003, "momentum": 0.0},
        {"rate": 0.001, "momentum": 0.0},
        {"rate": 0.001, "momentum": 0.9},
    ),
    "fedprox": ({"mu": 0.1}, {"mu": 1.0}, {"mu": 0.01}),
    "fedrep": (
        {"head_epochs": 3, "body_epochs": 3},
        {"head_epochs": 1, "body_epochs": 5},
        {"head_epochs": 5, "body_epochs": 1},
    ),
    "scaffold": ({"rate": 0.003}, {"rate": 0.001}, {"rate": 0.01}),
}


class Trial(NamedTuple):
    """What a method is run with: its options and its training, both complete."""

    options: dict[str, Option]
    training: Training


def plain(method: str, training: Training) -> Trial:
    """A method with its defaults, and the budget of all: twice `local_epochs` a round."""
    fields = {field.encode_name for field in msgspec.structs.fields(METHODS[method].options)}
    budget: dict[str, Option] = {"epochs": 2 * training.local_epochs} if "epochs" in fields else {}
    return Trial(complete_options(method, budget), training)


def trials(method: str, training: Training) -> list[Trial]:
    """What is tried of a method: learning rates and BatchNorm modes, and what it has of its own."""
    options, _ = plain(method, training)
    own = _OWN.get(method, ({},))
    return [
        Trial(
            complete_options(method, {**options, **own[(number + number // 3) % len(own)]}),
            msgspec.structs.replace(
                training, learning_rate=_RATES[number % 3], batch_norm=_BATCH_NORMS[number // 3 % 2]
            ),
        )
        for number in range(TRIALS)
    ]


def choose(
    methods: Iterable[str], training: Training, finished: Iterable[Finished], suits: Callable[[Cell], bool]
) -> dict[str, Trial]:
    """The best trial of each method, as `best` has it.

    Args:
        methods: that are compared.
        training: that the trials vary.
        finished: cells.
        suits: whether a tuning cell's network, weights and size are those of the comparison.
    """
    reached: dict[tuple[str, str], dict[Place, float]] = defaultdict(dict)
    for each in finished:
        if each.cell.setting.pool == "tuning" and suits(each.cell):
            place = (each.cell.setting, each.cell.rounds, each.cell.seed)
            reached[each.cell.method, written(each.cell.options, each.cell.training)][place] = each.mean("accuracy")
    return best(
        {
            method: [(trial, reached[method, written(*trial)]) for trial in trials(method, training)]
            for method in methods
        }
    )


def best(tried: Mapping[K, Sequence[tuple[Trial, Mapping[Place, float]]]]) -> dict[K, Trial]:
    """The best trial of each, by what its trials reached at each place (a setting and a seed).

    Empty unless there is one for all. Trials are compared where most of them are finished, of every contender; one
    that is not has failed there, and does not count. The first of equals is taken.
    """
    counts = [(Counter(place for _, found in each for place in found), len(each) / 2) for each in tried.values()]
    everywhere = {place for count, _ in counts for place in count}
    places = {place for place in everywhere if all(count[place] > half for count, half in counts)}
    chosen = {}
    for contender, found_of in tried.items():
        complete = [(trial, found) for trial, found in found_of if places <= found.keys()]
        if not places or not complete:
            return {}
        chosen[contender] = max(complete, key=lambda each: mean(each[1][place] for place in places))[0]
    return chosen


def written(options: Mapping[str, Option], training: Training) -> str:
    """A trial as text: what it is known by."""
    return msgspec.json.encode((options, training), order="deterministic").decode()
