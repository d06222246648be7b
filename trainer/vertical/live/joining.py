"""Joining a line: find it, check what it asks for, take part. Itself without torch."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from broker_config import topics
from broker_config.codec import DecodeError, decode
from broker_config.endpoint import Endpoint
from broker_config.errors import UsageError
from broker_config.link import probe
from broker_config.vertical import LineSpec
from trainer import progress
from trainer.enrol import check_name_free

if TYPE_CHECKING:
    from trainer.vertical.live.sensor import Deploy

_PAUSE = 0.3  # seconds between two looks for a head


class Source(NamedTuple):
    """A sensor's measurements."""

    path: Path  # CSV file with a row for each product; it may grow
    columns: tuple[str, ...]
    product: str = "product"
    unit: str | None = None  # column that says which rows follow one another


def join(
    endpoint: Endpoint,
    name: str,
    source: Source,
    state: Path,
    *,
    federation: str | None,
    wait: float,
    report: progress.Report,
    stop: Callable[[], bool] = lambda: False,
    deploying: "Callable[[], Deploy]" = lambda: lambda *_, **__: None,
) -> tuple[int, bool]:
    """Take part in a line to its end; return the last round that was learnt from, and False if `stop` said to end it.

    `deploying` makes what lets the sensor's models be served; it is called once torch is there.

    Raises:
        UsageError: there is no line within `wait` seconds, or this sensor is none of it.
        EdgeNodeError: with what to do about it.
    """
    topics.check_node(name)
    report(progress.Step(what=f"looking for a line on {endpoint}"))
    spec = find(endpoint, federation, wait, stop)
    if spec is None:
        return 0, False
    if name not in spec.sensors:
        raise UsageError(
            f"the line {spec.federation!r} has no sensor {name!r}", f"its sensors are {', '.join(spec.sensors)}"
        )
    check_name_free(endpoint, spec.federation, name, state)
    from trainer.vertical.live.sensor import take_part  # noqa: PLC0415  (torch takes seconds)

    return take_part(spec, name, source, endpoint, state, report=report, stop=stop, deploying=deploying)


def find(
    endpoint: Endpoint, federation: str | None, wait: float, stop: Callable[[], bool] = lambda: False
) -> LineSpec | None:
    """The spec of the one line on this broker, or of the named one; None when `stop` said so.

    Raises:
        UsageError: there is none within `wait` seconds, there are several, or it speaks another version.
    """
    deadline = time.monotonic() + wait
    while not stop():
        retained = probe(endpoint, [topics.any_version(topics.spec(federation or "+"))], wait=1.0)
        lines = {topic: spec for topic, payload in retained.items() if (spec := _read(topic, payload))}
        if len(lines) == 1:
            return next(iter(lines.values()))
        if lines:
            names = ", ".join(sorted(spec.federation for spec in lines.values()))
            raise UsageError(f"there are several lines on {endpoint}: {names}", "choose one with --federation")
        if foreign := [topic for topic in retained if not topic.startswith(topics.ROOT + "/")]:
            raise UsageError(
                f"the line speaks protocol {'/'.join(foreign[0].split('/')[:2])}, this sensor {topics.ROOT}",
                "install the head's version of edge-node here",
            )
        if time.monotonic() > deadline:
            raise UsageError(
                f"no head of a line appeared on {endpoint} within {wait:.0f} s",
                "start edge-node line coordinate first, and check that both use the same broker and --federation",
            )
        time.sleep(_PAUSE)
    return None


def _read(topic: str, payload: bytes) -> LineSpec | None:
    """The line's spec; None for what is no line's."""
    try:
        return decode(payload, LineSpec) if topic == topics.spec(topics.federation_of(topic)) else None
    except DecodeError:
        return None
