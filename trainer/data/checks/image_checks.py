"""A look at all images of a plant before it joins, in one pass over its folders."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from trainer.data import class_folders
from trainer.data.checks.findings import SEVERITIES, Finding
from trainer.data.checks.image_facts import Look, into
from trainer.data.checks.rules import judge
from trainer.data.class_folders import Entry


class Intake(NamedTuple):
    """What a look at a plant's folders found."""

    looks: tuple[Look, ...]
    findings: tuple[Finding, ...]  # the worst first

    @property
    def can_join(self) -> bool:
        """Whether no finding is an error."""
        return all(finding.severity != "error" for finding in self.findings)


def check(
    folder: Path,
    test: Path | None,
    size: int,
    track: Callable[[Sequence[Entry]], Iterable[Entry]] = lambda entries: entries,
) -> Intake:
    """Look at all images of a plant.

    Args:
        folder: class folders.
        test: class folders of held-out images, or None.
        size: of the network's input, pixels.
        track: passes images on, to show progress.

    Raises:
        UsageError: there is no such folder.
    """
    looks: list[Look] = []
    found: list[Finding] = []
    for given, held_out in ((folder, False), (test, True)):
        if given is not None:
            catalogue = class_folders.survey(given)
            found += catalogue.findings
            found += class_folders.view(track(catalogue.entries), into(looks, held_out=held_out))
    return Intake(tuple(looks), arrange([*found, *judge(looks, size)]))


def arrange(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The worst first."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def brief(findings: Sequence[Finding], folder: Path, test: Path | None) -> Iterator[str]:
    """A few lines for somebody who is about to join."""
    warnings = [finding for finding in findings if finding.severity == "warning"]
    for finding in warnings[:3]:
        yield textwrap.shorten(f"{finding.severity}: {finding.text}", 160, placeholder=" ...")
    if findings:
        command = f"edge-node check {folder}" + (f" --test {test}" if test else "")
        hints = len(findings) - len(warnings)
        yield f"{len(warnings)} warning(s) and {hints} hint(s) on the images; {command} shows all"
