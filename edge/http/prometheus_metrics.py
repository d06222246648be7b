"""Prometheus metrics of a line: base units, one registry for each line."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from edge.inference.outcomes import Failure, Notice, Outcome, Verdict
from edge.inference.pipeline import Inspection, OutcomeConsumer
from edge.inference.served_model import Model

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()
PREFIX = "edge_node_"
# Seconds. A small network takes 1 ms, a fused one 5 to 50, a frame of many tiles a second.
_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

# no series with the creation time of each counter
disable_created_metrics()  # type: ignore[no-untyped-call]


class Reading(NamedTuple):
    """A value at the moment at which Prometheus asks; several may share a name,
    told apart by their labels.
    """

    kind: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str  # without PREFIX; a counter only grows
    help: str
    value: float
    labels: Mapping[str, str] = MappingProxyType({})


Readings = Callable[[], Iterable[Reading]]


class Metrics(Collector):
    """All of a line's metrics; `observe` is a Watcher."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._readings: list[Readings] = []
        self._model = Info(f"{PREFIX}model", "The model that is served", registry=self._registry)
        self._decoding = self._histogram(
            "decoding", "From an image's bytes to the network's pixels"
        )
        self._inference = self._histogram("inference", "The network, for all tiles of an image")
        self._judging = self._histogram(
            "judging", "From an image's arrival to its verdict, with all waiting"
        )
        self._verdicts = self._counter(
            "verdicts", "Images inspected", "source", "label", "defect", "taught", "doubted"
        )
        self._failures = self._counter("failures", "Images that could not be inspected", "source")
        self._notices = self._counter("notices", "What the line said about itself", "kind")
        self._requests = self._counter("http_requests", "HTTP requests answered", "path", "code")
        self._answering = self._histogram(
            "http_request", "From a request's head to its answer", "path"
        )
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def register(self, readings: Readings) -> None:
        """Include what `readings` returns, each time that Prometheus asks."""
        self._readings.append(readings)

    def observe(self, inspection: Inspection) -> Verdict:
        """Count how long an image took; its verdict stays as it is."""
        self._decoding.observe(inspection.decoding_seconds)
        self._inference.observe(inspection.inference_seconds)
        self._judging.observe(time.perf_counter() - inspection.arrived_at)
        return inspection.verdict

    def count(self, outcome: Outcome) -> None:
        """Count an outcome."""
        match outcome:
            case Verdict():
                flags = (
                    str(flag).lower()
                    for flag in (outcome.defect, outcome.taught, bool(outcome.doubts))
                )
                self._verdicts.labels(outcome.source, outcome.label, *flags).inc()
            case Failure():
                self._failures.labels(outcome.source).inc()
            case Notice():
                self._notices.labels(outcome.kind).inc()

    def observe_request(self, path: str, code: int, seconds: float) -> None:
        """Count an HTTP request; `path` is a route's template."""
        self._requests.labels(path, str(code)).inc()
        self._answering.labels(path).observe(seconds)

    def exposition(self, model: Model) -> bytes:
        """All metrics as Prometheus reads them."""
        manifest = model.manifest
        self._model.info(
            {"node": manifest.node, "round": str(manifest.round), "digest": model.digest}
        )
        return generate_latest(self._registry)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Collect every reading."""
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for kind, name, text, value, labels in itertools.chain.from_iterable(
            read() for read in self._readings
        ):
            family = families.setdefault(name, kind(PREFIX + name, text, labels=tuple(labels)))
            family.add_metric(tuple(labels.values()), value)
        yield from families.values()

    def _histogram(self, what: str, text: str, *labels: str) -> Histogram:
        name = f"{PREFIX}{what}_seconds"
        return Histogram(name, text, labels, buckets=_BUCKETS, registry=self._registry)

    def _counter(self, what: str, text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}{what}_total", text, labels, registry=self._registry)


class CountingConsumer:
    """Counts outcomes on their way to another consumer."""

    def __init__(self, metrics: Metrics, consumer: OutcomeConsumer) -> None:
        self._metrics = metrics
        self._consumer = consumer

    def put(self, outcome: Outcome) -> None:
        """Count it and pass it on."""
        self._metrics.count(outcome)
        self._consumer.put(outcome)
