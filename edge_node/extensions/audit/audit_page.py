"""An audit as a page with pictures, one file that needs nothing but a browser;
and as a table for a terminal.
"""

import base64
import io
from datetime import datetime
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from markupsafe import Markup
from PIL import Image
from rich.console import Console
from rich.table import Table

from broker_config.storage.disk import writing
from edge_node.extensions.audit.audit import Audit, Audited, ModeAudit
from edge_node.extensions.audit.exposure import MEANINGS, MODES, SEEN, Exposure, What
from trainer.report.page_template import page_environment

_STYLE = resources.files("trainer.report").joinpath("page.css")
_PICTURE = 96  # pixels to which a picture is enlarged


class Pair(NamedTuple):
    """What an attack has made beside the image that is most like it, as data URIs."""

    made: str
    nearest: str


def write(audited: Audited, out: Path) -> None:
    """Write the page. Raises EdgeNodeError if it cannot be written."""
    with writing(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(render(audited), encoding="utf-8")


def render(audited: Audited) -> str:
    """The page as HTML."""
    environment = page_environment("edge_node.extensions.audit")
    pairs = {}
    for mode, groups in audited.pictures.items():
        pairs[mode] = [
            (f"{SEEN[each.seen]}, {each.attack}", list(map(_pair, each.made, each.nearest)))
            for each in groups
        ]
    return environment.get_template("audit.html").render(
        audit=audited.audit,
        meanings=MEANINGS,
        seen=SEEN,
        modes=MODES,
        pairs=pairs,
        ordered={mode.mode: sorted(mode.exposures, key=_by_kind) for mode in audited.audit.modes},
        made=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        cell=cell,
        shown=sum(len(some) for _, some in chain.from_iterable(pairs.values())),
        style=Markup(_STYLE.read_text("utf-8")),  # noqa: S704  (our own file)
    )


def _by_kind(exposure: Exposure) -> tuple[int, float]:
    """Counts, membership, pictures; in each what is told most first."""
    return list(MEANINGS).index(exposure.what), -exposure.told


def _pair(made: np.ndarray, nearest: np.ndarray) -> Pair:
    return Pair(_uri(made), _uri(nearest))


def _uri(pixels: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).resize((_PICTURE, _PICTURE), Image.Resampling.BICUBIC).save(
        file, "PNG", optimize=True
    )
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def to_result(audit: Audit, page: Path) -> dict[str, Any]:
    """The findings for machines; `told` has, by mode, the worst of each kind.

    `actual` is how the federation works.
    """
    told = {}
    for each in audit.modes:
        if not each.refused:
            told[each.mode] = {what: found.told for what in MEANINGS if (found := each.worst(what))}
    return {
        "audit": msgspec.to_builtins(audit),
        "actual": audit.actual.mode,
        "told": told,
        "page": str(page),
    }


def print_table(audit: Audit, console: Console) -> None:
    """How much is told of each kind in each mode, by the attack that tells most."""
    table = Table(
        title=headline(audit), title_justify="left", title_style="", box=None, pad_edge=False
    )
    table.add_column("what is told")
    for each in audit.modes:
        actual = " *" if each.is_actual else ""
        table.add_column(f"{each.mode}{actual}", justify="right")
    for what, meaning in MEANINGS.items():
        table.add_row(f"{what}: {meaning}", *(cell(each, what) for each in audit.modes))
    console.print(table)
    if not audit.afterwards:
        whole = audit.sent + audit.unsent + audit.known
        played = f"{audit.sent} of {whole} images play those that are sent"
        console.print(f"{played}: with all of them less is told of each", style="dim")
    for each in audit.modes:
        reason = f"not possible here: {each.refused}" if each.refused else MODES[each.mode]
        setting = f"; {each.setting}" if each.setting else ""
        console.print(f"{each.mode}: {reason}{setting}", style="dim")
        for note in each.notes:
            console.print(f"  {note}", style="dim")
    console.print(
        "0 %: as much as somebody knows who sees nothing; 100 %: all; in parentheses what is "
        "sure at 95 %. A high figure is a leak, a low one no proof: other attacks may tell more. "
        "* as the federation works",
        style="dim",
    )


def cell(mode: ModeAudit, what: What) -> str:
    """How much the attack tells that tells most, and at least, where that is known."""
    worst = mode.worst(what)
    if worst is None:
        return "-"
    told_surely_text = f" ({worst.told_surely:.0%})" if worst.low is not None else ""
    return f"{worst.told:.0%}" + told_surely_text


def headline(audit: Audit) -> str:
    """What was audited, in a line."""
    verb = "has shown" if audit.afterwards else "would show"
    return (
        f"what federation {audit.federation!r} ({audit.method}, {audit.model}) {verb} of "
        f"{audit.sent} images"
    )
