"""Joining a line: find it, check what it asks for, take part. Itself without torch."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from broker_config.mqtt.client import probe
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import DecodeError, decode
from broker_config.protocol.errors import BrokerError, UsageError
from broker_config.protocol.messages import Presence
from broker_config.protocol.vfl_messages import VflSpec
from edge.vfl.sensor_rows import RowFile
from trainer import progress
from trainer.federation.client.discovery import check_name_free

if TYPE_CHECKING:
    from trainer.vfl.client.sensor_trainer import Deploy

_PAUSE = 0.3  # seconds between two looks for a head


def join(
    endpoint: Endpoint,
    name: str,
    rows: RowFile,
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
        UsageError: the file cannot be used, or this sensor is none of the line.
        BrokerError: there is no line within `wait` seconds.
        EdgeNodeError: with what to do about it.
    """
    topics.check_node(name)
    rows.check()
    report(progress.Step(what=f"looking for a line on {endpoint}"))
    while True:
        spec = find_spec(endpoint, federation, wait, stop, state=state, report=report)
        if spec is None:
            return 0, False
        if name not in spec.sensors:
            raise UsageError(
                f"the line {spec.federation!r} has no sensor {name!r}", f"its sensors are {', '.join(spec.sensors)}"
            )
        check_name_free(endpoint, spec.federation, name, state)
        from trainer.vfl.client.session import NewRunError, take_part  # noqa: PLC0415  (torch takes seconds)

        try:
            return take_part(spec, name, rows, endpoint, state, report=report, stop=stop, deploying=deploying)
        except NewRunError as begun:
            report(progress.Note(text=f"the head has begun run {begun.run}: taking part in it"))


def find_spec(
    endpoint: Endpoint,
    federation: str | None,
    wait: float,
    stop: Callable[[], bool] = lambda: False,
    *,
    state: Path = Path(),
    report: progress.Report = progress.ignore,
) -> VflSpec | None:
    """The spec of the one line on this broker, or of the named one; None when `stop` said so.

    A line counts if its head is connected, if it is named, or if `state` has something of its run.

    Raises:
        UsageError: there are several, or it speaks another version.
        BrokerError: there is none within `wait` seconds.
    """
    deadline, told = time.monotonic() + wait, ""
    asked = [topics.any_version(topics.spec(federation or "+")), topics.presence(federation or "+", topics.COORDINATOR)]
    while not stop():
        retained = probe(endpoint, asked, wait=1.0)
        lines = {spec.federation: spec for topic, payload in retained.items() if (spec := _read(topic, payload))}
        counted = {
            name: spec
            for name, spec in lines.items()
            if federation or _attended(retained, name) or (state / spec.run).exists()
        }
        if len(counted) == 1:
            return next(iter(counted.values()))
        if counted:
            names = ", ".join(sorted(counted))
            raise UsageError(f"there are several lines on {endpoint}: {names}", "choose one with --federation")
        foreign = [topic for topic in retained if topic.endswith("/spec") and not topic.startswith(topics.ROOT + "/")]
        if foreign:
            raise UsageError(
                f"the line speaks protocol {'/'.join(foreign[0].split('/')[:2])}, this sensor {topics.ROOT}",
                "install the head's version of edge-node here",
            )
        names = ", ".join(sorted(lines))
        if names and names != told:
            report(progress.Note(text=f"no head is connected for {names}; waiting for one"))
        told = names
        if time.monotonic() > deadline:
            raise BrokerError(
                f"no head of a line appeared on {endpoint} within {wait:.0f} s",
                "start edge-node vfl coordinate first, and check that both use the same broker and --federation",
            )
        time.sleep(_PAUSE)
    return None


def _attended(retained: Mapping[str, bytes], federation: str) -> bool:
    """Whether a line's head is connected."""
    try:
        return decode(retained.get(topics.presence(federation, topics.COORDINATOR), b""), Presence).online
    except DecodeError:
        return False


def _read(topic: str, payload: bytes) -> VflSpec | None:
    """The line's spec; None for what is no line's."""
    try:
        return decode(payload, VflSpec) if topic == topics.spec(topics.federation_of(topic)) else None
    except DecodeError:
        return None
