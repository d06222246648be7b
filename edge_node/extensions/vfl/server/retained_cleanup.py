"""Removal of what a broker retains of a vertical federation that nobody runs any more.

Without torch.
"""

from broker_config.mqtt.client import read_retained
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import DecodeError, decode
from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.protocol.messages import Message, Presence, Spec
from edge_node.extensions.vfl import topics as vfl_topics
from trainer.federation.presence import check_no_server
from trainer.federation.server.connection import publish_retained


def remove_retained(endpoint: Endpoint, federation: str) -> int:
    """Remove the spec, state, status, last prediction, and presence of who has gone;
    return how many those were.

    With kits only sensors may publish their presence: what they have published remains.

    Raises:
        BrokerError: the broker cannot be reached.
        UsageError: a head is connected, or there is no such federation.
        EdgeNodeError: the broker did not confirm.
    """
    check_no_server(endpoint, federation)
    kinds = (topics.spec, topics.round_state, topics.status, vfl_topics.predictions)
    node = topics.COORDINATOR if endpoint.kit else "+"
    presences = topics.presence(federation, node)
    retained = read_retained(endpoint, [*(each(federation) for each in kinds), presences], wait=1.0)
    messages = {topic: _read(payload) for topic, payload in retained.items() if payload}
    gone = [
        topic
        for topic, message in messages.items()
        if not (isinstance(message, Presence) and message.online)
    ]
    if not gone or isinstance(messages.get(topics.spec(federation)), Spec):
        raise UsageError(
            f"{endpoint} keeps nothing of a vertical federation {federation!r}",
            "see what it knows: edge-node status; --federation",
        )
    if not publish_retained(endpoint, dict.fromkeys(gone, b"")):
        raise EdgeNodeError(
            f"{endpoint} did not confirm within 10 s that it has removed them", "try again"
        )
    return len(gone)


def _read(payload: bytes) -> Message | None:
    """A message; None for what is none, as predictions are."""
    try:
        return decode(payload, Message)
    except DecodeError:
        return None
