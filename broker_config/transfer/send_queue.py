"""Queue of the chunks that a holder sends, and how many each asker may have. No threads, no clock.

Times are seconds of any monotonic clock.
"""

from collections import Counter, OrderedDict
from typing import NamedTuple

from broker_config.protocol.messages import Want

MAX_QUEUED = 16_384  # chunks; an asker whose request does not fit repeats it later
MAX_REMEMBERED = 4096  # chunks that were sent last
# times that an asker may have each byte of a blob in a period: chunks are lost, processes restart
REPEATS = 4
PERIOD = 60.0  # seconds
_ASKERS = 10_000  # that are counted one by one
# seconds: a chunk is in flight to an asker that wants it again so soon and names no newest chunk
HOLD_OFF = 0.5


class Chunk(NamedTuple):
    """One chunk of a blob."""

    digest: str
    chunk_size: int
    number: int


class _Sent(NamedTuple):
    order: int  # of all chunks sent until then
    time: float


class SendQueue:
    """Chunks to send, in the order in which they were requested.

    All askers of a blob receive each of them.

    A chunk that several askers want is sent once; nor is it sent again to an asker while it is in
    flight. The broker keeps the order: what was sent after the chunk that an asker received last is
    still to come.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[Chunk, None] = OrderedDict()
        self._sent: OrderedDict[Chunk, _Sent] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, want: Want, now: float, most: int = MAX_QUEUED) -> int:
        """Queue at most so many of the requested chunks,
        but none that waits or is in flight; return how many.
        """
        newest = self._sent.get(Chunk(want.digest, want.chunk_size, want.newest))
        before = len(self)
        for index in want.chunks:
            if len(self) >= min(before + most, MAX_QUEUED):
                break
            chunk = Chunk(want.digest, want.chunk_size, index)
            sent = self._sent.get(chunk)
            if sent is None:
                was_just_sent = False
            elif newest:
                was_just_sent = sent.order > newest.order
            else:
                was_just_sent = now - sent.time < HOLD_OFF
            if not was_just_sent:
                self._waiting.setdefault(chunk)
        return len(self) - before

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


class Allowances:
    """How many chunks each asker may still have in this period:
    a request of a few bytes must not cost megabytes.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._had: Counter[tuple[str, str]] = Counter()  # chunks, by asker and blob

    def left(self, asker: str, want: Want, count: int, now: float) -> int:
        """Chunks that the asker may still have of a blob of `count` chunks."""
        if now - self._since > PERIOD or len(self._had) > _ASKERS:
            self._since = now
            self._had = Counter()
        return max(0, REPEATS * count - self._had[asker, want.digest])

    def spend(self, asker: str, want: Want, chunks: int) -> None:
        """The asker gets so many chunks."""
        self._had[asker, want.digest] += chunks
