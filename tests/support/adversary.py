"""Adversary that runs the broker, as it were: it sees all that is said in a federation,
and says what it likes.
"""

import queue
import secrets
import threading

from broker_config.mqtt.client import LARGEST_PACKET, Delivery, MqttClient
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import ENVELOPE_HEADER, encode
from broker_config.protocol.messages import AnyMessage
from tests.support.waiting import wait_until


class Adversary:
    """Runs the broker, as it were: sees all that is said in a federation,
    and says what it likes.
    """

    def __init__(self, broker: Endpoint, federation: str):
        self.federation = federation
        self.seen: list[Delivery] = []
        self._inbox: queue.Queue[object] = queue.Queue()
        self._mqtt = MqttClient(
            broker, f"adversary-{secrets.token_hex(4)}", inbox=self._inbox, persistent=False
        )
        self._mqtt.max_payload = LARGEST_PACKET
        self._mqtt.subscribe(f"{topics.ROOT}/{federation}/#")
        self._mqtt.open()
        self._acts = True
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def say(
        self, topic: str, payload: bytes | AnyMessage, *, retain: bool = False, qos: int = 1
    ) -> None:
        self._mqtt.publish(
            topic,
            payload if isinstance(payload, bytes) else encode(payload),
            retain=retain,
            qos=qos,
        )

    def wait_for(self, topic: str) -> Delivery:
        """The first message on a topic, as soon as it has come here too."""
        found = wait_until(lambda: [each for each in [*self.seen] if each.topic == topic])
        return found[0]

    def close(self) -> list[Delivery]:
        self._acts = False
        self._thread.join()
        self._mqtt.close()
        return self.seen

    def _run(self) -> None:
        said = set[bytes]()
        while self._acts:
            try:
                event = self._inbox.get(timeout=0.05)
            except queue.Empty:
                continue
            if (
                isinstance(event, Delivery)
                and self.hears(event.topic)
                and event.payload not in said
            ):
                self.seen.append(event)
                said |= {event.payload, event.payload[ENVELOPE_HEADER:]}
                self.attack(event)

    def hears(self, topic: str) -> bool:
        """Whether it minds what is said on this topic."""
        return topics.expected_signer(topic) is not None

    def attack(self, seen: Delivery) -> None:
        """Only listens."""
