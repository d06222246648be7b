"""Presence of a federation's server and members, as the broker retains it: who is connected under which name."""

import contextlib
from collections.abc import Collection

from broker_config.mqtt.client import Endpoint, read_retained
from broker_config.protocol import topics
from broker_config.protocol.codec import DecodeError, decode
from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Presence


def decode_presence(payload: bytes) -> Presence | None:
    """The presence in a retained message; None for what cannot be read, which is nobody's: ours will replace it."""
    with contextlib.suppress(DecodeError):
        return decode(payload, Presence)
    return None


def find_connected(endpoint: Endpoint, federation: str, name: str) -> Presence | None:
    """The presence of who is connected under this name; None if nobody is. BrokerError if there is no broker."""
    topic = topics.presence(federation, name)
    presence = decode_presence(read_retained(endpoint, [topic], wait=1.0).get(topic, b""))
    return presence if presence and presence.online else None


def check_no_server(endpoint: Endpoint, federation: str, own_sessions: Collection[str] = ()) -> None:
    """Raise UsageError if a coordinator or head is connected whose session is none of our own."""
    presence = find_connected(endpoint, federation, topics.COORDINATOR)
    if presence and presence.session not in own_sessions:
        raise another_server(endpoint, federation)


def another_server(endpoint: Endpoint, federation: str) -> UsageError:
    """The error for a second server of one federation."""
    return UsageError(
        f"federation {federation!r} already has a coordinator on {endpoint}",
        "stop that one, or choose another name with --federation (after a crash the broker notices within a minute)",
    )
