"""Checks of the broker's access list: that it allows what we need,
and nothing that only others should do.
"""

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

from broker_config.mqtt.endpoint import PORTS, Endpoint
from broker_config.mqtt.handshake import CLOSED, MQTT5, PahoClient, handshake
from broker_config.protocol import topics
from broker_config.protocol.errors import BrokerError
from broker_config.protocol.federation_kinds import kind_of, kind_of_topic
from broker_config.security.access_list import rights
from edge.doctor.probe import CheckContext, LostError, ProbeConnection, Result

_OTHER = "somebody-else"  # a node's name
_LIST = "'Topics' in docs/protocol.md has the whole access list (mosquitto: acl_file)"
# seconds that a message may take to come back, plus five times the time for an acknowledgement
_PATIENCE = 0.3
_PLAIN = 2.0  # seconds that a broker may take to answer at the port for MQTT without TLS
_SILENT = "MQTT 3.1.1 does not say"
Answer = Literal["yes", "no", "unknown"]


def access(context: CheckContext) -> Result:
    """Whether we may write and read what our role requires."""
    needed = rights(context.name, context.federation)
    writes = _topics_in_use(context, needed.writes)
    reads = _topics_in_use(context, needed.reads)
    written = _try_writing(context, writes)
    unwritten = [topic for topic, answer in written.items() if answer == "no"]
    with context.connection("access") as connection:
        unread = connection.subscribe(*reads)
        if context.topic in writes and context.topic not in (*unwritten, *unread):
            connection.publish(context.topic, b"echo")
            context.echoes = (
                connection.wait_for(lambda each: each[:2] == (context.topic, b"echo")) is not None
            )
            unread += [] if context.echoes else [context.topic]
    refused = [
        f"{verb} {', '.join(map(_topic_kind, denied))}"
        for verb, denied in (("write", unwritten), ("read", unread))
        if denied
    ]
    if refused:
        return Result(
            "failure",
            f"{context.name} may not {'; nor '.join(refused)}",
            f"let it, in federation {context.federation!r} as in others, or say with --as which "
            f"node this is; {_LIST}",
        )
    unknown = [_topic_kind(topic) for topic, answer in written.items() if answer == "unknown"]
    text = f"{context.name} may write and read its topics"
    silent_text = f"; as to {', '.join(unknown)}, {_SILENT}" if unknown else ""
    return Result("ok", text + silent_text)


def protection(context: CheckContext) -> Result:
    """Whether we could impersonate others, and whether strangers are admitted."""
    foreign = _foreign_topics(context.federation, context.name)
    answers = {
        who: _try_writing(context, _topics_in_use(context, theirs))
        for who, theirs in foreign.items()
    }
    found = []
    for who, written in answers.items():
        if open_ := [_topic_kind(topic) for topic, answer in written.items() if answer == "yes"]:
            found.append(f"{context.name} may write what only {who} should: {', '.join(open_)}")
    remedies = [f"give each only its own topics; {_LIST}"] if found else []
    if _admits_strangers(context):
        found.insert(0, "anybody is admitted, without user name and certificate")
        remedies.insert(
            0,
            "admit nobody unknown (mosquitto: allow_anonymous false, with password_file or "
            "require_certificate true)",
        )
    if _offers_plain_mqtt(context):
        found.append(
            f"port {PORTS['mqtt']} speaks MQTT without TLS: passwords and models may travel "
            "readable"
        )
        remedies.append(f"close it (mosquitto: no listener {PORTS['mqtt']})")
    if found:
        return Result("warning", "; ".join(found), "; ".join(remedies))
    if any("unknown" in written.values() for written in answers.values()):
        return Result(
            "unknown", f"strangers are not admitted; whether others' topics are closed: {_SILENT}"
        )
    return Result(
        "ok", f"strangers are not admitted, and others' topics are closed to {context.name}"
    )


def _topics_in_use(context: CheckContext, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """The topics that federations on this broker use: those of a further kind of federation only
    where one is announced.
    """
    used = {"", *map(kind_of, context.other_specs)}
    return tuple(topic for topic in wanted if kind_of_topic(topic) in used)


def _foreign_topics(federation: str, name: str) -> dict[str, tuple[str, ...]]:
    """Topics that others write and `name` must not, by their owner."""
    others = {"the coordinator": topics.COORDINATOR, "other nodes": _OTHER}
    return {who: rights(other, federation).writes for who, other in others.items() if other != name}


def _try_writing(context: CheckContext, wanted: tuple[str, ...]) -> dict[str, Answer]:
    """Whether we may write each topic: an empty message is published, which comes back,
    or an MQTT 5 broker says so.
    """
    answers: dict[str, Answer] = {}
    for topic in (each.replace("+", _OTHER) for each in wanted):
        try:
            with context.connection("access") as connection:
                answers[topic] = _try_publishing(context, connection, topic)
        except LostError:  # how some brokers refuse
            answers[topic] = "no"
    return answers


def _try_publishing(context: CheckContext, connection: ProbeConnection, topic: str) -> Answer:
    connection.subscribe(topic)
    started = time.perf_counter()
    if connection.publish(topic, b""):
        return "no"
    if context.speaks_5:
        return "yes"
    patience = _PATIENCE + 5 * (time.perf_counter() - started)
    return "yes" if connection.wait_for(lambda each: each.topic == topic, patience) else "unknown"


def _admits_strangers(context: CheckContext) -> bool:
    """Whether the broker admits a client without credentials."""
    known = context.endpoint
    kit = context.endpoint.kit
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as ca:
        ca_or_empty = kit.ca if kit else ""
        ca.write(ca_or_empty)
        ca.flush()
        nobody = replace(
            known, username=None, password=None, cert=None, key=None, kit=None, signer=None
        )
        stranger = replace(nobody, ca=Path(ca.name)) if kit else nobody
        if stranger == known:
            return True
        try:
            context.connection("stranger", endpoint=stranger).open().close()
        except BrokerError:
            return False
    return True


def _offers_plain_mqtt(context: CheckContext) -> bool:
    """Whether the broker offers MQTT without TLS as well as with it."""
    if not context.endpoint.tls:
        return False
    plain = Endpoint("mqtt", context.endpoint.host, PORTS["mqtt"])
    client = PahoClient(plain, "", MQTT5, persistent=False)
    try:
        answer = handshake(client, plain, min(_PLAIN, context.timeout))
    except BrokerError:
        return False
    client.disconnect()
    client.release()
    return answer != CLOSED


def _topic_kind(topic: str) -> str:
    """The topic's kind: `spec`, `round`, `presence`, `up`, `want`, `chunks` and so on."""
    levels = topic.split("/")
    return levels[5] if len(levels) > 5 else levels[-1]
