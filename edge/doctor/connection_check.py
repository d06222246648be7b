"""The way to the broker: its address, its port, its certificate, and whether it lets us in."""

import ipaddress
import socket
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress

from broker_config.mqtt.client import probe
from broker_config.mqtt.handshake import VERIFY, newest_version, unreachable
from broker_config.protocol import topics
from broker_config.protocol.codec import DecodeError, decode
from broker_config.protocol.messages import Message, Spec
from broker_config.protocol.vfl_messages import VflSpec
from edge.doctor.check_context import Trial
from edge.doctor.result import Found
from edge.terminal.formatting import EXPIRY_WARNING, pluralize

PRODUCT = "$SYS/broker/version"
PRODUCT_WAIT = 0.3  # seconds


def address(trial: Trial) -> Found:
    """Whether the host's name leads to an address."""
    endpoint = trial.endpoint
    started = time.perf_counter()
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise unreachable(endpoint, error, trial.timeout) from None
    took = time.perf_counter() - started
    addresses = ", ".join(dict.fromkeys(str(each[4][0]) for each in found))
    return Found("ok", addresses, figures={"milliseconds": _milliseconds(took)})


def connection(trial: Trial) -> Found:
    """Whether somebody listens at the port."""
    started = time.perf_counter()
    with _connect(trial) as sock:
        took = time.perf_counter() - started
        peer = sock.getpeername()
    figures = {"milliseconds": _milliseconds(took)}
    return Found("ok", f"{peer[0]}, port {peer[1]}, answers in {_milliseconds(took):g} ms", figures=figures)


def encryption(trial: Trial) -> Found:
    """Whether TLS comes about with a certificate that is trusted, for this host, and for how long."""
    endpoint = trial.endpoint
    if not endpoint.tls:
        if _is_here(trial):
            return Found("ok", "none; nothing leaves this machine")
        secret = "the password, messages and tensors" if endpoint.password else "messages and tensors"
        return Found(
            "warning",
            f"none: {secret} travel readable",
            f"use {endpoint.scheme}s:// (mosquitto: listener 8883, certfile, keyfile)",
        )
    context = endpoint.tls_context()
    try:
        with _connect(trial) as sock, context.wrap_socket(sock, server_hostname=endpoint.host) as secure:
            certificate = secure.getpeercert() or {}  # empty only without verification
            version = secure.version()
    except ssl.SSLCertVerificationError as error:
        remedy = VERIFY.get(error.verify_code, "give the CA certificate that signed it: --ca FILE")
        return Found("failure", f"the certificate is not trusted: {error.verify_message}", remedy)
    except OSError as error:
        raise unreachable(endpoint, error, trial.timeout) from None
    return _lifetime(certificate, context, f"{version}, certificate", endpoint.host)


def _lifetime(certificate: Mapping[str, object], context: ssl.SSLContext, secure: str, host: str) -> Found:
    """Judge how long the broker's certificate, and that of the authority that issued it, are still valid."""
    issuers = [each for each in context.get_ca_certs() if each["subject"] == certificate["issuer"]]
    end = min(ssl.cert_time_to_seconds(str(each["notAfter"])) for each in (certificate, *issuers))
    days = (end - time.time()) / 86_400
    # Whole days, as `ending` counts them.
    told = f"{secure} for {host} until {time.strftime('%Y-%m-%d', time.gmtime(end))}: {pluralize(int(days), 'day')}"
    figures = {"days_left": round(days, 1)}
    if days < EXPIRY_WARNING.days:
        return Found("warning", told, "have it, or its authority, renewed before: afterwards nobody gets in", figures)
    return Found("ok", told, figures=figures)


def login(trial: Trial) -> Found:
    """Whether the broker lets us in, and as whom."""
    trial.version = newest_version(trial.endpoint, trial.timeout)
    trial.wire("login").open().close()
    endpoint = trial.endpoint
    name = endpoint.kit.name if endpoint.kit else endpoint.username
    who = [f"as {name}"] if name else []
    who += ["with a certificate"] if endpoint.kit or endpoint.cert else []
    return Found("ok", f"admitted {' '.join(who) or 'without user name and certificate'}")


def version(trial: Trial) -> Found:
    """Which MQTT the broker speaks, whether all that we need of it, and which broker it is if it says so."""
    with trial.wire("version") as wire:
        wire.subscribe(PRODUCT)
        product = wire.find(lambda each: each.topic == PRODUCT, PRODUCT_WAIT)
        lacks = [what for what, name in (("QoS 1", "MaximumQoS"), ("wildcards", "WildcardSubscriptionAvailable"))
                 if wire.offered(name) == 0]  # fmt: skip
    told = f"MQTT {'5' if trial.speaks_5 else '3.1.1'}"
    told += f", {product.payload.decode(errors='replace')}" if product else ""
    if lacks:
        return Found("failure", f"{told}, without {' and '.join(lacks)}", "allow it (mosquitto: max_qos 2)")
    if not trial.speaks_5:
        return Found(
            "warning",
            f"{told}: it tells neither its limits nor why it drops a message",
            "use a broker that speaks MQTT 5, such as mosquitto 2; else heed the checks of packets and access here",
        )
    return Found("ok", told)


def federations(trial: Trial) -> Found:
    """Which federations are announced: what they need is what the other checks compare with."""
    if trial.endpoint.kit and not trial.endpoint.signer:
        return Found("unknown", "none can be checked without a charter that holds", "see the check charter")
    unreadable = []
    for topic, payload in probe(trial.endpoint, [topics.spec("+")], wait=min(2.0, trial.timeout)).items():
        try:
            message = decode(payload, Message)
        except DecodeError:
            unreadable.append(topics.federation_of(topic))
            continue
        match message:
            case Spec():
                trial.specs.append(message)
            case VflSpec():
                trial.lines.append(message)
            case _:
                unreadable.append(topics.federation_of(topic))
    if unreadable:
        return Found(
            "warning",
            f"the spec of {', '.join(unreadable)} cannot be read",
            "install the coordinator's version of edge-node here",
        )
    told = [f"{each.federation} ({each.model}, {each.nodes} nodes)" for each in trial.specs]
    told += [f"{each.federation} (a line of {pluralize(len(each.sensors), 'sensor')})" for each in trial.lines]
    largest = f"; a model is {trial.model_bytes / 1e6:.1f} MB at most" if trial.specs else ""
    return Found("ok", ", ".join(told) + largest if told else "none is announced here yet")


def _connect(trial: Trial) -> socket.socket:
    try:
        return socket.create_connection((trial.endpoint.host, trial.endpoint.port), trial.timeout)
    except OSError as error:
        raise unreachable(trial.endpoint, error, trial.timeout) from None


def _is_here(trial: Trial) -> bool:
    with _connect(trial) as sock, suppress(ValueError):
        return ipaddress.ip_address(sock.getpeername()[0]).is_loopback
    return False


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 2)
