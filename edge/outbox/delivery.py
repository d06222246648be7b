"""From the spool to the sinks: one thread each, in order, again until the receiver has it."""

import logging
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta, Struct

from edge.inference.verdict import Outcome
from edge.sinks.sink import Item, Refused, Sink, SinkDown

if TYPE_CHECKING:
    from edge.outbox.outbox import Spool  # loads sqlite3: only a line with a sink needs it

_DRAIN = 5.0  # seconds for what is left when a sink ends
_BATCH = 256  # items that a sink gets at once
_IDLE = 15.0  # seconds after which a sink without items looks after its receiver
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds between attempts

_decode = msgspec.json.Decoder(Outcome).decode
_log = logging.getLogger(__name__)


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[spool]`: how much may wait for receivers that are away; then the oldest is dropped."""

    outcomes: Annotated[int, Meta(ge=1)] = 1_000_000
    megabytes: Annotated[int, Meta(ge=1)] = 1024


class Delivery:
    """Brings one sink, in a thread of its own, what the spool has for it."""

    def __init__(self, spool: "Spool", sink: Sink) -> None:
        self.sink = sink
        self.taken = 0  # outcomes, since the start
        self.refused = 0
        self.up = True  # whether the last attempt succeeded
        self._spool = spool
        self._old = spool.newest  # what was put until then is replayed
        self._closing = threading.Event()
        self._abandoned = False
        self._pause = 0.0  # seconds before this attempt; 0 while all is well
        self._thread = threading.Thread(target=self._run, name=f"sink {sink.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Finish what is in the spool, unless the receiver is away; without waiting for it: see `join`."""
        self._closing.set()
        self._spool.wake()

    def join(self, seconds: float) -> None:
        """Wait for the end; who takes longer is left behind, and gets the rest after the next start."""
        self._thread.join(seconds)
        self._abandoned = True
        if left := self._spool.waiting(self.sink.name):
            _log.warning("%d outcome(s) wait for %s until the next start", left, self.sink.name)

    def _run(self) -> None:
        try:
            while self._bring() and self._has_work():
                pass
        finally:
            self.sink.close()

    def _has_work(self) -> bool:
        """Wait until there is something to do; False when it is time to end."""
        return self._pause > 0 or self._spool.wait(self.sink.name, _IDLE, self._closing) or not self._closing.is_set()

    def _bring(self) -> bool:
        """Deliver once what there is, or nothing; False when it is time to end."""
        rows = self._spool.read(self.sink.name, _BATCH)
        items = list(self._items(rows))
        taken, down = self._attempt(items)
        if self._abandoned:
            return False
        if rows and taken == len(items):
            self._spool.move(self.sink.name, rows[-1][0])
        elif taken:
            self._spool.move(self.sink.name, items[taken - 1].seq)
        if not down:
            self._tell_up()
            return True
        self._tell_down(down)
        self._pause = min(_LONGEST_PAUSE, 2 * self._pause or _FIRST_PAUSE)
        ended = self._closing.wait(max(self._pause * random.uniform(0.5, 1.0), down.after))
        self._old = self._spool.newest
        return not ended

    def _items(self, rows: Sequence[tuple[int, bytes]]) -> Iterator[Item]:
        for seq, data in rows:
            try:
                yield Item(seq, _decode(data), seq <= self._old)
            except msgspec.DecodeError as error:  # a damaged disk, or put by a newer edge-node
                self.refused += 1
                _log.error(
                    "the outcome %d in the spool cannot be read, %s goes without it: %s", seq, self.sink.name, error
                )

    def _attempt(self, items: Sequence[Item]) -> tuple[int, SinkDown | None]:
        """How many of the items are done with, and what is wrong with the receiver."""
        try:
            self.sink.deliver(items)
        except SinkDown as down:
            self.taken += down.taken
            return down.taken, down
        except Refused as refused:
            self.taken += refused.taken
            self.refused += 1
            _log.error("%s refuses the outcome %s: %s", self.sink.name, items[refused.taken].outcome.id, refused)
            return refused.taken + 1, None
        except Exception as error:  # a sink's bug must not end the others
            _log.debug("in %s", self.sink.name, exc_info=True)
            return 0, SinkDown(f"{type(error).__name__}: {error}")
        self.taken += len(items)
        return len(items), None

    def _tell_down(self, down: SinkDown) -> None:
        if self.up:
            _log.warning("%s takes no outcomes: %s; they wait in the spool", self.sink.name, down)
        self.up = False

    def _tell_up(self) -> None:
        if not self.up:
            _log.warning("%s takes outcomes again", self.sink.name)
        self.up, self._pause = True, 0.0


def end(deliveries: Sequence[Delivery]) -> None:
    """A few seconds for what is left."""
    for each in deliveries:
        each.close()
    deadline = time.monotonic() + _DRAIN
    for each in deliveries:
        each.join(max(0.0, deadline - time.monotonic()))
