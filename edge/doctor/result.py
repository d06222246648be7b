"""Result of a check."""

from collections.abc import Mapping
from typing import Literal

import msgspec

Outcome = Literal["ok", "warning", "failure", "unknown"]


class Result(msgspec.Struct, frozen=True):
    """What a check found, and the remedy if it is a problem. `figures` are for machines, with the unit in the name."""

    outcome: Outcome
    found: str
    remedy: str = ""
    figures: Mapping[str, float] = {}


class CheckResult(msgspec.Struct, frozen=True):
    """A result with the name of its check."""

    name: str
    outcome: Outcome
    found: str
    remedy: str
    figures: Mapping[str, float]
