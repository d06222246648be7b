"""Checks of all images of a plant: on request, and as they are loaded to join a federation."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from edge.inference.image_decoding import ImageError
from trainer.data import class_folders
from trainer.data.checks import rules
from trainer.data.checks.findings import SEVERITIES, Finding, raise_errors
from trainer.data.checks.image_facts import ImageFacts, measure_image
from trainer.data.class_folders import Catalogue, Images, LabelledImages
from trainer.data.folder_scan import Entry, decode_entries, scan_folder

HELD_OUT_SHARE = 0.2  # share of a plant's images that is held out when it brings no test folder


class ImageReport(NamedTuple):
    """What is known of a plant's images."""

    facts: tuple[ImageFacts, ...]
    findings: tuple[Finding, ...]  # the worst first

    @property
    def can_join(self) -> bool:
        """Whether no finding is an error."""
        return all(finding.severity != "error" for finding in self.findings)


def check_folders(
    folder: Path,
    test: Path | None,
    size: int,
    track: Callable[[Sequence[Entry]], Iterable[Entry]] = lambda entries: entries,
) -> ImageReport:
    """Check all images of a plant.

    Args:
        folder: class folders.
        test: class folders of held-out images, or None.
        size: of the network's input, pixels.
        track: passes images on, to show progress.

    Raises:
        UsageError: there is no such folder.
    """
    facts: list[ImageFacts] = []
    findings: list[Finding] = []
    for given, held_out in ((folder, False), (test, True)):
        if given is None:
            continue
        found, unreadable = scan_folder(given), {}
        for entry, photo in decode_entries(track(found.entries)):
            if isinstance(photo, ImageError):
                unreadable[entry.path] = photo.what
            else:
                facts.append(measure_image(entry, photo, held_out=held_out))
        findings += [*rules.check_folder(found), *rules.check_readable(unreadable)]
    findings += rules.check_images(facts, size)
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return ImageReport(tuple(facts), tuple(findings))


def load_checked(
    train: Catalogue, test: Catalogue | None, classes: Sequence[str], size: int, seed: int
) -> tuple[Images, list[Finding]]:
    """A plant's images for a federation, with what is worth a warning.

    Without a `test` catalogue a share is held out, if there are enough images.

    Raises:
        UsageError: what is wrong with the images, and what to do.
    """
    facts: list[ImageFacts] = []

    def load(catalogue: Catalogue, *, held_out: bool) -> LabelledImages:
        return class_folders.load(
            catalogue, classes, size, lambda entry, photo: facts.append(measure_image(entry, photo, held_out=held_out))
        )

    images = load(train, held_out=False)
    held_out = load(test, held_out=True) if test else None
    findings = [*train.findings, *(test.findings if test else ()), *rules.check_images(facts, size)]
    raise_errors(findings)
    if held_out is not None:
        return Images(images, held_out), findings
    return Images(*(class_folders.split_holdout(images, HELD_OUT_SHARE, seed) or (images, None))), findings


def format_brief(findings: Sequence[Finding], folder: Path, test: Path | None) -> Iterator[str]:
    """A few lines for somebody who is about to join."""
    warnings = [finding for finding in findings if finding.severity == "warning"]
    for finding in warnings[:3]:
        yield textwrap.shorten(f"{finding.severity}: {finding.text}", 160, placeholder=" ...")
    if findings:
        command = f"edge-node check {folder}" + (f" --test {test}" if test else "")
        hints = len(findings) - len(warnings)
        yield f"{len(warnings)} warning(s) and {hints} hint(s) on the images; {command} shows all"
