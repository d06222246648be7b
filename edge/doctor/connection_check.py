"""Checks on the way into the broker: address, port, certificates, login, version,
charter, announced federations.
"""

import ipaddress
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

from broker_config.mqtt.client import read_retained
from broker_config.mqtt.handshake import VERIFY, newest_version, unreachable_error
from broker_config.protocol import topics
from broker_config.protocol.codec import DecodeError, decode
from broker_config.protocol.federation_kinds import KINDS, kind_of
from broker_config.protocol.messages import CommonSpec, Message, Spec
from broker_config.security.kit import Kit
from broker_config.security.message_signing import MessageSigner
from edge.doctor.probe import CheckContext, Outcome, Result
from edge.terminal.formatting import EXPIRY_WARNING, format_expiry, pluralize

PRODUCT = "$SYS/broker/version"
PRODUCT_WAIT = 0.3  # seconds
_RENEW_KIT = "ask whoever provisions the federation for a new kit (edge-node provision --renew)"
_RENEW_BROKER = "have it, or its authority, renewed before: afterwards nobody gets in"


def address(context: CheckContext) -> Result:
    """Whether the host's name resolves to an address."""
    endpoint = context.endpoint
    started = time.perf_counter()
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise unreachable_error(endpoint, error, context.timeout) from None
    took = time.perf_counter() - started
    addresses = ", ".join(dict.fromkeys(str(each[4][0]) for each in found))
    return Result("ok", addresses, figures={"milliseconds": _milliseconds(took)})


def connection(context: CheckContext) -> Result:
    """Whether something listens on the port."""
    started = time.perf_counter()
    with _connect(context) as sock:
        took = time.perf_counter() - started
        peer = sock.getpeername()
    figures = {"milliseconds": _milliseconds(took)}
    return Result(
        "ok", f"{peer[0]}, port {peer[1]}, answers in {_milliseconds(took):g} ms", figures=figures
    )


def encryption(context: CheckContext) -> Result:
    """Whether the TLS certificate is trusted and for this host, and how long it is valid."""
    endpoint = context.endpoint
    if not endpoint.tls:
        if _is_local(context):
            return Result("ok", "none; nothing leaves this machine")
        secret = (
            "the password, messages and tensors" if endpoint.password else "messages and tensors"
        )
        return Result(
            "warning",
            f"none: {secret} travel readable",
            f"use {endpoint.scheme}s:// (mosquitto: listener 8883, certfile, keyfile)",
        )
    tls = endpoint.tls_context()
    try:
        with (
            _connect(context) as sock,
            tls.wrap_socket(sock, server_hostname=endpoint.host) as secure,
        ):
            certificate = secure.getpeercert() or {}  # empty only without verification
            version = secure.version()
    except ssl.SSLCertVerificationError as error:
        remedy = VERIFY.get(error.verify_code, "give the CA certificate that signed it: --ca FILE")
        return Result("failure", f"the certificate is not trusted: {error.verify_message}", remedy)
    except OSError as error:
        raise unreachable_error(endpoint, error, context.timeout) from None
    issuers = [each for each in tls.get_ca_certs() if each["subject"] == certificate["issuer"]]
    ends = [ssl.cert_time_to_seconds(str(each["notAfter"])) for each in (certificate, *issuers)]
    first = datetime.fromtimestamp(min(ends), UTC)
    return _expiry_result(f"{version}, certificate for {endpoint.host}", first, _RENEW_BROKER)


def certificate(context: CheckContext) -> Result:
    """How long the certificate in our kit is valid."""
    kit = _kit(context)
    return _expiry_result(
        f"that of {kit.name} in federation {kit.federation}", kit.expires(), _RENEW_KIT
    )


def charter(context: CheckContext) -> Result:
    """Whether the charter in our kit is valid and lists us;
    later checks verify specs against it.
    """
    signer = MessageSigner(_kit(context))
    context.endpoint = replace(context.endpoint, signer=signer)
    members = signer.members
    text = f"version {members.version}, {pluralize(len(members.nodes), 'node')}"
    return _expiry_result(text, members.expires, _RENEW_KIT)


def _expiry_result(text: str, end: datetime, remedy: str) -> Result:
    """How long what `text` describes is still valid."""
    now = datetime.now(UTC)
    left = end - now
    outcome: Outcome = "ok"
    if left < EXPIRY_WARNING:
        outcome = "warning"
    if end < now:
        outcome = "failure"
    figures = {"days_left": round(left.total_seconds() / 86_400, 1)}
    remedy_or_empty = "" if outcome == "ok" else remedy
    return Result(outcome, f"{text}, {format_expiry(end, now)}", remedy_or_empty, figures)


def _kit(context: CheckContext) -> Kit:
    assert context.endpoint.kit is not None
    return context.endpoint.kit


def login(context: CheckContext) -> Result:
    """Whether the broker admits us, and as whom."""
    context.version = newest_version(context.endpoint, context.timeout)
    context.connection("login").open().close()
    endpoint = context.endpoint
    name = endpoint.kit.name if endpoint.kit else endpoint.username
    who = [f"as {name}"] if name else []
    who += ["with a certificate"] if endpoint.kit or endpoint.cert else []
    return Result("ok", f"admitted {' '.join(who) or 'without user name and certificate'}")


def version(context: CheckContext) -> Result:
    """The broker's MQTT version, the features that it lacks,
    and its product name if it publishes one.
    """
    with context.connection("version") as connection:
        connection.subscribe(PRODUCT)
        product = connection.wait_for(lambda each: each.topic == PRODUCT, PRODUCT_WAIT)
        lacks = [
            what
            for what, name in (
                ("QoS 1", "MaximumQoS"),
                ("wildcards", "WildcardSubscriptionAvailable"),
            )
            if connection.offered(name) == 0
        ]
    version_text = "5" if context.speaks_5 else "3.1.1"
    text = f"MQTT {version_text}"
    text += f", {product.payload.decode(errors='replace')}" if product else ""
    if lacks:
        return Result(
            "failure", f"{text}, without {' and '.join(lacks)}", "allow it (mosquitto: max_qos 2)"
        )
    if not context.speaks_5:
        return Result(
            "warning",
            f"{text}: it tells neither its limits nor why it drops a message",
            "use a broker that speaks MQTT 5, such as mosquitto 2; else heed the checks of "
            "packets and access here",
        )
    return Result("ok", text)


def federations(context: CheckContext) -> Result:
    """Federations announced on this broker: other checks compare with what they need."""
    if context.endpoint.kit and not context.endpoint.signer:
        return Result(
            "unknown", "none can be checked without a charter that holds", "see the check charter"
        )
    unreadable = {}
    for topic, payload in read_retained(
        context.endpoint, [topics.spec("+")], wait=min(2.0, context.timeout)
    ).items():
        try:
            message = decode(payload, Message)
        except DecodeError as error:
            unreadable[topics.federation_of(topic)] = str(error)
            continue
        match message:
            case Spec():
                context.specs.append(message)
            case CommonSpec():
                context.other_specs.append(message)
            case _:
                unreadable[topics.federation_of(topic)] = f"it is a {type(message).__name__}"
    if unreadable:
        return Result(
            "warning",
            "; ".join(
                f"the spec of {name} cannot be read: {why}" for name, why in unreadable.items()
            ),
            "install the coordinator's version of edge-node here",
        )
    text = [f"{each.federation} ({each.model}, {each.nodes} nodes)" for each in context.specs]
    text += [
        f"{each.federation} ({KINDS[kind_of(each)].summary(each)})" for each in context.other_specs
    ]
    largest = f"; a model is {context.model_bytes / 1e6:.1f} MB at most" if context.specs else ""
    announced = ", ".join(text) + largest if text else "none is announced here yet"
    return Result("ok", announced)


def _connect(context: CheckContext) -> socket.socket:
    try:
        return socket.create_connection(
            (context.endpoint.host, context.endpoint.port), context.timeout
        )
    except OSError as error:
        raise unreachable_error(context.endpoint, error, context.timeout) from None


def _is_local(context: CheckContext) -> bool:
    with _connect(context) as sock, suppress(ValueError):
        return ipaddress.ip_address(sock.getpeername()[0]).is_loopback
    return False


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 2)
