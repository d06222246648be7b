"""Checks of all images of a plant: on request, and as they are loaded to join a federation."""

import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from broker_config.protocol.errors import UsageError
from edge.inference.image_decoding import ImageError
from trainer.data import class_folders
from trainer.data.checks import image_rules
from trainer.data.checks.findings import SEVERITIES, Finding, raise_errors
from trainer.data.checks.image_facts import ImageFacts, measure_image
from trainer.data.class_folders import Catalogue, HoldOut, Images, LabelledImages
from trainer.data.class_names import check_class_folders, check_own_aliases
from trainer.data.folder_scan import Entry, decode_entries, scan_folder
from trainer.data.image_groups import Proposal, group_images, propose_groups, read_keys

HELD_OUT_SHARE = 0.2  # share of a plant's images that is held out when it brings no test folder


class ImageReport(NamedTuple):
    """What is known of a plant's images."""

    facts: tuple[ImageFacts, ...]
    findings: tuple[Finding, ...]  # the worst first
    groups: tuple[tuple[Path, ...], ...] = ()  # of several images that belong on one side
    proposal: Proposal | None = None  # of groups, where none were given

    @property
    def can_join(self) -> bool:
        """Whether no finding is an error."""
        return all(finding.severity != "error" for finding in self.findings)


def check_folders(
    folder: Path,
    test: Path | None,
    size: int,
    track: Callable[[Sequence[Entry]], Iterable[Entry]] = lambda entries: entries,
    group: str | None = None,
    classes: Sequence[str] = (),
    aliases: Mapping[str, str] = {},
) -> ImageReport:
    """Check all images of a plant.

    Args:
        folder: class folders.
        test: class folders of held-out images, or None.
        size: of the network's input, pixels.
        track: passes images on, to show progress.
        group: what belongs together, as `read_keys` takes it.
        classes: the federation's, or none to leave the folders' names alone.
        aliases: the plant's own names of classes.

    Raises:
        UsageError: there is no such folder, `group` is wrong, or an alias is.
    """
    facts: list[ImageFacts] = []
    findings: list[Finding] = []
    found_in = [
        (scan_folder(given), held_out)
        for given, held_out in ((folder, False), (test, True))
        if given
    ]
    check_own_aliases(
        aliases, set(chain.from_iterable(found.names for found, _ in found_in)), classes
    )
    scans = [(found.with_aliases(aliases), held_out) for found, held_out in found_in]
    entries = list(chain.from_iterable(found.entries for found, _ in scans))
    findings += _check_names({entry.class_name for entry in entries}, classes)
    if test is None:
        findings += image_rules.check_beside(scans[0][0])
    keys = read_keys(group, entries) if group and entries else {}
    for found, held_out in scans:
        unreadable = {}
        for entry, photo in decode_entries(track(found.entries)):
            if isinstance(photo, ImageError):
                unreadable[entry.path] = photo.what
            else:
                facts.append(measure_image(entry, photo, held_out=held_out))
        findings += [*image_rules.check_folder(found), *image_rules.check_readable(unreadable)]
    groups = group_images(facts, keys)
    findings += image_rules.check_images(facts, size, groups)
    members_list = []
    for positions in groups.members:
        members_list.append(tuple(facts[position].path for position in positions))
    members = tuple(members_list)
    alike = [(facts[pair.one].path, facts[pair.other].path) for pair in groups.pairs]
    proposal = None if group else propose_groups(entries, alike)
    return ImageReport(tuple(facts), tuple(_sort(findings)), members, proposal)


def _check_names(names: Iterable[str], classes: Sequence[str]) -> Iterator[Finding]:
    """Folders that joining a federation of these classes would refuse."""
    if classes:
        try:
            check_class_folders(sorted(names), classes)
        except UsageError as error:
            yield Finding("error", "no class", error.what, error.remedy)


def _sort(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first, and among them what makes the accuracy too good."""
    return sorted(
        findings,
        key=lambda finding: (SEVERITIES.index(finding.severity), finding.kind != "held out"),
    )


def load_checked(
    train: Catalogue,
    test: Catalogue | None,
    classes: Sequence[str],
    size: int,
    seed: int,
    keys: Mapping[Path, str] = {},
    *,
    hold_out: HoldOut = "every class",
    least: int = image_rules.MIN_TO_TRAIN,
) -> tuple[Images, list[Finding]]:
    """A plant's images for a federation, with what is worth a warning.

    Without a `test` catalogue a share is held out, as `hold_out` says; look-alikes, and images of
    one of the `keys` (`read_keys`), stay together. Fewer images than `least` are an error.

    Raises:
        UsageError: what is wrong with the images, and what to do.
    """
    facts: list[ImageFacts] = []

    def load(catalogue: Catalogue, *, held_out: bool) -> LabelledImages:
        return class_folders.load(
            catalogue,
            classes,
            size,
            lambda entry, photo: facts.append(measure_image(entry, photo, held_out=held_out)),
        )

    images = load(train, held_out=False)
    held_out = load(test, held_out=True) if test else None
    groups = group_images(facts, keys)
    test_findings = test.findings if test else ()
    findings = _sort(
        [*train.findings, *test_findings, *image_rules.check_images(facts, size, groups, least)]
    )
    raise_errors(findings)
    images = images._replace(groups=groups.numbers[: len(images.labels)])
    if held_out is not None:
        held_out = held_out._replace(groups=groups.numbers[len(images.labels) :])
        return Images(images, held_out), findings
    return class_folders.split_holdout(images, HELD_OUT_SHARE, seed, hold_out), findings


def image_options(test: Path | None, group: str | None, aliases: Mapping[str, str]) -> list[str]:
    """The options of `check` and `join` that say how a plant's images are taken."""
    test_folder = str(test) if test else None
    given = [("--test", test_folder), ("--group", group)]
    words = [*given, *(("--alias", f"{name}={of}") for name, of in aliases.items())]
    return list(chain.from_iterable((flag, value) for flag, value in words if value))


def format_brief(
    findings: Sequence[Finding], folder: Path, options: Sequence[str] = ()
) -> Iterator[str]:
    """A few lines for somebody who is about to join."""
    warnings = [finding for finding in findings if finding.severity == "warning"]
    for finding in warnings[:3]:
        yield textwrap.shorten(f"{finding.severity}: {finding.text}", 160, placeholder=" ...")
    if findings:
        command = shlex.join(["edge-node", "check", str(folder), *options])
        hints = len(findings) - len(warnings)
        yield f"{len(warnings)} warning(s) and {hints} hint(s) on the images; {command} shows all"
