"""Errors that say whose fault it is and what to do about it."""

import difflib
from collections.abc import Iterable


class EdgeNodeError(Exception):
    """Our side cannot go on: `what` happened, and the `remedy` that the user can apply."""

    exit_code = 1

    def __init__(self, what: str, remedy: str = ""):
        super().__init__(what)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}\n  What to do: {self.remedy}" if self.remedy else self.what


class UsageError(EdgeNodeError):
    """What the user asked for cannot be done as asked (options, names, folders)."""

    exit_code = 2


class LinkError(EdgeNodeError):
    """The broker cannot be reached or does not let us in."""

    exit_code = 69  # EX_UNAVAILABLE


class PeerError(Exception):
    """A peer broke the protocol: it is named, logged and left out; the round goes on without it."""

    def __init__(self, peer: str, why: str, round_: int | None = None):
        super().__init__(f"{peer}{'' if round_ is None else f' in round {round_}'}: {why}")
        self.peer = peer
        self.why = why
        self.round = round_


def nearest(wrong: str, known: Iterable[str]) -> str:
    """A remedy that names the nearest known word, or all of them."""
    close = difflib.get_close_matches(wrong, known := list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else f"take one of {', '.join(known) or '(none)'}"
