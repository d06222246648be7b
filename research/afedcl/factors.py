"""Changes of one choice at a time, of AFedCL, local training and FedPer."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from broker_config.protocol.messages import Option
from research.afedcl.cell import Cell
from trainer.methods import complete_options


class Change(NamedTuple):
    """One choice, made otherwise than in the base."""

    options: Mapping[str, Option] = {}
    training: Mapping[str, Any] = {}
    setting: Mapping[str, Any] = {}


# Of every method: BatchNorm, step size, augmentation, images.
COMMON = (
    Change(),
    Change(training={"batch_norm": "train"}),
    Change(training={"learning_rate": 1e-3}),
    Change(training={"augment": False}),
    Change(setting={"samples": 5}),
    Change(setting={"samples": 20}),
)
# Of AFedCL: where E_k starts, who wins the game, lambda, weights, A_k and its step.
OWN = (
    Change({"start": "carry"}),
    Change({"lambda": 0.0}),
    Change({"lambda": 1.0}),
    Change({"discriminator_rate": 1e-5}),
    Change({"discriminator_rate": 3e-3}),
    Change({"play": "alternating"}),
    Change({"weights": "equal"}),
    Change({"report": "refitted"}),
    Change({"report": "refitted", "weights": "equal"}),
    Change({"fusion": "none"}),
    Change({"fusion_rate": 0.02}),
    Change(training={"moments": "reset"}),
)


def vary(base: Cell, change: Change) -> Cell:
    """The base with one choice changed."""
    return msgspec.structs.replace(
        base,
        options=complete_options(base.method, {**base.options, **change.options}),
        training=msgspec.structs.replace(base.training, **change.training),
        setting=msgspec.structs.replace(base.setting, **change.setting),
    )


def difference(base: Cell, cell: Cell) -> str:
    """In what a cell differs from its base, as `name value` pairs; empty if in nothing."""
    before, after = _flat(base), _flat(cell)
    return ", ".join(
        f"{name} {value}" for name, value in after.items() if before.get(name) != value
    )


def _flat(cell: Cell) -> dict[str, Any]:
    fields = msgspec.to_builtins(cell)
    return {**fields["options"], **fields["training"], **fields["setting"]}
