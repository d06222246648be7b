"""The methods, by name. To add one: write its file, and register it in a `pyproject.toml`."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import msgspec

from broker_config.protocol.errors import UsageError, suggest
from broker_config.protocol.messages import Head, ImagePrivacy, Option, Training
from broker_config.registry import Registry
from trainer.methods.base import EPSILON, Entry, Method
from trainer.methods.statistics_head import statistics_head
from trainer.option_values import read_options

METHODS: Registry[Entry] = Registry("methods")
RECOMMENDED = "afedcl_plus"
"""The method of a federation that trains and names none."""
PREVIEW = "gaussian"
"""The method of a federation that does not ask for training; its one message also tells what
joining would give.
"""
NO_FEDERATION = "local"
"""The baseline: every node alone."""
PRIVATE_CLASSIFIERS = "fedper"
"""The method whose nodes train classifiers of their own on the averaged encoder,
and nothing else.
"""


def headline_metrics() -> tuple[str, ...]:
    """Keys of the metrics that are shown before others where there is little room,
    whatever the method.
    """
    methods = [make(name, Training(), complete_options(name, {})) for name in METHODS]
    metrics = chain.from_iterable(method.metrics for method in methods)
    own = (each.key for each in metrics if each.headline)
    return tuple(dict.fromkeys((EPSILON.key, *own)))


def complete_options(name: str, given: Mapping[str, Option | str]) -> dict[str, Option]:
    """The method's options with defaults filled in; text values
    (from a command line) are read as their type.

    Raises:
        UsageError: no such method or option, or a value out of range; the nearest name is given.
    """
    return dict(msgspec.to_builtins(_options(name, given)))


def make(
    name: str,
    training: Training,
    options: Mapping[str, Option],
    head: Head = "trained",
    privacy: ImagePrivacy | None = None,
) -> Method:
    """The method as a value, with a `head` of statistics if wanted,
    and statistics that keep `privacy`, if wanted.

    Raises:
        UsageError: as complete_options does, the method has such a head anyway, or its statistics
            cannot be private.
    """
    complete = _options(name, options)
    method = METHODS[name].factory(training, complete)
    if head != "trained":
        if method.statistics:
            raise UsageError(
                f"{name} has no other head than that of statistics", "leave out --head"
            )
        method = method._replace(statistics=statistics_head())
    if privacy is None or method.statistics is None:
        return method
    if method.statistics.private is None:
        raise UsageError(
            f"the sums of {name} have no private form with these options: they are of several "
            "encoders, or projected",
            "leave out --option others and dimensions, or --privacy",
        )
    return method._replace(statistics=method.statistics.private(privacy))


def _options(name: str, given: Mapping[str, Any]) -> msgspec.Struct:
    if name not in METHODS:
        raise UsageError(f"there is no method {name!r}", suggest(name, METHODS))
    return read_options(METHODS[name].options, name, given)
