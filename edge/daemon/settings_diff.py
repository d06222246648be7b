"""What is there, compared with what is wanted."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar


class Part(Protocol):
    """Something that was made as `wanted` says."""

    @property
    def wanted(self) -> Any:
        """Its settings."""


P = TypeVar("P", bound=Part)
W = TypeVar("W")


def compared(there: Sequence[P], wanted: Sequence[W]) -> tuple[list[P], list[W], list[P]]:
    """What stays of what is there, what of what is wanted is missing, and what is wanted no more."""
    old, kept, missing = list(there), [], []
    for each in wanted:
        found = next((part for part in old if part.wanted == each), None)
        if found is None:
            missing.append(each)
        else:
            old.remove(found)
            kept.append(found)
    return kept, missing, old
