"""Tuning: the same number of trials for every contender, on images that no report uses."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from broker_config.protocol.messages import Option, Training
from research.afedcl.tuning import Place, Trial, best, written
from research.fedtfi.cell import Cell, Finished
from research.fedtfi.contenders import FRAMEWORKS, Contender
from trainer.methods import complete_options

_RATES = (1e-3, 3e-4, 1e-4)  # Adam's; with one class a node the small ones converge


def _crossed(*own: Mapping[str, Option]) -> list[dict[str, Option]]:
    """Each of three choices of what a method has of its own, with one of the learning rates."""
    return [{"learning_rate": rate, **each} for rate, each in zip(_RATES, own, strict=True)]


_TRIED: Mapping[str, Sequence[Mapping[str, Option]]] = {
    "FedProx": _crossed({"mu": 0.01}, {"mu": 0.1}, {"mu": 1.0}),
    "FedNova": [{"rate": rate, "momentum": 0.9} for rate in (0.003, 0.01, 0.03)],
    "FedTFI": _crossed(
        {"lambda": 0.1, "swaps": 32, "margin": 0.3},
        {"lambda": 0.3, "swaps": 16, "margin": 1.0},
        {"lambda": 1.0, "swaps": 8, "margin": 1.0},
    ),
    "PFI": _crossed({"swaps": 16}, {"swaps": 8}, {"swaps": 32}),
    "AFedCL": _crossed({"lambda": 0.1}, {"lambda": 0.01}, {"lambda": 1.0}),
}


def plain(who: Contender, training: Training) -> Trial:
    """With the method's defaults."""
    return _trial(who, training, {})


def trials(who: Contender, training: Training) -> list[Trial]:
    """What is tried: learning rates, and what the method has of its own."""
    tried = _TRIED.get(who.framework) or [{"learning_rate": rate} for rate in _RATES]
    return [_trial(who, training, own) for own in tried]


def choose(
    contenders: Iterable[Contender],
    training: Training,
    finished: Iterable[Finished],
    suits: Callable[[Cell], bool],
) -> dict[Contender, Trial]:
    """The best trial of each, by accuracy of the last shared model; of nodes' own models where none is shared.

    Empty unless there is one for all; compared as `research.afedcl.tuning.best` does.

    Args:
        contenders: that are compared.
        training: that the trials vary.
        finished: cells.
        suits: whether a tuning cell's weights are those of the comparison.
    """
    reached: dict[tuple[str, str, bool, str], dict[Place, float]] = defaultdict(dict)
    for each in finished:
        cell = each.cell
        if cell.setting.pool == "tuning" and suits(cell):
            setting = msgspec.structs.replace(cell.setting, shared=0)
            key = (cell.method, cell.model, cell.setting.shared > 0, written(cell.options, cell.training))
            reached[key][setting, cell.rounds, cell.seed] = each.accuracy

    def found(who: Contender, trial: Trial) -> dict[Place, float]:
        framework = FRAMEWORKS[who.framework]
        return reached[framework.method, who.model, framework.shares, written(*trial)]

    return best({who: [(each, found(who, each)) for each in trials(who, training)] for who in contenders})


def _trial(who: Contender, training: Training, own: Mapping[str, Option]) -> Trial:
    framework = FRAMEWORKS[who.framework]
    own = {**msgspec.to_builtins(training), **framework.options, **own}
    fields = {name: own.pop(name) for name in training.__struct_fields__}
    fields["local_epochs"] = max(1, training.local_epochs // framework.stages)
    return Trial(complete_options(framework.method, own), msgspec.convert(fields, Training))
