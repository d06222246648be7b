"""Bridge from a region's broker to that of the federation above, as which a relay's node connects there."""

from collections.abc import Iterator
from pathlib import Path
from string import Template
from urllib.parse import urlsplit

from msgspec import Struct

from broker_config.protocol import topics
from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Name
from broker_config.security.access_list import rights
from broker_config.security.kit import Kit

_TEMPLATE = Path(__file__).parent.parent / "broker" / "mosquitto" / "bridge.conf"


class Bridge(Struct, frozen=True, kw_only=True):
    """A relay's identity at the broker above; it cannot sign the relay's messages. Its repr shows no secret."""

    federation: Name
    relay: Name  # its name there
    broker: str  # URL
    ca: str  # PEM, of that broker
    certificate: str  # PEM
    key: str  # PEM; empty: another administrator has it

    def __repr__(self) -> str:
        return f"Bridge({self.federation}, {self.relay})"


def of_kit(kit: Kit) -> Bridge:
    """The bridge of a relay's kit of the federation above.

    Raises:
        UsageError: the kit is no node's, or a mosquitto cannot reach its broker by a bridge.
    """
    if kit.name in (topics.COORDINATOR, topics.MONITOR):
        raise UsageError(f"this kit is that of {kit.name}", "take the relay's, which is a node of the federation above")
    if urlsplit(kit.broker).scheme != "mqtts":
        raise UsageError(f"mosquitto has no bridge to {kit.broker}", "take a kit whose broker is reached by mqtts://")
    return Bridge(
        federation=kit.federation,
        relay=kit.name,
        broker=kit.broker,
        ca=kit.ca,
        certificate=kit.certificate,
        key=kit.key,
    )


def configuration(bridge: Bridge, folder: Path | str) -> str:
    """The bridge's part of a region's mosquitto.conf, whose files lie in `folder` on the broker's machine."""
    url = urlsplit(bridge.broker)
    return Template(_TEMPLATE.read_text()).substitute(
        federation=bridge.federation,
        relay=bridge.relay,
        host=url.hostname,
        port=url.port or 8883,
        folder=folder,
        topics="\n".join(_topics(bridge)),
    )


def files(bridge: Bridge) -> dict[str, str]:
    """The files that it names: name -> content."""
    key = {"bridge.key": bridge.key} if bridge.key else {}
    return {"bridge-ca.pem": bridge.ca, "bridge.pem": bridge.certificate, **key}


def _topics(bridge: Bridge) -> Iterator[str]:
    """What it carries: a node's rights, chunks and requests for them at QoS 0, as clients send them."""
    given = rights(bridge.relay, bridge.federation)
    for topic in dict.fromkeys([*given.writes, *given.reads]):
        if not topics.is_vfl(topic):
            way = "both" if topic in given.writes and topic in given.reads else "out" if topic in given.writes else "in"
            yield f"topic {topic} {way} {int(topics.expected_signer(topic) is not None)}"
