"""Named tensors: flat dicts from dotted names to tensors, and their selection by prefix.

For torch and numpy alike.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

# safetensors uses it: numpy recurses without end where two threads import it at once
import numpy.ctypeslib

T = TypeVar("T")
Arrays = dict[str, np.ndarray]
"""Named numpy arrays."""


def is_below(name: str, prefix: str) -> bool:
    """Whether `name` is `prefix` itself or lies below it."""
    return name == prefix or name.startswith(prefix + ".")


def select(tensors: Mapping[str, T], prefixes: Iterable[str]) -> dict[str, T]:
    """The tensors at or below any of `prefixes`."""
    wanted = tuple(prefixes)
    values: dict[str, T] = {}
    for name, value in tensors.items():
        if any(is_below(name, prefix) for prefix in wanted):
            values[name] = value
    return values


def add_prefix(prefix: str, tensors: Mapping[str, T]) -> dict[str, T]:
    """The same tensors, their names below `prefix`."""
    return {f"{prefix}.{name}": value for name, value in tensors.items()}


def strip_prefix(prefix: str, tensors: Mapping[str, T]) -> dict[str, T]:
    """The tensors below `prefix`, their names without it."""
    return {
        name[len(prefix) + 1 :]: value
        for name, value in tensors.items()
        if name.startswith(prefix + ".")
    }


def is_trainable(name: str) -> bool:
    """Whether gradients move this tensor: BatchNorm's running statistics are not moved by them,
    nor a stem.
    """
    return not name.endswith(("running_mean", "running_var")) and not is_frozen(name)


def is_frozen(name: str) -> bool:
    """Whether this tensor keeps its first values: it belongs to a stem."""
    return "stem" in name.split(".")


def without_frozen(tensors: Mapping[str, T]) -> dict[str, T]:
    """The tensors that can change: a second encoder needs no stem of its own."""
    return {name: value for name, value in tensors.items() if not is_frozen(name)}


def normalisation_layers(tensors: Mapping[str, Any]) -> tuple[str, ...]:
    """Prefixes of the normalisation layers (batch or group),
    recognised by a weight of one dimension.
    """
    return tuple(
        name.removesuffix(".weight")
        for name, value in tensors.items()
        if name.endswith(".weight") and value.ndim == 1
    )


def average(one: Arrays, other: Arrays) -> Arrays:
    """Return the mean of two sets of tensors of the same names; what is no float is the other's."""
    mean = dict(other)
    for name, value in other.items():
        if np.issubdtype(value.dtype, np.floating):
            mean[name] = ((one[name].astype(np.float64) + value) / 2).astype(value.dtype)
    return mean
