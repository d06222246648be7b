"""Dispatch of a line's outcomes: the outbox, and deliveries to sinks,
each replaceable while the others go on.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from broker_config.protocol.errors import UsageError
from broker_config.protocol.topics import check_name
from edge.config.instance import Instance
from edge.daemon import line_parts, line_settings
from edge.http.prometheus_metrics import Reading
from edge.inference.outcomes import Outcome
from edge.outbox import delivery
from edge.outbox.delivery import Delivery
from edge.outbox.limits import Limits
from edge.sinks.sink import Sink

if TYPE_CHECKING:
    from edge.outbox.outbox import Outbox  # loads sqlite3: only a line with a sink needs it


class _Running(NamedTuple):
    wanted: line_settings.Sink
    delivery: Delivery

    @property
    def name(self) -> str:
        return self.delivery.sink.name


class Change(NamedTuple):
    """Another set of sinks, opened but not in use yet."""

    kept: list[_Running]
    new: list[tuple[line_settings.Sink, Sink]]
    old: list[_Running]


class Dispatcher:
    """Puts outcomes into the outbox, from which they reach the sinks;
    without a sink they go nowhere.
    """

    def __init__(self, instance: Instance, limits: Limits) -> None:
        self._instance = instance
        self._limits = limits
        self._outbox: Outbox | None = None
        self._running: list[_Running] = []
        self._closing = contextlib.ExitStack()

    def put(self, outcome: Outcome) -> None:
        """Store an outcome, within a millisecond; never raises."""
        if self._outbox:
            self._outbox.put(outcome)

    def prepare(self, wanted: Sequence[line_settings.Sink]) -> Change:
        """Open the sinks that are new; EdgeNodeError, and nothing has changed,
        when one cannot be.
        """
        kept, missing, old = line_parts.diff(self._running, wanted)
        new: list[tuple[line_settings.Sink, Sink]] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_unused)
            if missing and not self._outbox:
                self._open_outbox()
            for each in missing:
                assert self._outbox
                sink = each.open_sink(self._instance, self._outbox)
                undo.enter_context(contextlib.closing(sink))
                new.append((each, sink))
            names = [each.name for each in kept] + [sink.name for _, sink in new]
            if twice := [name for name in names if names.count(name) > 1]:
                raise UsageError(
                    f"two sinks are the same: {twice[0]}",
                    "leave one of them out, of the options or the file",
                )
            undo.pop_all()
        return Change(kept, new, old)

    def discard(self, change: Change) -> None:
        """Close what was prepared."""
        for _, sink in change.new:
            sink.close()
        self._close_unused()

    def apply(self, change: Change) -> None:
        """Switch to the new sinks, within seconds.

        Each outcome reaches the old ones, the new ones or both.
        """
        if not self._outbox:
            return
        names = [each.name for each in change.kept] + [sink.name for _, sink in change.new]
        self._outbox.set_sinks(list(dict.fromkeys([*names, *(each.name for each in change.old)])))
        delivery.stop([each.delivery for each in change.old])
        self._running = change.kept + [
            _Running(wanted, Delivery(self._outbox, sink)) for wanted, sink in change.new
        ]
        self._outbox.set_sinks(names)
        self._close_unused()

    def pending(self) -> int:
        """Number of outcomes that the slowest sink has not had yet."""
        return max(
            (self._outbox.pending(each.name) for each in self._running if self._outbox), default=0
        )

    def away(self) -> list[str]:
        """Names of sinks whose receivers take no outcomes; waits for nothing."""
        return [each.name for each in self._running if not each.delivery.up]

    def readings(self) -> Iterator[Reading]:
        """Backlog, state and counts of each sink, for Prometheus."""
        outbox = self._outbox
        running = self._running
        if outbox is None:
            return
        text = "Outcomes that some receiver never got: it was away for too long"
        yield Reading(CounterMetricFamily, "spool_dropped", text, outbox.dropped)
        for name, each in ((each.name, each.delivery) for each in running):
            labels = {"sink": name}
            yield Reading(
                GaugeMetricFamily,
                "sink_waiting",
                "Outcomes that wait",
                outbox.pending(name),
                labels,
            )
            yield Reading(
                GaugeMetricFamily, "sink_up", "1: the receiver takes outcomes", each.up, labels
            )
            text = "Outcomes that the receiver has"
            yield Reading(CounterMetricFamily, "sink_delivered", text, each.delivered, labels)
            text = "Outcomes that the receiver refused"
            yield Reading(CounterMetricFamily, "sink_refused", text, each.refused, labels)

    def close(self) -> None:
        """Deliver what the sinks take within seconds; the rest waits for the next start."""
        delivery.stop([each.delivery for each in self._running])
        self._close_outbox()

    def _open_outbox(self) -> None:
        from edge.outbox.outbox import open_outbox  # noqa: PLC0415

        line, state = self._instance
        check_name(line, "the line's name")
        self._outbox = self._closing.enter_context(
            open_outbox(state / "spool" / line, self._limits)
        )

    def _close_unused(self) -> None:
        """Close an outbox without sinks: it would grow, and nobody would read it."""
        if not self._running:
            self._close_outbox()

    def _close_outbox(self) -> None:
        self._outbox = None
        self._closing.close()
