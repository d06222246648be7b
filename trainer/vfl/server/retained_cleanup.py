"""Removing what a broker keeps of a line that nobody runs any more. Without torch."""

import queue
import secrets

from broker_config.mqtt.client import MqttClient, probe
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import DecodeError, decode
from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.protocol.messages import Message, Presence, Spec
from trainer.federation.server.announcements import check_unclaimed

_CONFIRMED = 10.0  # seconds for the broker


def forget(endpoint: Endpoint, federation: str) -> int:
    """Remove a line's settings, state, last prediction, and the presence of who has gone; return how many those were.

    With kits only sensors may say how they are: what they have said remains.

    Raises:
        BrokerError: the broker cannot be reached.
        UsageError: a head is connected, or there is no such line.
        EdgeNodeError: the broker did not confirm.
    """
    check_unclaimed(endpoint, federation, ())
    said = (topics.spec, topics.round_state, topics.status, topics.predictions)
    presences = topics.presence(federation, topics.COORDINATOR if endpoint.kit else "+")
    retained = probe(endpoint, [*(each(federation) for each in said), presences], wait=1.0)
    known = {topic: _read(payload) for topic, payload in retained.items() if payload}
    gone = [topic for topic, message in known.items() if not (isinstance(message, Presence) and message.online)]
    if not gone or isinstance(known.get(topics.spec(federation)), Spec):
        raise UsageError(
            f"{endpoint} keeps nothing of a line {federation!r}", "see what it knows: edge-node status; --federation"
        )
    with MqttClient(endpoint, f"forget-{secrets.token_hex(8)}", inbox=queue.Queue(), persistent=False) as mqtt:
        for topic in gone:
            mqtt.publish(topic, b"", retain=True)
        if not mqtt.flush(_CONFIRMED):
            raise EdgeNodeError(f"{endpoint} did not confirm within 10 s that it forgets the line", "try again")
    return len(gone)


def _read(payload: bytes) -> Message | None:
    """A message; None for what is none, as predictions are."""
    try:
        return decode(payload, Message)
    except DecodeError:
        return None
