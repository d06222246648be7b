"""Figures as people read them."""

from collections.abc import Mapping
from datetime import datetime, timedelta

SOON = timedelta(days=30)  # before it ends a certificate or charter should be renewed


def size(count: float) -> str:
    """Bytes, in the unit that suits."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def some(count: int, what: str) -> str:
    """A number of things: 1 node, 2 nodes."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def value(name: str, figure: float) -> str:
    """One metric: accuracy as a percentage, all others with three digits."""
    return f"{100 * figure:.1f} %" if name == "accuracy" else f"{figure:.3f}"


def values(metrics: Mapping[str, float]) -> str:
    """Metrics with their names."""
    return ", ".join(f"{name} {value(name, figure)}" for name, figure in metrics.items())


def stopwatch(seconds: float) -> str:
    """Time that has passed: 0:26, 4:10, 1:02:03."""
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def about(seconds: float) -> str:
    """Time that is left, no finer than it can be known: 26 s, 4 min 10 s, 25 min, 1 h 10 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 600:
        minutes, rest = divmod(round(seconds / 10), 6)
        return f"{minutes} min {10 * rest} s" if rest else f"{minutes} min"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    hours, minutes = divmod(round(seconds / 600), 6)
    return f"{hours} h {10 * minutes} min" if minutes else f"{hours} h"


def ending(end: datetime, now: datetime) -> str:
    """When something ends: has ended on 2026-03-01, ends on 2026-03-01, in 12 days."""
    if end < now:
        return f"has ended on {end:%Y-%m-%d}"
    return f"ends on {end:%Y-%m-%d}, in {some((end - now).days, 'day')}"
