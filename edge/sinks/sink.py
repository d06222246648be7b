"""Interface of every sink: it takes outcomes in order, and reports when it cannot."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from edge.config.instance import Instance
from edge.inference.outcomes import Outcome

_encode = msgspec.json.Encoder().encode

# whether the line's outbox holds the outcome with this number and id
IsOurs = Callable[[int, str], bool]


class Item(NamedTuple):
    """An outcome with its number on this line, which grows from each to the next."""

    seq: int
    outcome: Outcome
    replayed: bool  # it was stored before this connection was up, or before this start


class Sink(Protocol):
    """A destination of outcomes. Only its own thread uses it; it may take its time."""

    name: str  # unique on a line, the same after a restart: kind and target

    def deliver(self, items: Sequence[Item]) -> None:
        """Return when the receiver has them all; SinkDown to be called again later,
        Refused to skip the first one left.

        It is called without items now and then: it should then check that the receiver is there.
        """

    def close(self) -> None:
        """Disconnect from the receiver, within seconds."""


class Origin(Protocol):
    """The line's outbox, from which a sink's items come."""

    id: str  # of its numbers: another one counts anew

    def contains(self, seq: int, id_: str) -> bool:
        """Return whether it holds the outcome with this number and id."""


class SinkSettings(Protocol):
    """Settings of a kind of sink, a msgspec struct tagged by its `kind`;
    what a package registers among `edge_node.sinks`.

    The name of the entry point is the kind: `syslog = "package.syslog:Settings"`.
    """

    def open_sink(self, instance: Instance, origin: Origin) -> Sink:
        """Open the sink; EdgeNodeError when it cannot be."""


class SinkDown(Exception):  # noqa: N818  (an event, not a fault)
    """The receiver is away: all but the first `delivered` items come again,
    in `retry_after` seconds or later.
    """

    def __init__(self, why: str, delivered: int = 0, retry_after: float = 0.0):
        super().__init__(why)
        self.delivered = delivered
        self.retry_after = retry_after


class Refused(Exception):  # noqa: N818
    """The receiver will never take the item after the first `delivered`: skip it,
    the rest is to come again.
    """

    def __init__(self, why: str, delivered: int = 0):
        super().__init__(why)
        self.delivered = delivered


def to_json(item: Item) -> bytes:
    """The outcome as JSON, its `seq` first."""
    return b'{"seq":%d,%b' % (item.seq, _encode(item.outcome)[1:])
