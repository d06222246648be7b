"""Which chunks a holder sends next. No threads, no clock: times are seconds of any monotonic clock."""

from collections import OrderedDict
from typing import NamedTuple

from broker_config.protocol.messages import Want

SERVED_AT_ONCE = 16_384  # chunks that wait to be sent; whoever asks for more asks again later
REMEMBERED = 4096  # chunks that were sent last
HOLD_OFF = 0.5  # seconds: who says nothing of what it received and wants a chunk so soon again has it under way


class Piece(NamedTuple):
    """One chunk of a blob."""

    digest: str
    chunk_size: int
    number: int


class _Sending(NamedTuple):
    order: int  # of all chunks sent until then
    time: float


class SendQueue:
    """Chunks to send, in the order in which they were asked for. All who fetch a blob hear each of them.

    Asked for by several, a chunk is sent once; nor is it sent again to an asker to whom it is under way. The broker
    keeps the order: what was sent after the chunk that an asker received last is still to come.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[Piece, None] = OrderedDict()
        self._sent: OrderedDict[Piece, _Sending] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, want: Want, now: float) -> None:
        """Note what was asked for."""
        newest = self._sent.get(Piece(want.digest, want.chunk_size, want.newest))
        for index in want.chunks[: SERVED_AT_ONCE - len(self)]:
            piece = Piece(want.digest, want.chunk_size, index)
            sent = self._sent.get(piece)
            if not (sent and (sent.order > newest.order if newest else now - sent.time < HOLD_OFF)):
                self._waiting.setdefault(piece)

    def pop(self, now: float) -> Piece:
        """Return the chunk to send now; KeyError if there is none."""
        piece, _ = self._waiting.popitem(last=False)
        self._count += 1
        self._sent[piece] = _Sending(self._count, now)
        self._sent.move_to_end(piece)
        if len(self._sent) > REMEMBERED:
            self._sent.popitem(last=False)
        return piece

    def clear(self) -> None:
        """Send nothing of what was asked for so far, and take nothing for under way: the connection was lost."""
        self._waiting.clear()
        self._sent.clear()
