"""What a check finds."""

from collections.abc import Mapping
from typing import Literal

import msgspec

Outcome = Literal["ok", "warning", "failure", "unknown"]


class Found(msgspec.Struct, frozen=True):
    """What a check found, with the remedy if that is no good. `figures` are for machines: unit in the name."""

    outcome: Outcome
    found: str
    remedy: str = ""
    figures: Mapping[str, float] = {}


class Check(msgspec.Struct, frozen=True):
    """A check by its name, and what it found."""

    name: str
    outcome: Outcome
    found: str
    remedy: str
    figures: Mapping[str, float]
