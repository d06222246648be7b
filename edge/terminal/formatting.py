"""Text for people: numbers, durations, metrics and names, without any terminal library."""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from broker_config.protocol.messages import Validation

EXPIRY_WARNING = timedelta(days=30)  # before a certificate or charter expires, it should be renewed
_LISTED_NAMES = 5
# How a formula begins in a cell of a spreadsheet, also behind what is not seen, in full width, and
# quoted.
_FORMULA = r"['\s\u200b-\u200f\u2060\ufeff]*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]"
# Where a cell begins. Spreadsheets may split a row at other separators than commas, semicolons
# above all, and quotes then hold nothing together.
_BEGIN = r"(^|[;\t\r\n])"
_COULD_BE_FORMULA = re.compile(f"{_BEGIN}(?={_FORMULA})")
_MADE_PLAIN = re.compile(f"{_BEGIN}'(?={_FORMULA})")


def format_bytes(count: float) -> str:
    """A number of bytes in a fitting unit."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def pluralize(count: int, noun: str) -> str:
    """A count with its noun: 1 node, 2 nodes."""
    ending = "" if count == 1 else "s"
    return f"{count} {noun}{ending}"


def format_metric(name: str, value: float) -> str:
    """One metric: accuracies as percentages, all others with three decimals."""
    return f"{100 * value:.1f} %" if name.startswith("accuracy") else f"{value:.3f}"


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Metrics with their names."""
    return ", ".join(f"{name} {format_metric(name, value)}" for name, value in metrics.items())


def format_validation(score: Validation) -> str:
    """How well new products are judged, beside what it takes no model for."""
    of = (
        f"of the newest {pluralize(score.products, 'product')}, judged before they were learnt "
        "from,"
    )
    if score.rmse is not None:
        return f"{of} RMSE {score.rmse:.4g} (always their mean: {score.baseline:.4g})"
    right = 100 * (score.accuracy or 0)
    recall = 100 * (score.recall or 0)
    common = f"always the most frequent class: {100 * score.baseline:.1f} %"
    return f"{of} {right:.1f} % right ({common}), mean recall {recall:.1f} %"


def format_rate(rate: float) -> str:
    """Rounds per second, more than 0; or the time of one where it takes longer."""
    return f"{rate:.1f} rounds per second" if rate >= 1 else f"{1 / rate:.1f} s a round"


def format_elapsed(seconds: float) -> str:
    """Time that has passed: 0:26, 4:10, 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_remaining(seconds: float) -> str:
    """Remaining time, no more precise than an estimate can be: 26 s, 4 min 10 s, 25 min,
    1 h 10 min.
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 600:
        minutes, rest = divmod(round(seconds / 10), 6)
        return f"{minutes} min {10 * rest} s" if rest else f"{minutes} min"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    hours, minutes = divmod(round(seconds / 600), 6)
    return f"{hours} h {10 * minutes} min" if minutes else f"{hours} h"


def format_expiry(expires: datetime, now: datetime) -> str:
    """When something expires: expired on 2026-03-01; expires on 2026-03-01, in 12 days."""
    if expires < now:
        return f"expired on {expires:%Y-%m-%d}"
    return f"expires on {expires:%Y-%m-%d}, in {pluralize((expires - now).days, 'day')}"


def format_names(names: Sequence[str]) -> str:
    """Names in a sentence: the first few, and how many more there are."""
    more = f" and {len(names) - _LISTED_NAMES} more" if len(names) > _LISTED_NAMES else ""
    return ", ".join(names[:_LISTED_NAMES]) + more


def shorten(name: str, length: int, ascii_only: bool = False) -> str:
    """A name of at most `length` characters: a longer one loses its middle,
    since both ends tell it from others.
    """
    if len(name) <= length:
        return name
    head = length // 2
    mark = "~" if ascii_only else "…"
    return f"{name[:head]}{mark}{name[len(name) - (length - 1 - head) :]}"


def natural_key(name: str) -> list[tuple[int, str]]:
    """A sort key that puts plant-2 before plant-10."""
    parts: list[tuple[int, str]] = []
    for part in re.split(r"(\d+)", name):
        pair = (int(part), "") if part.isdecimal() else (-1, part)
        parts.append(pair)
    return parts


def plain_cell(text: str) -> str:
    """A text as a cell of CSV that no spreadsheet takes for a formula:
    an apostrophe precedes what could be one.
    """
    return _COULD_BE_FORMULA.sub(r"\1'", text)


def read_cell(cell: str) -> str:
    """The text in a cell that `plain_cell` made."""
    return _MADE_PLAIN.sub(r"\1", cell)
