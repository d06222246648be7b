"""Output of the image checks: a table with findings, JSON, and a contact sheet."""

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from broker_config.protocol.errors import UsageError, replace_unprintable
from broker_config.protocol.names import show_name
from edge.inference.image_decoding import ImageError, annotated_tags, read_image
from trainer.data.checks.check_run import ImageReport
from trainer.data.checks.findings import SEVERITIES, Finding, Severity
from trainer.data.checks.image_facts import ImageFacts


class ClassSummary(msgspec.Struct, frozen=True):
    """The images of one class that can be read, each once."""

    name: str
    images: int
    held_out: int
    sizes: dict[str, int]  # how many of each
    types: dict[str, int]  # format and colour mode
    brightness: float  # mean gray value


class Summary(msgspec.Struct, frozen=True):
    """The checks of a plant's images, for machines."""

    can_join: bool
    classes: list[ClassSummary]
    findings: tuple[Finding, ...]
    groups: list[list[str]] = []  # files that train or are held out together
    proposed_pattern: str = ""  # for --group, if the names of files suggest groups
    proposed_groups: dict[str, str] = {}  # the group of a file, if names or times suggest one
    picture: str | None = None


def summarise(report: ImageReport, picture: Path | None = None) -> Summary:
    """What was found, class by class; `picture` is where it was drawn."""
    classes = []
    for name in sorted({each.class_name for each in report.facts}):
        classes.append(
            _summarise_class(name, [each for each in report.facts if each.class_name == name])
        )
    groups = []
    for group in report.groups:
        groups.append([show_name(path) for path in group])
    picture_or_none = show_name(picture) if picture else None
    findings = tuple(map(_shown, report.findings))
    proposal = report.proposal
    keys = proposal.keys if proposal else {}
    pattern = proposal.pattern if proposal else ""
    return Summary(
        report.can_join,
        classes,
        findings,
        groups,
        pattern,
        {show_name(path): key for path, key in keys.items()},
        picture_or_none,
    )


def _shown(finding: Finding) -> Finding:
    """The finding as it can be printed: names of files may be in any encoding."""
    return msgspec.structs.replace(
        finding,
        text=replace_unprintable(finding.text),
        remedy=replace_unprintable(finding.remedy),
        files=tuple(map(show_name, finding.files)),
    )


def _summarise_class(name: str, facts: Sequence[ImageFacts]) -> ClassSummary:
    held_out = sum(each.held_out for each in facts)
    return ClassSummary(
        show_name(name),
        len(facts) - held_out,
        held_out,
        dict(Counter(each.size for each in facts).most_common()),
        dict(Counter(f"{each.format} {each.mode}" for each in facts).most_common()),
        round(float(np.mean([each.brightness for each in facts])), 1),
    )


# For people

_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "yellow", "hint": "cyan"}


def print_table(report: ImageReport, console: Console) -> None:
    """Print the classes, the findings and whether the plant can join."""
    summary = summarise(report)
    if summary.classes:
        console.print(_class_table(summary.classes))
    for finding in summary.findings:
        text = Text.assemble((finding.severity, _STYLES[finding.severity]), f": {finding.text}")
        text.append(f"\n  What to do: {finding.remedy}", style="dim")
        # the terminal's own wrapping leaves paths whole when they are copied
        console.print(text, soft_wrap=True)
    can_join = "" if summary.can_join else "; mend the errors before this plant joins"
    console.print(format_counts(report.findings) + can_join)


def print_groups(report: ImageReport, table: Path, console: Console) -> None:
    """Print the groups that the files suggest, and how they are passed on; or that none are known.

    Where no pattern of names says them, they are written to `table`.
    """
    proposal = report.proposal
    if proposal is None:
        if not report.groups:
            told = (
                "no groups of images are known, and neither names nor times of the files suggest "
                "any; if several images show one part, say which with --group"
            )
            console.print(Text(told), soft_wrap=True)
        return
    if not proposal.pattern:
        proposal.write(table)
    given = shlex.quote(proposal.pattern or str(table))
    told = (
        f"the {proposal.why} of {len(proposal.keys)} files suggest {proposal.groups} groups of "
        f"images; if each shows one part, pass --group {given} to check and join"
    )
    console.print(Text(told), soft_wrap=True)


def _class_table(classes: Sequence[ClassSummary]) -> Table:
    drawn = Table(Column("class", overflow="fold"), "images", "size", "type", "brightness")
    for each in classes:
        held_out_text = f" + {each.held_out}" if each.held_out else ""
        images = f"{each.images}" + held_out_text
        drawn.add_row(
            Text(each.name),
            images,
            _format_values(each.sizes),
            _format_values(each.types),
            f"{each.brightness:.0f}",
        )
    return drawn


def _format_values(counts: dict[str, int]) -> str:
    if len(counts) == 1:
        return next(iter(counts))
    shown = [f"{value} ({count})" for value, count in list(counts.items())[:2]]
    ellipsis = ["..."] if len(counts) > 2 else []
    return ", ".join([*shown, *ellipsis])


def format_counts(findings: Iterable[Finding]) -> str:
    """How many findings of each severity there are."""
    counts = Counter(finding.severity for finding in findings)
    text = [
        f"{counts[severity]} {severity}{'s' * (counts[severity] > 1)}"
        for severity in SEVERITIES
        if counts[severity]
    ]
    return ", ".join(text) or "nothing to complain of"


# The picture

_TILE = 112
_CAPTION = 30
_GAP = 6
_COLUMNS = 10
_TITLE = 30
_COLORS: dict[Severity, str] = {"error": "#c62828", "warning": "#e07000", "hint": "#1565c0"}
_INK = "#222222"
_PAPER = "#ffffff"


class _Tile(NamedTuple):
    path: Path
    mark: Finding | None = None


class _Band(NamedTuple):
    title: str
    rows: list[list[_Tile]]

    @property
    def height(self) -> int:
        return _TITLE + len(self.rows) * (_TILE + _CAPTION + _GAP)


def draw_contact_sheet(report: ImageReport, target: Path) -> None:
    """Draw a contact sheet: for each class a row of images without findings,
    and one of images with.

    Raises:
        UsageError: it cannot be written.
    """
    bands = _make_bands(report)
    sheet = Image.new(
        "RGB",
        (_GAP + _COLUMNS * (_TILE + _GAP), _TITLE + sum(band.height for band in bands)),
        _PAPER,
    )
    pen = ImageDraw.Draw(sheet)
    left = _GAP
    for text, color in (
        (f"{len(report.facts)} images, {format_counts(report.findings)}; marked:", _INK),
        *_COLORS.items(),
    ):
        pen.text((left, 8), text, color, _font(15))
        left += int(pen.textlength(text, _font(15))) + 10
    top = _TITLE
    for band in bands:
        pen.text((_GAP, top + 8), band.title, _INK, _font(15))
        for row, tiles in enumerate(band.rows):
            for column, tile in enumerate(tiles):
                corner = (
                    _GAP + column * (_TILE + _GAP),
                    top + _TITLE + row * (_TILE + _CAPTION + _GAP),
                )
                _draw_tile(sheet, pen, corner, tile)
        top += band.height
    try:
        sheet.save(target, exif=annotated_tags())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the picture {target} cannot be written ({error})", "pass another --picture FILE.png"
        ) from error


def _make_bands(report: ImageReport) -> list[_Band]:
    marks: dict[Path, Finding] = {}
    for finding in sorted(
        report.findings, key=lambda each: (SEVERITIES.index(each.severity), len(each.files))
    ):
        for file in finding.files:
            marks.setdefault(Path(file), finding)
    classes = {each.class_name for each in report.facts}
    bands = []
    for name in sorted(classes):
        facts = [each for each in report.facts if each.class_name == name]
        plain = [_Tile(each.path) for each in facts if each.path not in marks]
        marked = [_Tile(path, mark) for path, mark in marks.items() if path.parent.name == name]
        marked_text = f", {len(marked)} marked" if marked else ""
        title = f"{show_name(name)}: {len(facts)} images" + marked_text
        bands.append(_Band(title, [tiles[:_COLUMNS] for tiles in (plain, marked) if tiles]))
    outside = [_Tile(path, mark) for path, mark in marks.items() if path.parent.name not in classes]
    band = [_Band(f"in no class: {len(outside)} files", [outside[:_COLUMNS]])] if outside else []
    return bands + band


def _draw_tile(
    sheet: Image.Image, pen: ImageDraw.ImageDraw, corner: tuple[int, int], tile: _Tile
) -> None:
    left, top = corner
    color = _COLORS[tile.mark.severity] if tile.mark else "#999999"
    try:
        sheet.paste(
            ImageOps.pad(
                read_image(tile.path).image.convert("RGB"), (_TILE, _TILE), color="#dddddd"
            ),
            corner,
        )
    except ImageError:
        pen.line((left, top, left + _TILE, top + _TILE), color, 2)
        pen.line((left, top + _TILE, left + _TILE, top), color, 2)
    if tile.mark:
        pen.rectangle((left, top, left + _TILE - 1, top + _TILE - 1), outline=color, width=3)
    name = show_name(tile.path.name)
    while pen.textlength(name, _font(11)) > _TILE:
        name = "…" + name[2:]  # names often differ in their ends only
    pen.text((left, top + _TILE + 1), name, "#666666", _font(11))
    kind = tile.mark.kind if tile.mark else ""
    pen.text((left, top + _TILE + 14), kind, color, _font(11))


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
