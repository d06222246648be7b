"""What every sink is: something that takes outcomes in order, and says when it cannot."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from edge.inference.verdict import Outcome

_encode = msgspec.json.Encoder().encode


class Item(NamedTuple):
    """An outcome with its number on this line, which grows from each to the next."""

    seq: int
    outcome: Outcome
    replayed: bool  # it was put before this connection was up, or before this start


class Sink(Protocol):
    """Where outcomes go. Used by one thread, its own; it may take its time."""

    name: str  # unique on a line, the same after a restart: kind and target

    def deliver(self, items: Sequence[Item]) -> None:
        """Return when the receiver has them all; SinkDown to be called again later, Refused to leave out the first.

        It comes with no items now and then: then it should see to it that the receiver is there.
        """

    def close(self) -> None:
        """Let go of the receiver, within seconds."""


class SinkDown(Exception):  # noqa: N818  (an event, not a fault)
    """The receiver is away: the same items are to come again later, without the first `taken`, not before `after` s."""

    def __init__(self, why: str, taken: int = 0, after: float = 0.0):
        super().__init__(why)
        self.taken = taken
        self.after = after


class Refused(Exception):  # noqa: N818
    """The receiver will never take the item after the first `taken`: it is to be left out, the rest to come again."""

    def __init__(self, why: str, taken: int = 0):
        super().__init__(why)
        self.taken = taken


def wire(item: Item) -> bytes:
    """The outcome as JSON, its `seq` first."""
    return b'{"seq":%d,%b' % (item.seq, _encode(item.outcome)[1:])
