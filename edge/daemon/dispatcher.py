"""A line's outbox: the spool and the sinks, of which each can be exchanged while the others go on."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from broker_config.protocol.errors import UsageError
from broker_config.protocol.topics import check_name
from edge.config import line_settings
from edge.daemon import assembly
from edge.daemon.prometheus_metrics import Reading
from edge.daemon.settings_diff import compared
from edge.inference.verdict import Outcome
from edge.outbox import delivery
from edge.outbox.delivery import Delivery
from edge.sinks.sink import Sink

if TYPE_CHECKING:
    from edge.outbox.outbox import Spool  # loads sqlite3: only a line with a sink needs it


class _Receiver(NamedTuple):
    wanted: line_settings.Sink
    delivery: Delivery

    @property
    def name(self) -> str:
        return self.delivery.sink.name


class Change(NamedTuple):
    """Other sinks, opened, but not in use yet."""

    kept: list[_Receiver]
    new: list[tuple[line_settings.Sink, Sink]]
    old: list[_Receiver]


class Receivers:
    """Where outcomes go: into the spool, and from there to the sinks; where there is no sink, nowhere."""

    def __init__(self, site: assembly.Site, limits: delivery.Settings) -> None:
        self._site, self._limits = site, limits
        self._spool: Spool | None = None
        self._there: list[_Receiver] = []
        self._closing = contextlib.ExitStack()

    def put(self, outcome: Outcome) -> None:
        """Take an outcome over, within a millisecond; never raises."""
        if self._spool:
            self._spool.put(outcome)

    def prepare(self, wanted: Sequence[line_settings.Sink]) -> Change:
        """Open the sinks that are not there yet; EdgeNodeError, and nothing has changed, when one cannot be."""
        kept, missing, old = compared(self._there, wanted)
        new: list[tuple[line_settings.Sink, Sink]] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_unused)
            if missing and not self._spool:
                self._open_spool()
            for each in missing:
                assert self._spool
                sink = assembly.sink(each, self._site, self._spool)
                undo.enter_context(contextlib.closing(sink))
                new.append((each, sink))
            names = [each.name for each in kept] + [sink.name for _, sink in new]
            if twice := [name for name in names if names.count(name) > 1]:
                raise UsageError(
                    f"two sinks are the same: {twice[0]}", "leave one of them out, of the options or the file"
                )
            undo.pop_all()
        return Change(kept, new, old)

    def abandon(self, change: Change) -> None:
        """Let go of what was prepared."""
        for _, sink in change.new:
            sink.close()
        self._close_unused()

    def exchange(self, change: Change) -> None:
        """Use them. Each outcome reaches the old sinks, the new ones or both; takes seconds when one is slow."""
        if not self._spool:
            return
        names = [each.name for each in change.kept] + [sink.name for _, sink in change.new]
        self._spool.begin(list(dict.fromkeys([*names, *(each.name for each in change.old)])))
        delivery.end([each.delivery for each in change.old])
        self._there = change.kept + [_Receiver(wanted, Delivery(self._spool, sink)) for wanted, sink in change.new]
        self._spool.begin(names)
        self._close_unused()

    def waiting(self) -> int:
        """Outcomes that the slowest sink has not had yet."""
        return max((self._spool.waiting(each.name) for each in self._there if self._spool), default=0)

    def readings(self) -> Iterator[Reading]:
        """How it goes, for Prometheus."""
        spool, there = self._spool, self._there
        if spool is None:
            return
        text = "Outcomes that some receiver never got: it was away for too long"
        yield Reading(CounterMetricFamily, "spool_dropped", text, spool.dropped)
        for _, each in there:
            of = {"sink": each.sink.name}
            yield Reading(GaugeMetricFamily, "sink_waiting", "Outcomes that wait", spool.waiting(each.sink.name), of)
            yield Reading(GaugeMetricFamily, "sink_up", "1: the receiver takes outcomes", each.up, of)
            yield Reading(CounterMetricFamily, "sink_delivered", "Outcomes that the receiver has", each.taken, of)
            yield Reading(CounterMetricFamily, "sink_refused", "Outcomes that the receiver refused", each.refused, of)

    def close(self) -> None:
        """Bring the sinks what they take within seconds; the rest waits for the next start."""
        delivery.end([each.delivery for each in self._there])
        self._close_spool()

    def _open_spool(self) -> None:
        from edge.outbox.outbox import opened  # noqa: PLC0415

        check_name(self._site.line, "the line's name")
        self._spool = self._closing.enter_context(opened(self._site.state / "spool" / self._site.line, self._limits))

    def _close_unused(self) -> None:
        """A spool without sinks would grow, and nobody would read it."""
        if not self._there:
            self._close_spool()

    def _close_spool(self) -> None:
        self._spool = None
        self._closing.close()
