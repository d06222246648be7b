"""Sparkplug metrics of a line: their names, aliases and datatypes, and an outcome's values."""

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from edge.inference.outcomes import Failure, Notice, Outcome, Verdict
from edge_node.extensions.sparkplug.payload import Metric, Type, Value

BIRTH_DEATH = "bdSeq"
REBIRTH = "Node Control/Rebirth"
SEQUENCE = "Outcome/Sequence"


class Definition(NamedTuple):
    """A metric as declared in the birth message."""

    type: Type
    alias: int | None  # unique in the edge node


NODE = {
    BIRTH_DEATH: Definition(Type.INT64, 1),
    REBIRTH: Definition(Type.BOOLEAN, None),  # the specification requires it to have no alias
    "Properties/Software": Definition(Type.STRING, 2),
    "Properties/Version": Definition(Type.STRING, 3),
    "Properties/Bundle": Definition(Type.STRING, 4),
    "Properties/Model": Definition(Type.STRING, 5),
}
DEVICE = {
    SEQUENCE: Definition(Type.INT64, 10),
    "Outcome/Id": Definition(Type.STRING, 11),
    "Verdict/Image": Definition(Type.STRING, 20),
    "Verdict/Source": Definition(Type.STRING, 21),
    "Verdict/Label": Definition(Type.STRING, 22),
    "Verdict/Confidence": Definition(Type.DOUBLE, 23),
    "Verdict/Defect": Definition(Type.BOOLEAN, 24),
    "Verdict/Disagreement": Definition(Type.DOUBLE, 25),
    "Verdict/Doubts": Definition(Type.STRING, 26),
    "Verdict/Milliseconds": Definition(Type.DOUBLE, 27),
    "Verdict/Bundle": Definition(Type.STRING, 28),
    "Verdict/Model": Definition(Type.STRING, 29),
    "Verdict/Taught": Definition(Type.BOOLEAN, 30),
    "Failure/Image": Definition(Type.STRING, 40),
    "Failure/Source": Definition(Type.STRING, 41),
    "Failure/Error": Definition(Type.STRING, 42),
    "Failure/Remedy": Definition(Type.STRING, 43),
    "Notice/Kind": Definition(Type.STRING, 50),
    "Notice/Text": Definition(Type.STRING, 51),
    "Total/Verdicts": Definition(Type.INT64, 60),
    "Total/Defects": Definition(Type.INT64, 61),
    "Total/Doubtful": Definition(Type.INT64, 62),
    "Total/Failures": Definition(Type.INT64, 63),
    "Total/Notices": Definition(Type.INT64, 64),
}


def milliseconds(time: str) -> int:
    """An outcome's ISO 8601 time as Sparkplug has it: milliseconds since 1970,
    UTC. ValueError if it is not one.
    """
    return round(datetime.fromisoformat(time).timestamp() * 1000)


def values_of(seq: int, outcome: Outcome) -> dict[str, Value]:
    """The device's metrics that an outcome sets."""
    common: dict[str, Value] = {SEQUENCE: seq, "Outcome/Id": outcome.id}
    match outcome:
        case Verdict():
            return common | {
                "Verdict/Image": outcome.image,
                "Verdict/Source": outcome.source,
                "Verdict/Label": outcome.label,
                "Verdict/Confidence": outcome.confidence,
                "Verdict/Defect": outcome.defect,
                "Verdict/Disagreement": outcome.disagreement,
                "Verdict/Doubts": ", ".join(outcome.doubts),
                "Verdict/Milliseconds": outcome.milliseconds,
                "Verdict/Bundle": outcome.bundle,
                "Verdict/Model": outcome.model,
                "Verdict/Taught": outcome.taught,
            }
        case Failure():
            return common | {
                "Failure/Image": outcome.image,
                "Failure/Source": outcome.source,
                "Failure/Error": outcome.error,
                "Failure/Remedy": outcome.remedy,
            }
        case Notice():
            return common | {"Notice/Kind": outcome.kind, "Notice/Text": outcome.text}


def totals_of(outcome: Outcome) -> list[str]:
    """The totals that an outcome adds one to."""
    match outcome:
        case Verdict():
            defect_total = ["Total/Defects"] if outcome.defect else []
            doubtful_total = ["Total/Doubtful"] if outcome.doubts else []
            return ["Total/Verdicts", *defect_total, *doubtful_total]
        case Failure():
            return ["Total/Failures"]
        case Notice():
            return ["Total/Notices"]


class MetricValues:
    """The metrics of an edge node or a device, with the latest value and timestamp of each."""

    def __init__(self, table: Mapping[str, Definition]) -> None:
        self._table = table
        self._latest: dict[str, tuple[Value, int]] = {}

    def __getitem__(self, name: str) -> Value:
        return self._latest[name][0] if name in self._latest else None

    def put(self, values: Mapping[str, Value], timestamp: int) -> None:
        """Set values, even if their timestamp is older than the present one's."""
        self._latest |= {name: (value, timestamp) for name, value in values.items()}

    def update(self, values: Mapping[str, Value], timestamp: int) -> None:
        """Set values, except those that have a later timestamp already."""
        self.put(
            {name: value for name, value in values.items() if timestamp >= self._timestamp(name)},
            timestamp,
        )

    def _timestamp(self, name: str) -> int:
        return self._latest[name][1] if name in self._latest else 0

    def birth(self, now: int) -> list[Metric]:
        """Every metric in full, ordered by timestamp; null where there is no value yet."""
        found = []
        for name, (type_, alias) in self._table.items():
            value, timestamp = self._latest.get(name, (None, now))
            found.append(Metric(type_, value, timestamp, name, alias))
        return sorted(found, key=lambda metric: metric.timestamp)

    def data(
        self, values: Mapping[str, Value], timestamp: int, *, historical: bool
    ) -> list[Metric]:
        """Some metrics by their aliases."""
        return [
            Metric(
                self._table[name].type,
                value,
                timestamp,
                alias=self._table[name].alias,
                historical=historical,
            )
            for name, value in values.items()
        ]
