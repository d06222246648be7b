"""Delivery from the outbox to a sink: a thread for each, in order,
repeated until the receiver has everything.
"""

import logging
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from edge.inference.outcomes import Outcome
from edge.sinks.sink import Item, Refused, Sink, SinkDown

if TYPE_CHECKING:
    from edge.outbox.outbox import Outbox  # loads sqlite3: only a line with a sink needs it

_BATCH = 256  # items handed to a sink at once

_decode = msgspec.json.Decoder(Outcome).decode
_log = logging.getLogger(__name__)


class Pauses(NamedTuple):
    """Seconds that a delivery rests."""

    first: float = 0.5  # after an attempt that has failed, then twice as many
    longest: float = 30.0
    idle: float = 15.0  # without items, until the sink checks its receiver


PAUSES = Pauses()


class Delivery:
    """Delivers the contents of the outbox to one sink, in a thread of its own."""

    def __init__(self, outbox: "Outbox", sink: Sink, pauses: Pauses = PAUSES) -> None:
        self.sink = sink
        self.delivered = 0  # outcomes, since the start
        self.refused = 0
        self.up = True  # whether the last attempt succeeded
        self._outbox = outbox
        self._pauses = pauses
        self._replay_until = outbox.newest  # outcomes up to this number are replayed
        self._closing = threading.Event()
        self._abandoned = False
        self._pause = 0.0  # seconds before this attempt; 0 while all is well
        self._thread = threading.Thread(target=self._run, name=f"sink {sink.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask the thread to deliver what is left, unless the receiver is away,
        and to end; returns at once.
        """
        self._closing.set()
        self._outbox.wake()

    def join(self, seconds: float) -> None:
        """Wait for the thread to end.

        One that takes longer is abandoned; the next start delivers the rest.
        """
        self._thread.join(seconds)
        self._abandoned = True
        if left := self._outbox.pending(self.sink.name):
            _log.warning("%d outcome(s) wait for %s until the next start", left, self.sink.name)

    def _run(self) -> None:
        try:
            while self._deliver_batch() and self._has_work():
                pass
        finally:
            self.sink.close()

    def _has_work(self) -> bool:
        """Wait until there is something to do; False when it is time to end."""
        if self._pause > 0:
            return True
        return (
            self._outbox.wait(self.sink.name, self._pauses.idle, self._closing)
            or not self._closing.is_set()
        )

    def _deliver_batch(self) -> bool:
        """Deliver the next batch, which may be empty; False when it is time to end."""
        rows = self._outbox.read(self.sink.name, _BATCH)
        items = list(self._decoded(rows))
        done, down = self._attempt(items)
        if self._abandoned:
            return False
        if rows and done == len(items):
            self._outbox.advance(self.sink.name, rows[-1][0])
        elif done:
            self._outbox.advance(self.sink.name, items[done - 1].seq)
        if not down:
            self._set_up()
            return True
        self._set_down(down)
        self._pause = min(self._pauses.longest, 2 * self._pause or self._pauses.first)
        ended = self._closing.wait(max(self._pause * random.uniform(0.5, 1.0), down.retry_after))
        self._replay_until = self._outbox.newest
        return not ended

    def _decoded(self, rows: Sequence[tuple[int, bytes]]) -> Iterator[Item]:
        for seq, data in rows:
            try:
                yield Item(seq, _decode(data), seq <= self._replay_until)
            except msgspec.DecodeError as error:  # a damaged disk, or written by a newer edge-node
                self.refused += 1
                _log.error(
                    "the outcome %d in the outbox cannot be read, %s goes without it: %s",
                    seq,
                    self.sink.name,
                    error,
                )

    def _attempt(self, items: Sequence[Item]) -> tuple[int, SinkDown | None]:
        """How many of the items are done with, and what is wrong with the receiver."""
        try:
            self.sink.deliver(items)
        except SinkDown as down:
            self.delivered += down.delivered
            return down.delivered, down
        except Refused as refused:
            self.delivered += refused.delivered
            self.refused += 1
            _log.error(
                "%s refuses the outcome %s: %s",
                self.sink.name,
                items[refused.delivered].outcome.id,
                refused,
            )
            return refused.delivered + 1, None
        except Exception as error:  # a bug in one sink must not stop the others
            _log.debug("in %s", self.sink.name, exc_info=True)
            return 0, SinkDown(f"{type(error).__name__}: {error}")
        self.delivered += len(items)
        return len(items), None

    def _set_down(self, down: SinkDown) -> None:
        if self.up:
            _log.warning("%s takes no outcomes: %s; they wait in the outbox", self.sink.name, down)
        self.up = False

    def _set_up(self) -> None:
        if not self.up:
            _log.warning("%s takes outcomes again", self.sink.name)
        self.up = True
        self._pause = 0.0


def stop(deliveries: Sequence[Delivery], seconds: float = 5.0) -> None:
    """End all of them, within so many seconds for what is left to deliver."""
    for each in deliveries:
        each.close()
    deadline = time.monotonic() + seconds
    for each in deliveries:
        each.join(max(0.0, deadline - time.monotonic()))
