"""Findings on a plant's images: severity, kind, text, remedy, and the files concerned."""

import os
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from broker_config.protocol.errors import UsageError

MAX_LISTED = 10  # files that a sentence names

Severity = Literal["error", "warning", "hint"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "hint")


class Finding(msgspec.Struct, frozen=True):
    """Something about a plant's images that its engineer should know.

    With an error the plant cannot join.
    """

    severity: Severity
    kind: str  # in one or two words
    text: str
    remedy: str
    files: tuple[str, ...] = ()  # all that are concerned, the text names the first


def format_items(items: Sequence[object], separator: str = ", ") -> str:
    """The first items, and how many more there are."""
    more = f"{separator}and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return separator.join(map(str, items[:MAX_LISTED])) + more


def format_lines(items: Sequence[object]) -> str:
    """The first items, each on a line of its own below the sentence."""
    return "\n  " + format_items(items, "\n  ")


def format_paths(paths: Iterable[os.PathLike[str]]) -> tuple[str, ...]:
    """Paths as a finding's files."""
    return tuple(map(os.fspath, paths))


def raise_errors(findings: Iterable[Finding]) -> None:
    """Raise UsageError if there is an error among the findings; further errors are only counted."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        more = (
            f"; then mend {len(errors) - 1} more, which edge-node check shows"
            if len(errors) > 1
            else ""
        )
        raise UsageError(errors[0].text, errors[0].remedy + more)
