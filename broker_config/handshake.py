"""One attempt at an MQTT connection, and in words why it failed."""

import os
import secrets
import socket
import ssl
import time
from typing import Any

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.reasoncodes import ReasonCode

from broker_config.endpoint import PORTS, Endpoint
from broker_config.errors import LinkError

MQTT5 = MQTTProtocolVersion.MQTTv5
MQTT311 = MQTTProtocolVersion.MQTTv311
CLOSED = "closed the connection without an answer"


class Client(paho.Client):
    """paho's client, with two things set right.

    Its WebSocket reports a partly written packet as 0 bytes, which it takes for "done": the packet would be lost. And
    Nagle's algorithm would hold small messages back for up to 40 ms.
    """

    answer = ""  # of the broker to the latest CONNECT, in MQTT's words

    def __init__(self, endpoint: Endpoint, client_id: str, version: MQTTProtocolVersion, persistent: bool):
        super().__init__(
            CallbackAPIVersion.VERSION2,
            client_id,
            clean_session=None if version == MQTT5 else not persistent,
            protocol=version,
            transport="websockets" if endpoint.websocket else "tcp",
            manual_ack=persistent,
        )
        if endpoint.tls:
            self.tls_set_context(endpoint.tls_context())
        if endpoint.websocket:
            self.ws_set_options(endpoint.path)
        self.on_socket_open = _send_at_once
        self.on_connect = self._note_answer

    def _note_answer(self, _client: object, _data: object, _flags: object, reason: ReasonCode, _: object) -> None:
        self.answer = reason.getName()

    def _sock_send(self, buf: bytes | bytearray) -> int:
        sent = super()._sock_send(buf)
        if buf and not sent:
            raise BlockingIOError
        return sent


def _send_at_once(_client: paho.Client, _data: object, sock: Any) -> None:
    with socket.socket(fileno=os.dup(sock.fileno())) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def handshake(client: Client, endpoint: Endpoint, timeout: float, keepalive: int = 60, **options: Any) -> str:
    """Connect `client`, whose `on_connect` notes the `answer`; return that, LinkError if there is none in `timeout` s.

    Runs in the caller's thread; `options` are those of paho's `connect`.
    """
    deadline = time.monotonic() + timeout
    client.answer = ""
    client.connect_timeout = timeout
    try:
        client.connect(endpoint.host, endpoint.port, keepalive, **options)
    except ConnectionResetError:
        return CLOSED
    except OSError as error:
        raise unreachable(endpoint, error, timeout) from None
    while not client.answer:
        if time.monotonic() > deadline:
            raise unreachable(endpoint, TimeoutError(), timeout)
        if client.loop(0.1) != MQTTErrorCode.MQTT_ERR_SUCCESS:
            return client.answer or CLOSED
    return client.answer


def newest_version(endpoint: Endpoint, timeout: float) -> MQTTProtocolVersion:
    """Return MQTT 5 if the broker speaks it, else 3.1.1.

    Asked with a CONNECT that is empty, but for the version: an old broker misreads MQTT 5's properties or what follows
    them as lengths and may wait for ever. One that wants credentials refuses, in the version that it speaks.
    """
    client = Client(endpoint, f"version-{secrets.token_hex(8)}", MQTT5, persistent=False)
    answer = handshake(client, endpoint, timeout)
    client.disconnect()
    return MQTT311 if answer in ("Unsupported protocol version", CLOSED) else MQTT5


def unreachable(endpoint: Endpoint, error: OSError, timeout: float) -> LinkError:
    """Say why no connection to the broker came about within `timeout` seconds."""
    place = f"{endpoint.host}:{endpoint.port}"
    match error:
        case socket.gaierror():
            what, remedy = f"the host name {endpoint.host} is unknown", "check its spelling and this machine's DNS"
        case ConnectionRefusedError():
            what, remedy = f"nothing listens at {place}: connection refused", "start the broker, or correct the port"
        case TimeoutError():
            what, remedy = f"no answer from {place} within {timeout:g} s", "check address, scheme, network and firewall"
        case ssl.SSLCertVerificationError():
            what = f"the certificate of {place} is not trusted: {error.verify_message}"
            remedy = "give the CA certificate that signed it (--ca), and the host name that it was made for"
        case ssl.SSLError():
            what = f"no TLS connection to {place}: {error.reason or error}"
            remedy = "check that this is the port for TLS; without TLS the scheme is mqtt:// or ws://"
        case paho.WebsocketConnectionError():
            what = f"no WebSocket at {place}{endpoint.path}: {error}"
            remedy = "check port and path; without WebSockets the scheme is mqtt:// or mqtts://"
        case _:
            what, remedy = f"no connection to {place}: {error}", "check address, network and firewall"
    return LinkError(what, remedy)


def refused(endpoint: Endpoint, answer: str) -> LinkError:
    """Say what to do about a broker that answered with other than success."""
    match answer:
        case "Bad user name or password" | "Not authorized":
            remedy = "check user name and password (EDGE_NODE_PASSWORD), or ask who runs the broker to admit them"
        case "Client identifier not valid":
            remedy = "ask who runs the broker which names it admits"
        case "Server unavailable" | "Server busy" | "Quota exceeded" | "Connection rate exceeded":
            remedy = "try again later"
        case _:
            remedy = f"check that scheme and port belong together ({', '.join(f'{s} {p}' for s, p in PORTS.items())})"
            remedy += " and whether the broker demands a certificate (--cert, --key)"
    return LinkError(f"the broker {endpoint} did not let us in: {answer.lower()}", remedy)
