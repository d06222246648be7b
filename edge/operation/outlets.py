"""The way out of a line: a spool, and a thread for each sink that takes from it. Sinks come and go while it runs."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from broker_config.errors import UsageError
from broker_config.topics import check_name
from edge import assembly, delivery, settings
from edge.assembly import Site
from edge.delivery import Delivery
from edge.line import Nowhere
from edge.metrics import Reading
from edge.verdict import Outcome

if TYPE_CHECKING:
    from edge.spool import Spool

_DRAIN = 5.0  # seconds for what a sink has not had yet when it ends


class Outlets:
    """The outbox of a line: hands outcomes to the spool, or nowhere while no sink is wanted."""

    def __init__(self, site: Site) -> None:
        check_name(site.line, "the line's name")
        self._site = site
        self._closing = contextlib.ExitStack()  # of the spool
        self._spool: Spool | None = None
        self._deliveries: dict[settings.Sink, Delivery] = {}

    def put(self, outcome: Outcome) -> None:
        """Take an outcome over; never raises."""
        (self._spool or _NOWHERE).put(outcome)

    def become(self, wanted: Sequence[settings.Sink], limits: delivery.Settings) -> None:
        """Deliver to these sinks; those that are there already go on undisturbed. May take some seconds.

        EdgeNodeError when one cannot be opened; all is then as it was. The limits are of the first call with a sink.
        """
        if not wanted:
            self.close()
            return
        spool = self._spool or self._open(limits)
        missing = [each for each in wanted if each not in self._deliveries]
        old = [each for each in self._deliveries if each not in wanted]
        with contextlib.ExitStack() as undo:
            if not self._deliveries:
                undo.callback(self.close)
            opened = {}
            for each in missing:
                opened[each] = assembly.sink(each, self._site, spool)
                undo.callback(opened[each].close)
            names = [each.sink.name for kept, each in self._deliveries.items() if kept not in old]
            names += [sink.name for sink in opened.values()]
            if twice := [name for name in names if names.count(name) > 1]:
                raise UsageError(
                    f"two sinks are the same: {twice[0]}", "leave one of them out, of the options or the file"
                )
            undo.pop_all()
        _end([self._deliveries.pop(each) for each in old])
        spool.begin(names)
        self._deliveries |= {each: Delivery(spool, sink) for each, sink in opened.items()}
        self._spool = spool

    def close(self) -> None:
        """Deliver what there is, as far as that takes some seconds; the rest after the next start."""
        _end(list(self._deliveries.values()))
        self._deliveries = {}
        self._spool = None
        self._closing.close()

    def readings(self) -> Iterator[Reading]:
        """How it goes, for Prometheus."""
        spool = self._spool
        if spool is None:
            return
        text = "Outcomes that some receiver never got: it was away for too long"
        yield Reading(CounterMetricFamily, "spool_dropped", text, spool.dropped)
        for each in list(self._deliveries.values()):
            of = {"sink": each.sink.name}
            yield Reading(GaugeMetricFamily, "sink_waiting", "Outcomes that wait", spool.waiting(each.sink.name), of)
            yield Reading(GaugeMetricFamily, "sink_up", "1: the receiver takes outcomes", each.up, of)
            yield Reading(CounterMetricFamily, "sink_delivered", "Outcomes that the receiver has", each.taken, of)
            yield Reading(CounterMetricFamily, "sink_refused", "Outcomes that the receiver refused", each.refused, of)

    def _open(self, limits: delivery.Settings) -> "Spool":
        from edge.spool import opened  # noqa: PLC0415  (loads sqlite3: only a line with a sink needs it)

        return self._closing.enter_context(opened(self._site.state / "spool" / self._site.line, limits))


_NOWHERE = Nowhere()


def _end(deliveries: Sequence[Delivery]) -> None:
    for each in deliveries:
        each.close()
    deadline = time.monotonic() + _DRAIN
    for each in deliveries:
        each.join(max(0.0, deadline - time.monotonic()))
