"""Queue of the chunks that a holder sends. No threads, no clock: times are seconds of any monotonic clock."""

from collections import OrderedDict
from typing import NamedTuple

from broker_config.protocol.messages import Want

MAX_QUEUED = 16_384  # chunks; an asker whose request does not fit repeats it later
MAX_REMEMBERED = 4096  # chunks that were sent last
HOLD_OFF = 0.5  # seconds: a chunk is in flight to an asker that wants it again so soon and names no newest chunk


class Chunk(NamedTuple):
    """One chunk of a blob."""

    digest: str
    chunk_size: int
    number: int


class _Sent(NamedTuple):
    order: int  # of all chunks sent until then
    time: float


class SendQueue:
    """Chunks to send, in the order in which they were requested. All askers of a blob receive each of them.

    A chunk that several askers want is sent once; nor is it sent again to an asker while it is in flight. The broker
    keeps the order: what was sent after the chunk that an asker received last is still to come.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[Chunk, None] = OrderedDict()
        self._sent: OrderedDict[Chunk, _Sent] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, want: Want, now: float) -> None:
        """Queue the requested chunks, but those in flight."""
        newest = self._sent.get(Chunk(want.digest, want.chunk_size, want.newest))
        for index in want.chunks[: MAX_QUEUED - len(self)]:
            chunk = Chunk(want.digest, want.chunk_size, index)
            sent = self._sent.get(chunk)
            if not (sent and (sent.order > newest.order if newest else now - sent.time < HOLD_OFF)):
                self._waiting.setdefault(chunk)

    def pop(self, now: float) -> Chunk:
        """Return the chunk to send now; KeyError if there is none."""
        chunk, _ = self._waiting.popitem(last=False)
        self._count += 1
        self._sent[chunk] = _Sent(self._count, now)
        self._sent.move_to_end(chunk)
        if len(self._sent) > MAX_REMEMBERED:
            self._sent.popitem(last=False)
        return chunk

    def clear(self) -> None:
        """Drop all requests, and take no chunk for in flight: the connection was lost."""
        self._waiting.clear()
        self._sent.clear()
