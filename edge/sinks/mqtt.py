"""Verdicts to an MQTT broker, one JSON message an image."""

import logging
import queue
import uuid
from pathlib import Path

import msgspec
from msgspec import Struct

from broker_config import topics
from broker_config.link import Endpoint, Link, LinkDown, LinkUp
from edge.verdict import Outcome

_CONNECT = 10.0  # seconds
_FLUSH = 5.0  # seconds

_log = logging.getLogger(__name__)


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="mqtt"):
    """`[[sinks]] kind = "mqtt"`: one JSON message an image."""

    url: str
    ca: str | None = None
    cert: str | None = None
    key: str | None = None


def endpoint(settings: Settings) -> Endpoint:
    """The broker that they name; UsageError when they do not go together."""
    ca, cert, key = (Path(each) if each else None for each in (settings.ca, settings.cert, settings.key))
    return Endpoint.parse(settings.url, ca=ca, cert=cert, key=key)


class Mqtt:
    """Publishes to `topics.verdicts(line)`, QoS 1. While the broker is away, a bounded number of verdicts waits."""

    def __init__(self, endpoint: Endpoint, line: str) -> None:
        """Connect; LinkError when the broker does not let us in, UsageError for a name that no topic can hold."""
        self._topic = topics.verdicts(topics.check_name(line, "the line's name"))
        self._events: queue.Queue[LinkUp | LinkDown] = queue.Queue()
        client_id = f"edge-node-line-{uuid.uuid4().hex[:8]}"
        self._link = Link(endpoint, client_id, inbox=self._events, persistent=False).open(_CONNECT)

    def send(self, outcome: Outcome) -> None:
        """Hand an outcome to the connection's own thread; LinkError when too many wait for the broker already."""
        while not self._events.empty():
            _log.info("%s", self._events.get())
        self._link.publish(self._topic, msgspec.json.encode(outcome), qos=1)

    def close(self) -> None:
        """Wait for the broker to acknowledge what it has not yet, unless it is away; then disconnect."""
        if not (self._link.connected and self._link.flush(_FLUSH)):
            _log.error("the broker is away: the last verdicts may not have reached it")
        self._link.close()
