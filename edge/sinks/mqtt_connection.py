"""Connection of a sink to an MQTT broker.

It never reconnects: what to repeat is the sink's decision.
"""

import logging
import threading
from collections.abc import Sequence
from typing import Any

from paho.mqtt import client as paho
from paho.mqtt.reasoncodes import ReasonCode

from broker_config.mqtt.client import PACKET_OVERHEAD
from broker_config.mqtt.endpoint import Endpoint
from broker_config.mqtt.handshake import MQTT5, PahoClient, handshake, newest_version, refused_error
from broker_config.protocol.errors import EdgeNodeError
from edge.sinks.sink import SinkDown

_CONNECT = 10.0  # seconds
_ACKNOWLEDGED = 20.0  # seconds without an acknowledgement after which a connection counts as dead
_RETAINED = 1.0  # seconds for a retained message, after the broker has taken the subscription
_KEEPALIVE = 15  # seconds
IN_FLIGHT = 20  # messages that wait for their acknowledgement

_log = logging.getLogger(__name__)


class Connection:
    """A clean session. The broker ends an older connection of the same client id."""

    def __init__(
        self, endpoint: Endpoint, client_id: str, will: tuple[str, bytes] | None = None
    ) -> None:
        """Connect, with MQTT 5 if the broker can; SinkDown when that is not possible.

        The will is retained, QoS 1.
        """
        self._endpoint = endpoint
        self._changed = threading.Condition()
        self._answers: dict[int, ReasonCode] = {}  # to what was published, by message id
        self._retained: bytes | None = None
        self._subscribed: ReasonCode | None = None
        self._max_packet = 0  # bytes; 0 is any
        self.lost = ""  # why the connection has ended
        try:
            self._client = self._connect(client_id, will)
        except EdgeNodeError as error:
            raise SinkDown(error.what) from error

    def publish(self, topic: str, payloads: Sequence[bytes]) -> list[str]:
        """Publish messages in order, retained, QoS 1; the broker's answers,
        each empty or the reason of a refusal.

        After a refusal only those already sent are answered. A lost connection answers fewer, too.
        """
        mids: list[int] = []
        answers: list[str] = []
        refused_error = False
        while True:
            while not refused_error and len(mids) < min(len(payloads), len(answers) + IN_FLIGHT):
                mids.append(
                    self._client.publish(topic, payloads[len(mids)], qos=1, retain=True).mid
                )
            if len(answers) == len(mids):
                return answers
            answer = self._answer(mids[len(answers)])
            if answer is None:
                self.close("the broker does not acknowledge")
                return answers
            refused_error = refused_error or answer.is_failure
            refusal = f"refused: {answer}" if answer.is_failure else ""
            answers.append(refusal)

    def fits(self, topic: str, payload: bytes) -> bool:
        """Whether the broker takes a message of this size."""
        return (
            not self._max_packet
            or len(topic.encode()) + len(payload) + PACKET_OVERHEAD <= self._max_packet
        )

    def read_retained(self, topic: str) -> bytes | None:
        """The message that the broker retains on a topic."""
        self._client.on_message = self._on_message
        self._client.subscribe(topic, qos=1)
        with self._changed:
            self._changed.wait_for(lambda: self._subscribed is not None or self.lost, _CONNECT)
            if self._subscribed is None or self._subscribed.is_failure:
                _log.warning(
                    "%s does not let us read %s: after a failure some outcomes may come twice",
                    self._endpoint,
                    topic,
                )
                return None
            self._changed.wait_for(lambda: self._retained is not None or self.lost, _RETAINED)
        self._client.unsubscribe(topic)
        return self._retained

    def close(self, why: str = "closed") -> None:
        """Disconnect; the broker then does not publish the will."""
        with self._changed:
            self.lost = self.lost or why
        self._client.disconnect()
        self._client.loop_stop()

    def _answer(self, mid: int) -> ReasonCode | None:
        with self._changed:
            self._changed.wait_for(lambda: mid in self._answers or self.lost, _ACKNOWLEDGED)
            return self._answers.pop(mid, None)

    def _connect(self, client_id: str, will: tuple[str, bytes] | None) -> PahoClient:
        version = newest_version(self._endpoint, _CONNECT)
        client = PahoClient(self._endpoint, client_id, version, persistent=False, reconnects=False)
        client.suppress_exceptions = True
        client.username_pw_set(self._endpoint.username, self._endpoint.password)
        client.max_inflight_messages_set(IN_FLIGHT)
        if will:
            client.will_set(*will, qos=1, retain=True)
        client.on_connect = self._on_connect
        client.on_publish = self._on_publish
        client.on_subscribe = self._on_subscribe
        client.on_disconnect = self._on_disconnect
        more = {"clean_start": True} if version == MQTT5 else {}
        answer = handshake(client, self._endpoint, _CONNECT, _KEEPALIVE, **more)
        if answer != "Success":
            raise refused_error(self._endpoint, answer)
        client.loop_start()
        return client

    def _on_connect(
        self, client: Any, _data: object, _flags: object, reason: ReasonCode, properties: Any
    ) -> None:
        client.answer = reason.getName()
        self._max_packet = getattr(properties, "MaximumPacketSize", 0)

    def _on_publish(
        self, _client: object, _data: object, mid: int, reason: ReasonCode, _: object
    ) -> None:
        with self._changed:
            self._answers[mid] = reason
            self._changed.notify_all()

    def _on_subscribe(
        self, _client: object, _data: object, _mid: int, reasons: list[ReasonCode], _: object
    ) -> None:
        with self._changed:
            self._subscribed = reasons[0]
            self._changed.notify_all()

    def _on_message(self, _client: object, _data: object, message: paho.MQTTMessage) -> None:
        with self._changed:
            if message.retain:
                self._retained = bytes(message.payload)
            self._changed.notify_all()

    def _on_disconnect(
        self, _client: object, _data: object, _flags: object, reason: ReasonCode, _: object
    ) -> None:
        with self._changed:
            self.lost = self.lost or f"connection lost ({reason})"
            self._changed.notify_all()
