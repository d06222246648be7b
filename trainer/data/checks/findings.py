"""Findings on a plant's images, and the rules that a package can register to make them.

A rule is a function:

    def check_cameras(images: CheckedImages) -> Iterator[Finding]:
        cameras = {each.camera for each in images.facts}
        if len(cameras) > 1:
            text = f"the images come from {len(cameras)} cameras"
            yield Finding("hint", "cameras", text, "see whether they are the line's")

The package registers it:

    [project.entry-points."edge_node.image_checks"]
    cameras = "plant_extras:check_cameras"

`edge-node check` and `join` show what it finds; a plant does not join with an error.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from broker_config.protocol.errors import UsageError
from trainer.data.checks.image_facts import ImageFacts
from trainer.data.image_groups import Groups

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


class CheckedImages(NamedTuple):
    """The images of a plant as a rule sees them; at least one is for training."""

    facts: Sequence[ImageFacts]
    groups: Groups  # which of them belong together, by their positions
    size: int  # width and height of the network's input, pixels
    least: int  # images that a plant needs for training


ImageCheck = Callable[[CheckedImages], Iterable[Finding]]
"""A rule: it returns what it finds, nothing where all is well."""


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
