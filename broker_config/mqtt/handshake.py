"""One attempt at an MQTT connection, and an error that says why it failed."""

import errno
import os
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, Literal

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.reasoncodes import ReasonCode

from broker_config.mqtt.endpoint import PORTS, Endpoint
from broker_config.protocol.errors import BrokerAwayError, BrokerError, BrokerFullError

MQTT5 = MQTTProtocolVersion.MQTTv5
MQTT311 = MQTTProtocolVersion.MQTTv311
VERIFY = {  # OpenSSL's codes of what is wrong with the broker's certificate -> remedy
    9: (
        "it is not valid yet: set this machine's clock, or the broker's when it made the "
        "certificate"
    ),
    10: "have the certificate renewed; if it should still be valid, set this machine's clock",
    62: "use the host name that the certificate was made for, or have one made for this name",
    64: "use the host name that the certificate was made for, or have one made for this address",
}
CLOSED = "closed the connection without an answer"
_NEW_KIT = "ask whoever provisions the federation for a new kit"
# the end of TLS's word for what is wrong with our certificate -> that in English, remedy
_ALERTS = {
    "CERTIFICATE_REVOKED": ("it was revoked", _NEW_KIT),
    "CERTIFICATE_EXPIRED": (
        "it has expired",
        f"{_NEW_KIT}; if it should still be valid, set the broker's clock",
    ),
    "UNKNOWN_CA": (
        "another authority has issued it",
        "take the kit, or certificate, of this broker's federation",
    ),
    "UNSUPPORTED_CERTIFICATE": (
        "it is not one of a client",
        "take that of a member: its key usage must allow it",
    ),
    "CERTIFICATE_REQUIRED": (
        "there is none",
        "give the kit (--kit), or certificate and key (--cert, --key)",
    ),
}


class PahoClient(paho.Client):
    """paho's client with six corrections.

    - Its WebSocket reports a partly written packet as 0 bytes, which it takes for "done": the
      packet would be lost.
    - Nagle's algorithm would hold small messages back for up to 40 ms.
    - It hides why TLS 1.3 ended a connection: the broker checks our certificate when we already
      count as connected.
    - It leaves writing to its own thread: waking that takes longer than writing, most of all where
      cores are few.
    - It reconnects without asking whether it may.
    - It leaves closing the sockets of a client that has ended to the garbage collector, which may
      take hours.
    """

    answer = ""  # of the broker to the last CONNECT, in MQTT's words
    alert: ssl.SSLError | None = None  # with which the broker ended the connection instead
    # asked before; whoever says no has disconnected this client
    may_reconnect: Callable[[], bool] | None = None

    def __init__(
        self,
        endpoint: Endpoint,
        client_id: str,
        version: MQTTProtocolVersion,
        persistent: bool,
        *,
        reconnects: bool = True,
    ):
        clean_session = None if version == MQTT5 else not persistent
        transport: Literal["tcp", "websockets"] = "websockets" if endpoint.websocket else "tcp"
        super().__init__(
            CallbackAPIVersion.VERSION2,
            client_id,
            clean_session=clean_session,
            protocol=version,
            transport=transport,
            manual_ack=persistent,
            reconnect_on_failure=reconnects,
        )
        if endpoint.tls:
            self.tls_set_context(endpoint.tls_context())
        if endpoint.websocket:
            self.ws_set_options(endpoint.path)
        self._writing = threading.Lock()  # packets go out whole, one after the other
        self._using = threading.Lock()  # a TLS or WebSocket connection is one thread's at a time
        self.on_socket_open = _send_at_once
        self.on_connect = self._note_answer

    def reconnect(self) -> MQTTErrorCode:
        """Connect, for the first time or again, unless we may not."""
        if self.may_reconnect and not self.may_reconnect():
            return MQTTErrorCode.MQTT_ERR_NO_CONN
        return super().reconnect()

    def release(self) -> None:
        """Close what is open, for a client that will not be used again."""
        self._reset_sockets()

    def _thread_main(self) -> None:
        try:
            super()._thread_main()
        finally:
            self.release()

    def _note_answer(
        self, _client: object, _data: object, _flags: object, reason: ReasonCode, _: object
    ) -> None:
        self.answer = reason.getName()

    def _packet_queue(
        self,
        command: int,
        packet: bytes | bytearray,
        mid: int,
        qos: int,
        info: paho.MQTTMessageInfo | None = None,
    ) -> MQTTErrorCode:
        """Write a QoS 0 message now, unless the socket has no room: then paho's thread does it."""
        ours = self._thread is not None and threading.current_thread() is not self._thread
        if (
            (command & 0xF0) == paho.PUBLISH
            and not qos
            and ours
            and self.is_connected()
            and not self._out_packet
        ):
            self._out_packet.append(
                {
                    "command": command,
                    "mid": mid,
                    "qos": qos,
                    "pos": 0,
                    "to_process": len(packet),
                    "packet": packet,
                    "info": info,
                }
            )
            if self._packet_write() == MQTTErrorCode.MQTT_ERR_SUCCESS:
                return MQTTErrorCode.MQTT_ERR_SUCCESS
            self._wake()
            return MQTTErrorCode.MQTT_ERR_SUCCESS
        try:
            return super()._packet_queue(command, packet, mid, qos, info)
        except OSError:  # its thread has just ended, and cannot be woken
            return MQTTErrorCode.MQTT_ERR_NO_CONN

    @property
    def on_publish(self) -> paho.CallbackOnPublish | None:
        """The callback, for paho's thread alone: another thread that writes must not wait for
        that one's work.
        """
        return self._on_publish if threading.current_thread() is self._thread else None

    @on_publish.setter
    def on_publish(self, func: paho.CallbackOnPublish | None) -> None:
        self._on_publish = func

    def _wake(self) -> None:
        if self._sockpairW is not None:
            with suppress(OSError):  # it is awake, or has just ended
                self._sockpairW.send(b"0")

    def _packet_write(self) -> MQTTErrorCode:
        with self._writing:
            return super()._packet_write()

    def _sock_recv(self, bufsize: int) -> bytes:
        try:
            with self._using:
                return super()._sock_recv(bufsize)
        except ssl.SSLError as error:
            self.alert = error
            raise

    def _sock_send(self, buf: bytes | bytearray) -> int:
        try:
            with self._using:
                sent = super()._sock_send(buf)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError):
            # the connection was closed while we wrote: its last word may say why
            with suppress(OSError):
                self._sock_recv(1)
            raise
        if buf and not sent:
            raise BlockingIOError
        return sent


def _send_at_once(_client: paho.Client, _data: object, sock: Any) -> None:
    with socket.socket(fileno=os.dup(sock.fileno())) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def handshake(
    client: PahoClient, endpoint: Endpoint, timeout: float, keepalive: int = 60, **options: Any
) -> str:
    """Connect `client`, whose `on_connect` notes the `answer`; return that,
    BrokerError if none within `timeout` s.

    Runs in the caller's thread; `options` are those of paho's `connect`. A client that was not let
    in is released.
    """
    with ExitStack() as unless_let_in:
        unless_let_in.callback(client.release)
        deadline = time.monotonic() + timeout
        client.answer = ""
        client.alert = None
        client.connect_timeout = timeout
        try:
            client.connect(endpoint.host, endpoint.port, keepalive, **options)
        except ConnectionResetError:
            return CLOSED
        except OSError as error:
            raise unreachable_error(endpoint, error, timeout) from None
        while not client.answer:
            if time.monotonic() > deadline:
                raise unreachable_error(endpoint, TimeoutError(), timeout)
            if client.loop(0.1) != MQTTErrorCode.MQTT_ERR_SUCCESS:
                if client.alert:
                    raise unreachable_error(endpoint, client.alert, timeout)
                return client.answer or CLOSED
        if client.answer == "Success":
            unless_let_in.pop_all()
        return client.answer


def newest_version(endpoint: Endpoint, timeout: float) -> MQTTProtocolVersion:
    """Return MQTT 5 if the broker speaks it, else 3.1.1.

    Asked with a CONNECT that is empty, but for the version: an old broker misreads MQTT 5's
    properties or what follows them as lengths and may wait for ever. One that wants credentials
    refuses, in the version that it speaks.
    """
    client = PahoClient(endpoint, f"version-{secrets.token_hex(8)}", MQTT5, persistent=False)
    answer = handshake(client, endpoint, timeout)
    client.disconnect()
    client.release()
    return MQTT311 if answer in ("Unsupported protocol version", CLOSED) else MQTT5


def unreachable_error(endpoint: Endpoint, error: OSError, timeout: float) -> BrokerError:
    """The error that says why there was no connection to the broker within `timeout` seconds."""
    place = f"{endpoint.host}:{endpoint.port}"
    match error:
        case socket.gaierror():
            what = f"the host name {endpoint.host} is unknown"
            remedy = "check its spelling and this machine's DNS"
        case ConnectionRefusedError():
            what = f"nothing listens at {place}: connection refused"
            remedy = "start the broker, or correct the port"
        case TimeoutError():
            what = f"no answer from {place} within {timeout:g} s"
            remedy = "check address, scheme, network and firewall"
        case ssl.SSLCertVerificationError():
            what = f"the certificate of {place} is not trusted: {error.verify_message}"
            remedy = VERIFY.get(error.verify_code, "")
            if not remedy and endpoint.kit:
                remedy = "this is not the broker of the kit's federation: check the address"
            elif not remedy:
                remedy = (
                    "give the CA certificate that signed it (--ca FILE), or this member's kit "
                    "(--kit FILE), which holds it; and the host name that it "
                    "was made for"
                )
        # Scheme and port of a kit are right. Which of the two comes depends on Python's patch
        # release.
        case ssl.SSLEOFError() | ssl.SSLZeroReturnError() if endpoint.kit:
            return _full_error(endpoint)
        case ssl.SSLError() if fault := certificate_fault(error):
            what = f"{place} does not accept our certificate: {fault[0]}"
            remedy = fault[1]
        case ssl.SSLError():
            what = f"no TLS connection to {place}: {error.reason or error}"
            remedy = (
                "check that this is the port for TLS; without TLS the scheme is mqtt:// or ws://"
            )
        case paho.WebsocketConnectionError():
            what = f"no WebSocket at {place}{endpoint.path}: {error}"
            remedy = "check port and path; without WebSockets the scheme is mqtt:// or mqtts://"
        case _:
            what = f"no connection to {place}: {error}"
            remedy = "check address, network and firewall"
    if isinstance(error, (ConnectionRefusedError, TimeoutError)) or error.errno in (
        errno.ENETUNREACH,
        errno.EHOSTUNREACH,
    ):
        return BrokerAwayError(what, remedy)
    return BrokerError(what, remedy)


def _full_error(endpoint: Endpoint) -> BrokerFullError:
    return BrokerFullError(
        f"the broker {endpoint} takes no more connections",
        "find in its log which user holds them, and revoke it (edge-node provision --revoke); "
        "then restart the broker",
    )


def certificate_fault(alert: ssl.SSLError) -> tuple[str, str] | None:
    """The broker's objection to our certificate and the remedy, if its alert is about that."""
    return next((said for end, said in _ALERTS.items() if (alert.reason or "").endswith(end)), None)


def refused_error(endpoint: Endpoint, answer: str) -> BrokerError:
    """The error that says what to do about a broker that refused us."""
    match answer:
        case "Bad user name or password" | "Not authorized":
            remedy = (
                "check user name and password (EDGE_NODE_PASSWORD), or ask who runs the broker "
                "to admit them"
            )
        case "Client identifier not valid":
            remedy = "ask who runs the broker which names it admits"
        case "Server unavailable" | "Server busy" | "Quota exceeded" | "Connection rate exceeded":
            return _full_error(endpoint)
        case closed if closed == CLOSED and endpoint.kit:
            return _full_error(endpoint)
        case _:
            remedy = (
                "check that scheme and port belong together "
                f"({', '.join(f'{s} {p}' for s, p in PORTS.items())})"
            )
            remedy += " and whether the broker demands a certificate (--kit, or --cert and --key)"
    return BrokerError(f"the broker {endpoint} did not let us in: {answer.lower()}", remedy)
