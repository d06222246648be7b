"""Tuning: the same number of trials for every variant, on images that no report uses."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from broker_config.protocol.messages import Option, Training
from research.fedtfi.cell import Cell, Finished
from research.fedtfi.variants import FRAMEWORKS, Variant
from research.runner.tuning import Place, Trial, choose_best
from trainer.methods import complete_options
from trainer.training.engine import SGD_MOMENTUM

# with one class a node the small ones converge
_RATES = {"adam": (1e-3, 3e-4, 1e-4), "sgd": (0.03, 0.01, 0.003)}

# what a framework has of its own, one with each of the rates
_OWN: Mapping[str, Sequence[Mapping[str, Option]]] = {
    "FedProx": ({"mu": 0.01}, {"mu": 0.1}, {"mu": 1.0}),
    "FedTFI": (
        {"lambda": 0.1, "swaps": 32, "margin": 0.3},
        {"lambda": 0.3, "swaps": 16, "margin": 1.0},
        {"lambda": 1.0, "swaps": 8, "margin": 1.0},
    ),
    "PFI": ({"swaps": 16}, {"swaps": 8}, {"swaps": 32}),
    "AFedCL": ({"lambda": 0.1}, {"lambda": 0.01}, {"lambda": 1.0}),
}


def plain(variant: Variant, training: Training) -> Trial:
    """With the method's defaults."""
    return _trial(variant, training, {})


def trials(variant: Variant, training: Training) -> list[Trial]:
    """A variant's trials: learning rates, and options of its method."""
    if variant.framework == "FedNova":  # its SGD is its own
        return [
            _trial(variant, training, {"rate": rate, "momentum": SGD_MOMENTUM})
            for rate in _RATES["sgd"]
        ]
    rates = _RATES[training.optimizer]
    own = _OWN.get(variant.framework, ({},) * len(rates))
    return [
        _trial(variant, training, {"learning_rate": rate, **each})
        for rate, each in zip(rates, own, strict=True)
    ]


def choose(
    variants: Iterable[Variant],
    training: Training,
    finished: Iterable[Finished],
    is_comparable: Callable[[Cell], bool],
) -> dict[Variant, Trial]:
    """The best trial of each, by accuracy of the last shared model;
    of nodes' own models where none is shared.

    Empty unless there is one for all; compared as `choose_best` does.

    Args:
        variants: that are compared.
        training: that the trials vary.
        finished: cells.
        is_comparable: whether a tuning cell's weights are those of the comparison.
    """
    reached: dict[tuple[str, str, bool, str], dict[Place, float]] = defaultdict(dict)
    for each in finished:
        cell = each.cell
        if cell.setting.pool == "tuning" and is_comparable(cell):
            setting = msgspec.structs.replace(cell.setting, shared=0)
            key = (
                cell.method,
                cell.model,
                cell.setting.shared > 0,
                Trial(cell.options, cell.training).key,
            )
            reached[key][setting, cell.rounds, cell.seed] = each.accuracy

    def accuracies(variant: Variant, trial: Trial) -> dict[Place, float]:
        framework = FRAMEWORKS[variant.framework]
        return reached[framework.method, variant.model, framework.shares, trial.key]

    return choose_best(
        {
            variant: [(each, accuracies(variant, each)) for each in trials(variant, training)]
            for variant in variants
        }
    )


def _trial(variant: Variant, training: Training, own: Mapping[str, Option]) -> Trial:
    framework = FRAMEWORKS[variant.framework]
    own = {**msgspec.to_builtins(training), **framework.options, **own}
    fields = {name: own.pop(name) for name in training.__struct_fields__}
    fields["local_epochs"] = max(1, training.local_epochs // framework.stages)
    return Trial(complete_options(framework.method, own), msgspec.convert(fields, Training))
