"""What the broker lets us do: what we need, and what nobody but the others should be able to do."""

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

from broker_config.mqtt.endpoint import PORTS, Endpoint
from broker_config.mqtt.handshake import CLOSED, MQTT5, PahoClient, handshake
from broker_config.protocol import topics
from broker_config.protocol.errors import BrokerError
from broker_config.security.access_list import rights
from edge.doctor.check_context import Trial
from edge.doctor.probe_connection import LostError, Wire
from edge.doctor.result import Found

_OTHER = "somebody-else"  # a node's name
_LIST = "'Topics' in docs/protocol.md has the whole access list (mosquitto: acl_file)"
_PATIENCE = 0.3  # seconds that a message may take to come back, besides five times the way to the broker
_PLAIN = 2.0  # seconds that a broker may take to answer at the port for MQTT without TLS
_SILENT = "MQTT 3.1.1 does not say"
Answer = Literal["yes", "no", "unknown"]


def access(trial: Trial) -> Found:
    """Whether we may write and read what a node, the coordinator or a monitor must."""
    needed = rights(trial.name, trial.federation)
    writes, reads = _in_use(trial, needed.writes), _in_use(trial, needed.reads)
    written = _write(trial, writes)
    unwritten = [topic for topic, answer in written.items() if answer == "no"]
    with trial.wire("access") as wire:
        unread = wire.subscribe(*reads)
        if trial.topic in writes and trial.topic not in (*unwritten, *unread):
            wire.publish(trial.topic, b"echo")
            trial.echoes = wire.find(lambda each: each[:2] == (trial.topic, b"echo")) is not None
            unread += [] if trial.echoes else [trial.topic]
    refused = [
        f"{verb} {', '.join(map(_kind, denied))}" for verb, denied in (("write", unwritten), ("read", unread)) if denied
    ]
    if refused:
        return Found(
            "failure",
            f"{trial.name} may not {'; nor '.join(refused)}",
            f"let it, in federation {trial.federation!r} as in others, or say with --as which node this is; {_LIST}",
        )
    unknown = [_kind(topic) for topic, answer in written.items() if answer == "unknown"]
    told = f"{trial.name} may write and read its topics"
    return Found("ok", told + (f"; as to {', '.join(unknown)}, {_SILENT}" if unknown else ""))


def protection(trial: Trial) -> Found:
    """Whether we could pass for others, and whether strangers are admitted."""
    foreign = _foreign(trial.federation, trial.name)
    answers = {who: _write(trial, _in_use(trial, theirs)) for who, theirs in foreign.items()}
    found = [
        f"{trial.name} may write what only {who} should: {', '.join(open_)}"
        for who, written in answers.items()
        if (open_ := [_kind(topic) for topic, answer in written.items() if answer == "yes"])
    ]
    remedies = [f"give each only its own topics; {_LIST}"] if found else []
    if _admits_strangers(trial):
        found.insert(0, "anybody is admitted, without user name and certificate")
        remedies.insert(
            0, "admit nobody unknown (mosquitto: allow_anonymous false, with password_file or require_certificate true)"
        )
    if _speaks_openly(trial):
        found.append(f"port {PORTS['mqtt']} speaks MQTT without TLS: passwords and models may travel readable")
        remedies.append(f"close it (mosquitto: no listener {PORTS['mqtt']})")
    if found:
        return Found("warning", "; ".join(found), "; ".join(remedies))
    if any("unknown" in written.values() for written in answers.values()):
        return Found("unknown", f"strangers are not admitted; whether others' topics are closed: {_SILENT}")
    return Found("ok", f"strangers are not admitted, and others' topics are closed to {trial.name}")


def _in_use(trial: Trial, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Those that a federation on this broker uses: lines' topics only where a line is announced."""
    return tuple(topic for topic in wanted if trial.lines or not topics.is_vfl(topic))


def _foreign(federation: str, name: str) -> dict[str, tuple[str, ...]]:
    """The topics that others write, and `name` must not: whose they are -> topics."""
    others = {"the coordinator": topics.COORDINATOR, "other nodes": _OTHER}
    return {who: rights(other, federation).writes for who, other in others.items() if other != name}


def _write(trial: Trial, wanted: tuple[str, ...]) -> dict[str, Answer]:
    """Publish nothing on each topic; whether that was allowed. It is, if it comes back or an MQTT 5 broker says so."""
    answers: dict[str, Answer] = {}
    for topic in (each.replace("+", _OTHER) for each in wanted):
        try:
            with trial.wire("access") as wire:
                answers[topic] = _try(trial, wire, topic)
        except LostError:  # some brokers answer so
            answers[topic] = "no"
    return answers


def _try(trial: Trial, wire: Wire, topic: str) -> Answer:
    wire.subscribe(topic)
    started = time.perf_counter()
    if wire.publish(topic, b""):
        return "no"
    if trial.speaks_5:
        return "yes"
    patience = _PATIENCE + 5 * (time.perf_counter() - started)
    return "yes" if wire.find(lambda each: each.topic == topic, patience) else "unknown"


def _admits_strangers(trial: Trial) -> bool:
    """Whether somebody is admitted who knows no more than how to reach the broker."""
    known, kit = trial.endpoint, trial.endpoint.kit
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as ca:
        ca.write(kit.ca if kit else "")
        ca.flush()
        nobody = replace(known, username=None, password=None, cert=None, key=None, kit=None, signer=None)
        stranger = replace(nobody, ca=Path(ca.name)) if kit else nobody
        if stranger == known:
            return True
        try:
            trial.wire("stranger", endpoint=stranger).open().close()
        except BrokerError:
            return False
    return True


def _speaks_openly(trial: Trial) -> bool:
    """Whether there is MQTT without TLS beside that with TLS."""
    if not trial.endpoint.tls:
        return False
    plain = Endpoint("mqtt", trial.endpoint.host, PORTS["mqtt"])
    client = PahoClient(plain, "", MQTT5, persistent=False)
    try:
        answer = handshake(client, plain, min(_PLAIN, trial.timeout))
    except BrokerError:
        return False
    client.disconnect()
    return answer != CLOSED


def _kind(topic: str) -> str:
    """The topic's kind: `spec`, `round`, `presence`, `up`, `want`, `chunks`, `opened`, `embeddings` and so on."""
    levels = topic.split("/")
    return levels[5] if len(levels) > 5 else levels[-1]
