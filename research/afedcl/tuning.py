"""Tuning: the same number of trials for every method, on images that no report uses."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from broker_config.protocol.messages import Option, Training
from research.afedcl.cell import Cell, Finished
from research.runner.tuning import Place, Trial, choose_best
from trainer.methods import METHODS, complete_options

TRIALS = 6  # of each method
_RATES, _BATCH_NORMS = (3e-4, 1e-4, 1e-3), ("eval", "train")
# Options that a method has of its own to tune; the choices are taken in turn.
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
    "pfedfda": (
        {"ridge": 1.0, "spread": 1.0},
        {"ridge": 1.0, "spread": 0.0},
        {"ridge": 0.1, "spread": 0.0},
    ),
    "scaffold": ({"rate": 0.003}, {"rate": 0.001}, {"rate": 0.01}),
}


def plain(method: str, training: Training) -> Trial:
    """A method with its defaults, and the budget of all: twice `local_epochs` a round."""
    fields = {field.encode_name for field in msgspec.structs.fields(METHODS[method].options)}
    budget: dict[str, Option] = {"epochs": 2 * training.local_epochs} if "epochs" in fields else {}
    return Trial(complete_options(method, budget), training)


def trials(method: str, training: Training) -> list[Trial]:
    """A method's trials: learning rates, BatchNorm modes and options of its own."""
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
    methods: Iterable[str],
    training: Training,
    finished: Iterable[Finished],
    is_comparable: Callable[[Cell], bool],
) -> dict[str, Trial]:
    """The best trial of each method, as `choose_best` has it.

    Args:
        methods: that are compared.
        training: that the trials vary.
        finished: cells.
        is_comparable: whether a tuning cell's network, weights and size are those of the
            comparison.
    """
    reached: dict[tuple[str, str], dict[Place, float]] = defaultdict(dict)
    for each in finished:
        if each.cell.setting.pool == "tuning" and is_comparable(each.cell):
            place = (each.cell.setting, each.cell.rounds, each.cell.seed)
            reached[each.cell.method, Trial(each.cell.options, each.cell.training).key][place] = (
                each.mean("accuracy")
            )
    return choose_best(
        {
            method: [(trial, reached[method, trial.key]) for trial in trials(method, training)]
            for method in methods
        }
    )
