"""One MQTT connection of an edge node, with the death certificate that belongs to it.

MQTT 3.1.1: DISCONNECT withdraws the will, so a death is published once, by whoever notices it
first. A lost connection is not restored: the next one needs another certificate.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from paho.mqtt import client as paho
from paho.mqtt.enums import MQTTErrorCode

from broker_config.mqtt.endpoint import Endpoint
from broker_config.mqtt.handshake import MQTT311, PahoClient, handshake, refused_error
from broker_config.protocol.errors import BrokerError
from edge_node.extensions.sparkplug.edge_node import Message

_CONNECT = 10.0  # seconds
_FLUSH = 2.0  # seconds
_KEEP_ALIVE = 20  # seconds


class Connection:
    """A connection that the broker has accepted, and its subscriptions.

    `lost` is set when it ends, whoever ends it.

    `on_message` and `on_end` are called in the connection's own thread: with each message, and when
    it has ended.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        client_id: str,
        certify: Callable[[], Message],
        filters: Sequence[tuple[str, int]],
        on_message: Callable[["Connection", str, bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        """`certify` gives the will of the CONNECT packet that is about to be sent.

        BrokerError when the broker cannot be reached, or refuses the connection or the
        subscriptions.
        """
        self.lost = threading.Event()
        self._on_host_message = on_message
        self._on_end = on_end
        self._subscribed = threading.Event()
        self._refusals: list[str] = []
        self._client = client = PahoClient(
            endpoint, client_id, MQTT311, persistent=False, reconnects=False
        )
        client.suppress_exceptions = True  # a topic that is not UTF-8 must not end paho's thread
        client.username_pw_set(endpoint.username, endpoint.password)
        self._certify = certify
        self._paho_on_socket_open = client.on_socket_open
        client.on_socket_open = self._on_socket_open
        client.on_message = self._on_message
        client.on_subscribe = self._on_subscribe
        client.on_disconnect = self._on_disconnect
        if (answer := handshake(client, endpoint, _CONNECT, _KEEP_ALIVE)) != "Success":
            raise refused_error(endpoint, answer)
        client.loop_start()
        client.subscribe(list(filters))
        if not self._subscribed.wait(_CONNECT) or self._refusals:
            self.close([])
            why = self._refusals[0].lower() if self._refusals else "no answer"
            raise BrokerError(
                f"{endpoint} refuses a subscription to Sparkplug's topics: {why}",
                "let this user read and write them: see docs/sparkplug.md",
            )

    def publish(self, message: Message) -> paho.MQTTMessageInfo:
        """Hand a message to the connection's thread;
        it is written unless the connection is lost.
        """
        return self._client.publish(message.topic, message.payload, message.qos)

    def close(self, last: Sequence[Message]) -> None:
        """Publish the last messages, wait for their acknowledgement, and disconnect;
        within seconds.
        """
        if self.lost.is_set():
            return
        infos = [self.publish(message) for message in last]
        if infos and infos[-1].rc == MQTTErrorCode.MQTT_ERR_SUCCESS:
            infos[-1].wait_for_publish(_FLUSH)
        if self._client.disconnect() == MQTTErrorCode.MQTT_ERR_SUCCESS:
            self.lost.wait(_FLUSH)
        self.lost.set()

    def _on_socket_open(self, client: paho.Client, data: object, socket: Any) -> None:
        if self._paho_on_socket_open:
            self._paho_on_socket_open(client, data, socket)
        will = self._certify()
        client.will_set(will.topic, will.payload, will.qos, retain=False)

    def _on_message(self, _client: paho.Client, _data: object, message: paho.MQTTMessage) -> None:
        self._on_host_message(self, message.topic, bytes(message.payload))

    def _on_subscribe(
        self, _client: paho.Client, _data: object, _mid: int, reasons: list[Any], _: object
    ) -> None:
        self._refusals += [str(reason) for reason in reasons if reason.is_failure]
        self._subscribed.set()

    def _on_disconnect(self, *_: object) -> None:
        self.lost.set()
        self._subscribed.set()
        self._on_end()
