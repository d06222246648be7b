"""MQTT client around paho: MQTT 5 with fallback to 3.1.1, TLS, reconnection,
acknowledgement, signatures, encryption.

Callbacks run in paho's thread and only put events into the owner's inbox.
"""

import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, Literal, NamedTuple, Self

from paho.mqtt import client as paho
from paho.mqtt.enums import MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from broker_config.mqtt.collision import TAKEN_OVER, Claim, CollisionDetector, decode_presence
from broker_config.mqtt.endpoint import Endpoint
from broker_config.mqtt.handshake import (
    MQTT5,
    MQTT311,
    PahoClient,
    certificate_fault,
    handshake,
    newest_version,
    refused_error,
)
from broker_config.protocol.codec import ENCRYPTION_OVERHEAD, ENVELOPE_HEADER, MAX_MESSAGE
from broker_config.protocol.errors import BrokerError, EdgeNodeError, abbreviate

__all__ = [
    "Claim",
    "Connected",
    "Delivery",
    "Disconnected",
    "Endpoint",
    "MqttClient",
    "TakenOver",
    "is_name_taken",
    "read_retained",
]

log = logging.getLogger(__name__)

SESSION_EXPIRY = 24 * 3600  # seconds that the broker keeps a persistent session
# bytes that we accept (MQTT 5): the largest chunk and its header
LARGEST_PACKET = (1 << 24) + (1 << 16)
PACKET_OVERHEAD = 16  # bytes of a PUBLISH besides topic and payload, at most
QUEUED_PUBLISHES = 1000  # QoS 1 messages that wait for the broker
QUIET = 0.2  # seconds without a retained message after which no more are expected
ANSWER = 2.0  # seconds for whoever has a name to say so
_ASKING = 5.0  # seconds to reach the broker with that question before a connection is made anew


class Delivery(NamedTuple):
    """A message that arrived.

    `connection` counts the client's connections: `mid` is valid in that one only.
    """

    client: "MqttClient"
    topic: str
    payload: bytes
    retain: bool
    mid: int
    qos: int
    connection: int = 0
    repeated: bool = False  # the broker may have sent it before, since it had no acknowledgement
    user: tuple[tuple[str, str], ...] = ()  # its user properties (MQTT 5)


class Connected(NamedTuple):
    """The client is connected, for the first time or again;
    its subscriptions have been requested.
    """

    client: "MqttClient"


class Disconnected(NamedTuple):
    """The client lost its connection and tries to get it back."""

    client: "MqttClient"
    reason: str


class TakenOver(NamedTuple):
    """The client lost its connection to another process that goes by its name.

    One with a claim has given it up.
    """

    client: "MqttClient"


class MqttClient:
    """One MQTT connection; what happens on it is put into `inbox` as Delivery,
    Connected, Disconnected and TakenOver.

    A persistent client keeps its session at the broker for a day and acknowledges QoS 1 only when
    told to by `ack`. When the inbox is full, QoS 0 is dropped; QoS 1 waits, and the broker with it.
    A payload of more than `max_payload` bytes is cut to one byte more: enough to be refused for it,
    and too little to fill the memory while it waits.

    Messages on topics that were not subscribed to are ignored, whatever the broker sends: what a
    process does with a message depends on its topic, and so does who must have signed it. What a
    broker has kept for a persistent client arrives as soon as that connects: subscribe before
    `open`.

    With a signer in `endpoint` all messages of its federation are signed and verified here, and
    nowhere else; with an encryption what is confidential is encrypted and decrypted here: whoever
    uses a client knows blobs by their digests, and the broker by other numbers. Who has a signer
    alone reads the open part of what is encrypted.

    A broker keeps only one connection under a client id, so two processes of one name would take it
    from each other for ever. With a `claim`, whose offline presence is the will, a client answers
    whoever asks for its name, and asks before it connects again: who comes back and finds another
    there gives way.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        client_id: str,
        *,
        inbox: queue.Queue[Any],
        persistent: bool,
        claim: Claim | None = None,
        keepalive: int = 20,
    ):
        self.endpoint = endpoint
        self.max_packet: int | None = None  # bytes, as far as the broker tells (MQTT 5)
        self.max_payload = MAX_MESSAGE
        # QoS 1 messages that may wait for our acknowledgement (MQTT 5)
        self.receive_maximum: int | None = None
        self.version: Literal[5, 4] = 4  # of MQTT; 4 is 3.1.1
        signer = endpoint.signer
        # Whoever connects under our client id disconnects us: members must not be able to guess
        # each other's.
        self._client_id = (
            f"{client_id}/{signer.derive_secret(client_id)}" if signer and client_id else client_id
        )
        self._inbox = inbox
        self._persistent = persistent
        self._claim = claim
        self._collisions = CollisionDetector()
        # our presence has come back on this connection: what came before is old
        self._claim_stands = False
        self._keepalive = keepalive
        self._paho = self._make_paho(MQTT311)
        self._filters: dict[str, int] = {claim.topic: 1} if claim else {}
        # topics as the broker knows them -> those of `_filters`, where they differ
        self._hidden: dict[str, str] = {}
        self._connection = 0
        # of _connection, _unacknowledged, _unwritten, and while _hidden is replaced
        self._lock = threading.Lock()
        self._unacknowledged: deque[paho.MQTTMessageInfo] = deque()
        self._unwritten: deque[tuple[paho.MQTTMessageInfo, int]] = deque()
        self._closing = threading.Event()
        self._disconnected = threading.Event()
        self._subscribed = threading.Event()
        self._subscription_refused = ""
        self._certificate_rejected = False  # since we were last connected

    def open(self, timeout: float = 10.0) -> Self:
        """Connect, with MQTT 5 if the broker can; BrokerError says why that fails or takes more
        than `timeout` s.
        """
        version = newest_version(self.endpoint, timeout)
        options: dict[str, Any] = {}
        if version == MQTT5:
            self.version = 5
            options["clean_start"] = not self._persistent
            properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            options["properties"] = properties
            properties.MaximumPacketSize = max(LARGEST_PACKET, self.max_payload + MAX_MESSAGE)
            if self.receive_maximum:
                properties.ReceiveMaximum = self.receive_maximum
            if self._persistent:
                properties.SessionExpiryInterval = SESSION_EXPIRY
        self._paho = self._make_paho(version)
        answer = handshake(self._paho, self.endpoint, timeout, self._keepalive, **options)
        if answer != "Success":
            raise refused_error(self.endpoint, answer)
        if self._claim:
            self._paho.may_reconnect = self._is_name_ours
        self._paho.loop_start()
        return self

    def _make_paho(self, version: MQTTProtocolVersion) -> PahoClient:
        paho_client = PahoClient(self.endpoint, self._client_id, version, self._persistent)
        # a topic that is not UTF-8 must not end paho's thread
        paho_client.suppress_exceptions = True
        paho_client.max_queued_messages_set(QUEUED_PUBLISHES)
        paho_client.reconnect_delay_set(0.5, 10)  # type: ignore[arg-type]
        paho_client.username_pw_set(self.endpoint.username, self.endpoint.password)
        if self._claim:
            topic = self._claim.topic
            payload = self._claim.encode(online=False)
            signed = self.endpoint.signer.sign(topic, payload) if self.endpoint.signer else payload
            paho_client.will_set(topic, signed, qos=1, retain=True)
        paho_client.on_socket_close = self._on_socket_close
        paho_client.on_connect = self._on_connect
        paho_client.on_disconnect = self._on_disconnect
        paho_client.on_message = self._on_message
        paho_client.on_subscribe = self._on_subscribe
        paho_client.on_publish = self._on_publish
        return paho_client

    @property
    def is_connected(self) -> bool:
        """Whether the broker has accepted us and the connection stands."""
        return self._paho.is_connected()

    @property
    def is_crowded(self) -> bool:
        """Whether so many QoS 1 messages wait for the broker that those which can be spared
        should be.
        """
        with self._lock:
            self._forget_acknowledged()
            return len(self._unacknowledged) > QUEUED_PUBLISHES // 2

    def _forget_acknowledged(self) -> None:
        while self._unacknowledged and self._unacknowledged[0].is_published():
            self._unacknowledged.popleft()

    @property
    def backlog(self) -> int:
        """Bytes of QoS 0 that were published but not yet written to the socket."""
        with self._lock:
            self._forget_written()
            return sum(size for _, size in self._unwritten)

    def _forget_written(self) -> None:
        while self._unwritten and _is_finished(self._unwritten[0][0]):
            self._unwritten.popleft()

    def subscribe(self, *filters: str, qos: int = 1) -> None:
        """Receive what matches `filters`, now and after every reconnection."""
        wanted = dict.fromkeys(filters, qos)
        self._filters |= wanted
        self._subscribe(wanted)

    def _subscribe(self, filters: Mapping[str, int]) -> None:
        """Ask the broker for what matches these filters (each with its QoS),
        as far as it may know them.
        """
        known = {wire: topic for topic in filters if (wire := self._wire_topic(topic))}
        with self._lock:
            self._hidden = self._hidden | {
                wire: topic for wire, topic in known.items() if wire != topic
            }
        if known and self.is_connected:
            self._paho.subscribe([(wire, filters[topic]) for wire, topic in known.items()])

    def _wire_topic(self, topic: str) -> str | None:
        """The topic as the broker knows it; None if it must not know it yet."""
        return self.endpoint.encryption.wire_topic(topic) if self.endpoint.encryption else topic

    def renew_subscriptions(self) -> None:
        """Subscribe anew to what has another name, or can be read,
        since the encryption has other keys.

        What is retained there comes again.
        """
        encryption = self.endpoint.encryption
        assert encryption
        self._unsubscribe_hidden(list(self._hidden))
        self._subscribe(
            {
                topic: qos
                for topic, qos in dict(self._filters).items()
                if encryption.depends_on_keys(topic)
            }
        )

    def _unsubscribe_hidden(self, hidden: list[str]) -> None:
        with self._lock:
            self._hidden = {
                wire: topic for wire, topic in self._hidden.items() if wire not in hidden
            }
        if hidden and self.is_connected:
            self._paho.unsubscribe(hidden)

    def await_subscription(self, timeout: float) -> bool:
        """Wait until the broker has answered the first subscription;
        False if it has not within `timeout` seconds.
        """
        return self._subscribed.wait(timeout)

    def unsubscribe(self, *filters: str) -> None:
        """Receive nothing more for `filters`."""
        for topic in filters:
            self._filters.pop(topic, None)
        hidden = [wire for wire, topic in self._hidden.items() if topic in filters]
        self._unsubscribe_hidden(hidden)
        if not hidden and self.is_connected:
            self._paho.unsubscribe(list(filters))

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> None:
        """Send a message. While there is no connection QoS 1 is kept for later and QoS 0 is lost.

        What must be encrypted is lost, too, while there are no keys: nobody has welcomed this
        process yet.

        EdgeNodeError if the broker takes no message of this size, BrokerError if too many wait for
        it already.
        """
        if self.endpoint.encryption:
            encrypted = self.endpoint.encryption.encrypt(topic, payload)
            if encrypted is None:
                return
            topic, payload = encrypted
        if self.endpoint.signer:
            payload = self.endpoint.signer.sign(topic, payload)
        size = len(payload) + len(topic.encode()) + PACKET_OVERHEAD
        if self.max_packet and size > self.max_packet:
            raise EdgeNodeError(
                f"a message of {size} bytes for {topic} exceeds the {self.max_packet} that "
                f"{self.endpoint} allows",
                "raise the broker's maximum packet size (mosquitto: max_packet_size)",
            )
        info = self._paho.publish(topic, payload, qos, retain)
        if info.rc == MQTTErrorCode.MQTT_ERR_QUEUE_SIZE:
            raise BrokerError(
                f"{QUEUED_PUBLISHES} messages wait for {self.endpoint}",
                "check that the broker is running",
            )
        with self._lock:
            if qos:
                # paho says "no connection", but keeps the message
                info.rc = MQTTErrorCode.MQTT_ERR_SUCCESS
                self._forget_acknowledged()
                self._unacknowledged.append(info)
            else:
                self._forget_written()
                self._unwritten.append((info, size))

    def publish_presence(self, *, online: bool) -> None:
        """Publish our claim, retained; or that we are going."""
        assert self._claim
        self.publish(self._claim.topic, self._claim.encode(online=online), retain=True)

    def ack(self, delivery: Delivery) -> None:
        """Acknowledge a QoS 1 message whose effect is safe;
        one of an earlier connection will be delivered again.
        """
        with self._lock:
            if delivery.qos and delivery.connection == self._connection:
                self._paho.ack(delivery.mid, delivery.qos)

    def flush(self, timeout: float) -> bool:
        """Wait until the broker has acknowledged all QoS 1 messages;
        False if it has not within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            waiting = list(self._unacknowledged)
        for info in waiting:
            info.wait_for_publish(max(0.001, deadline - time.monotonic()))
        return all(info.is_published() for info in waiting)

    def close(self) -> None:
        """Disconnect cleanly, so that the will is not sent;
        what is already published is written first.
        """
        self._closing.set()
        if self._paho.disconnect() == MQTTErrorCode.MQTT_ERR_SUCCESS:
            self._disconnected.wait(5)

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, event: Delivery | Connected | Disconnected | TakenOver) -> None:
        while not self._closing.is_set():
            try:
                self._inbox.put(event, timeout=0.2)
            except queue.Full:
                continue
            break

    def _on_socket_close(self, _client: paho.Client, _data: object, _socket: object) -> None:
        with self._lock:
            self._connection += 1

    def _on_connect(
        self,
        _client: paho.Client,
        _data: object,
        _flags: object,
        reason: ReasonCode,
        properties: Properties | None,
    ) -> None:
        paho_client = self._paho
        paho_client.answer = reason.getName()
        if self._closing.is_set():
            paho_client.disconnect()
        elif reason.is_failure:
            if self._disconnected.is_set():  # else `open` raises
                log.warning("%s refuses us: %s", self.endpoint, reason)
        else:
            self._certificate_rejected = self._claim_stands = False
            self._disconnected.clear()
            self._collisions.begin()
            self.max_packet = getattr(properties, "MaximumPacketSize", None)
            self._subscribe(dict(self._filters))
            self._put(Connected(self))

    def _on_disconnect(
        self,
        _client: paho.Client,
        _data: object,
        flags: paho.DisconnectFlags,
        reason: ReasonCode,
        _properties: object,
    ) -> None:
        alert = self._paho.alert
        self._paho.alert = None
        if (
            self._disconnected.is_set()
            and alert
            and (fault := certificate_fault(alert))
            and not self._certificate_rejected
        ):
            self._certificate_rejected = True  # logged once, not at every attempt
            log.warning(
                "%s does not accept our certificate any more: %s; %s", self.endpoint, *fault
            )
        if self._disconnected.is_set() or self._paho.answer != "Success":
            return  # was not up
        self._disconnected.set()
        why = str(reason) if flags.is_disconnect_packet_from_server else "connection lost"
        if self._claim and why == TAKEN_OVER:
            self._give_way()
        elif not self._claim and self._collisions.end(why):
            self._put(TakenOver(self))
        else:
            self._put(Disconnected(self, why))

    def _is_name_ours(self) -> bool:
        """Whether we may connect again: nobody else has come under our name while we were away."""
        assert self._claim
        with suppress(BrokerError):  # then the attempt to connect says why
            if is_name_taken(self.endpoint, self._claim, _ASKING):
                self._give_way()
                return False
        return True

    def _give_way(self) -> None:
        self._paho.disconnect()
        self._put(TakenOver(self))

    def _on_message(self, _client: paho.Client, _data: object, message: paho.MQTTMessage) -> None:
        around = ENVELOPE_HEADER + ENCRYPTION_OVERHEAD if self.endpoint.signer else 0
        payload = bytes(message.payload[: self.max_payload + around + 1])
        topic = self._hidden.get(message.topic, message.topic)
        user = tuple(getattr(message.properties, "UserProperty", ()))
        delivery = Delivery(
            self,
            topic,
            payload,
            message.retain,
            message.mid,
            message.qos,
            self._connection,
            message.dup,
            user,
        )
        # or a name of former keys
        if not self._is_subscribed(topic) or message.topic != self._wire_topic(topic):
            self.ack(delivery)
            return
        if self.endpoint.signer:
            try:
                read = self.endpoint.signer.read(topic, payload, self.endpoint.encryption)
                delivery = delivery._replace(payload=read)
            except ValueError as error:
                self._drop(delivery, error)
                return
        if self._claim and topic == self._claim.topic:
            self._defend_claim(self._claim, delivery)
            self.ack(delivery)
        elif message.qos:
            self._put(delivery)
        else:
            try:
                self._inbox.put_nowait(delivery)
            except queue.Full:
                log.debug("dropped a message on %s: the inbox is full", delivery.topic)

    def _defend_claim(self, claim: Claim, delivery: Delivery) -> None:
        """Answer whoever asks for our name; replace what others have left there,
        late wills for example.
        """
        if delivery.retain:
            return  # ours is on its way
        match claim.judge(delivery.payload):
            case "own":
                self._claim_stands = True
            # it connects in another way, or we would not both be there
            case "rival" if self._claim_stands:
                self._give_way()
            case _ if self._claim_stands:
                with suppress(EdgeNodeError):  # too much waits for the broker: the asker asks again
                    self.publish_presence(online=True)

    def _is_subscribed(self, topic: str) -> bool:
        return topic in self._filters or any(
            paho.topic_matches_sub(each, topic) for each in list(self._filters)
        )

    def _drop(self, delivery: Delivery, error: ValueError) -> None:
        """Acknowledge and ignore a forged message, or one that was encrypted with a key that is
        not ours.
        """
        self.ack(delivery)
        if self.endpoint.signer and self.endpoint.signer.is_first_forgery(delivery.topic, error):
            log.warning("ignored a message on %s: %s", abbreviate(delivery.topic), error)

    def _on_subscribe(
        self, _client: paho.Client, _data: object, _mid: int, reasons: list[ReasonCode], _: object
    ) -> None:
        for reason in reasons:
            if reason.is_failure:
                self._subscription_refused = str(reason)
                log.warning("%s refuses a subscription: %s", self.endpoint, reason)
        self._subscribed.set()

    def _on_publish(
        self, _client: paho.Client, _data: object, _mid: int, reason: ReasonCode, _: object
    ) -> None:
        if reason.is_failure:
            log.warning("%s refuses a message: %s", self.endpoint, reason)


def _is_finished(info: paho.MQTTMessageInfo) -> bool:
    """Whether a QoS 0 message was written or lost."""
    return info.rc != MQTTErrorCode.MQTT_ERR_SUCCESS or info.is_published()


def read_retained(endpoint: Endpoint, filters: Sequence[str], wait: float) -> dict[str, bytes]:
    """Return the retained messages (topic -> payload) under `filters`,
    after `wait` seconds at the latest.

    BrokerError if the broker cannot be reached or lets us not read them.
    """
    inbox: queue.Queue[Any] = queue.Queue()
    found: dict[str, bytes] = {}
    with MqttClient(
        endpoint, f"probe-{secrets.token_hex(8)}", inbox=inbox, persistent=False
    ) as client:
        client.subscribe(*filters, qos=0)
        deadline = time.monotonic() + wait
        while (left := deadline - time.monotonic()) > 0:
            try:
                event = inbox.get(timeout=min(left, QUIET))
            except queue.Empty:
                if client._subscribed.is_set():
                    break
                continue
            if isinstance(event, Delivery) and event.retain:
                found[event.topic] = event.payload
        if client._subscription_refused:
            raise refused_error(endpoint, client._subscription_refused)
    return found


def is_name_taken(endpoint: Endpoint, claim: Claim, timeout: float = 10.0) -> bool:
    """Whether another process has the name that is claimed, and is there: it answers.

    What the broker retains is no proof: a process that was killed may still count as connected, and
    a copy of our state folder knows the sessions that we know. BrokerError if the broker cannot be
    reached within `timeout` seconds.
    """
    inbox: queue.Queue[Any] = queue.Queue()
    asker = MqttClient(endpoint, f"claim-{secrets.token_hex(8)}", inbox=inbox, persistent=False)
    with closing(asker.open(timeout)):
        began = time.monotonic()
        asker.subscribe(claim.topic)
        asker.await_subscription(timeout)
        # on a slow connection the answer comes late
        patience = max(ANSWER, 10 * (time.monotonic() - began))
        if [is_online for _, is_online in _claims_of_others(inbox, claim, QUIET)][-1:] != [True]:
            return False
        asker.publish(claim.topic, claim.encode(asking=True))
        for retained, is_online in _claims_of_others(inbox, claim, patience):
            if not retained:
                return is_online
    return False


def _claims_of_others(
    inbox: queue.Queue[Any], claim: Claim, seconds: float
) -> Iterator[tuple[bool, bool]]:
    """What others say of this name within so many seconds: whether it was retained,
    whether they are connected.
    """
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        with suppress(queue.Empty):
            event = inbox.get(timeout=left)
            said = decode_presence(event.payload) if isinstance(event, Delivery) else None
            if said and said.session != claim.session and not said.asking:
                yield event.retain, said.online
