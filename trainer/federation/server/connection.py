"""Control connection of a federation's server: announcements,
admission and refusal of members, roll calls.

The servers of all kinds of federation speak to their members through it.
"""

import queue
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import msgspec

from broker_config.mqtt.client import (
    Claim,
    Connected,
    Delivery,
    Disconnected,
    Endpoint,
    MqttClient,
    TakenOver,
)
from broker_config.protocol import topics
from broker_config.protocol.codec import DecodeError, encode
from broker_config.protocol.errors import PeerError
from broker_config.protocol.messages import (
    Accepted,
    CommonSpec,
    Finished,
    Hello,
    MaskingStep,
    Message,
    Refusal,
    RoundState,
    Welcome,
)
from broker_config.security.message_encryption import CoordinatorEncryption
from trainer import progress
from trainer.federation.presence import another_server
from trainer.federation.server.membership import GRACE, MAX_MESSAGES, WINDOW, AnyHello, Membership

_FAREWELL = 5.0  # seconds for the last messages to reach the broker
_REMEDY = "check its version and disk and the log of its federation's server, then join again"


class Server(Protocol):
    """The server that a connection belongs to."""

    @property
    def round(self) -> int:
        """The round that is open, or was closed last; for reports."""
        ...

    @property
    def present(self) -> Collection[str]:
        """Members that are connected, as far as is known."""
        ...

    def publish_state(self) -> None:
        """Publish what is retained besides presence and spec."""
        ...

    def process(self, node: str, delivery: Delivery) -> None:
        """Act on a message that may come from a member.

        Raises:
            PeerError, DecodeError: the sender breaks the protocol, and is to be refused.
        """
        ...

    def mark_lost(self, node: str) -> None:
        """A member's connection has ended."""
        ...

    def exclude(self, node: str) -> None:
        """A member was refused and has no part in the federation until it is admitted again."""
        ...


class ServerConnection:
    """The control connection of one server process; what arrives goes to `inbox`,
    and from there to `handle`.

    Many members' messages come by one connection, so the broker must admit it to `up` and
    `presence` of all of them.

    Args:
        endpoint: the broker.
        spec: of the federation.
        session: of this process.
        inbox: receives what happens on the connection.
        server: that this is the connection of.
        membership: of the federation.
        report: shows progress.
        persistent: whether the broker keeps messages while this process is away.
        needs_revision: of the protocol, that members must know.
        needs_masks: whether members must know how to mask what they contribute.
        encryption: of messages, whose keys members are given; the endpoint has it, too.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        spec: CommonSpec,
        session: str,
        inbox: queue.Queue[Any],
        server: Server,
        membership: Membership,
        report: progress.Report,
        *,
        persistent: bool,
        needs_revision: int,
        needs_masks: bool = False,
        encryption: CoordinatorEncryption | None = None,
    ):
        self._endpoint = endpoint
        self._spec = spec
        self._server = server
        self._session = session
        self._encryption = encryption
        self._needs_revision = needs_revision
        self._needs_masks = needs_masks
        self._membership = membership
        self._report = report
        self._called = time.monotonic()  # the roll
        self.mqtt = MqttClient(
            endpoint,
            f"edge-node/{spec.federation}/{topics.COORDINATOR}",
            inbox=inbox,
            persistent=persistent,
            claim=Claim(topics.presence(spec.federation, topics.COORDINATOR), session),
        )

    def open(self) -> None:
        """Connect and subscribe to all members. BrokerError if the broker cannot be reached."""
        self.mqtt.subscribe(
            topics.presence(self._spec.federation, "+"), topics.up(self._spec.federation, "+")
        )
        self.mqtt.open()

    def close(self) -> None:
        """Publish that the server has gone, if the broker can be reached, and disconnect."""
        if self.mqtt.is_connected:
            self.mqtt.publish_presence(online=False)
            self.mqtt.flush(_FAREWELL)
        self.mqtt.close()

    # Announcements

    def announce(self) -> None:
        """Publish all that is retained (again): a broker restarted without persistence has
        forgotten it.
        """
        self._publish(topics.spec, self._spec)  # first: members answer the roll call with this run
        self.call_roll()
        self._server.publish_state()

    def publish_round(self, state: RoundState) -> None:
        """Publish the state of the rounds."""
        self._publish(topics.round_state, msgspec.structs.replace(state, server=self._session))

    def publish_status(self, overview: Message) -> None:
        """Publish the state of the members; dropped if the broker cannot take it now:
        it would soon be out of date.
        """
        if self.mqtt.is_connected and not self.mqtt.is_crowded:
            self._publish(topics.status, overview)

    def _publish(
        self,
        topic: Callable[[str], str],
        message: Message,
    ) -> None:
        self.mqtt.publish(topic(self._spec.federation), encode(message), retain=True)

    # Roll calls

    def call_roll(self) -> None:
        """Publish our presence, which members answer with Hello.

        A broker that was killed has forgotten their wills.
        """
        self.mqtt.publish_presence(online=True)
        self._called = time.monotonic()
        self._membership.expect_answers(self._server.present, self._called)

    def repeat_roll_call(self) -> None:
        """Call the roll again if the last time was a minute ago."""
        if time.monotonic() - self._called > GRACE and self.mqtt.is_connected:
            self.call_roll()

    def drop_silent_members(self) -> None:
        """Let the server lose those who have not answered a roll call in time."""
        for node in self._membership.pop_silent(time.monotonic()):
            self._server.mark_lost(node)

    # Single members

    def send(
        self, node: str, message: Welcome | Refusal | Accepted | Finished | MaskingStep
    ) -> None:
        """Send to one member; nothing while the broker takes messages more slowly than members
        ask for them.

        A member can do without it: it sends Hello again when it next connects.
        """
        if not self.mqtt.is_crowded:
            self.mqtt.publish(topics.down(self._spec.federation, node), encode(message))

    def may_join(self, node: str, hello: AnyHello, *, newcomer: bool = False) -> bool:
        """Whether the sender of a Hello may take part; if not, it is sent the reason.

        Stale messages are ignored.

        A newcomer is a node that comes for the result of a run that it was not in.
        """
        if self._membership.is_stale(node, hello, present=node in self._server.present):
            if self._membership.is_first_report("stale", hello.session):
                self._report(
                    progress.Note(
                        text=(
                            f"ignored a Hello of an earlier process of {node}, which is "
                            "connected; if its state folder was restored from a copy, it is let "
                            "in within two minutes"
                        )
                    )
                )
            return False
        objection = self._membership.find_objection(
            node,
            hello,
            self._spec.run,
            present=node in self._server.present,
            newcomer=newcomer,
            needs_key=self._encryption is not None,
            needs_masks=self._needs_masks,
            needs_revision=self._needs_revision,
        )
        if objection:
            self.reject(node, objection)
        return objection is None

    def reject(self, node: str, refusal: Refusal) -> None:
        """Answer a Hello whose sender is not let in."""
        if self._membership.is_first_report("rejected", node, refusal.reason):
            self._report(progress.Note(text=f"{node} was not let in: {refusal.reason}"))
        self.send(node, refusal)

    def welcome(self, node: str, hello: AnyHello, contributed: int = 0) -> None:
        """Let the sender of a Hello in, who `contributed` last to that round:
        from now on it speaks for the member.
        """
        self._membership.admit(node, hello)
        key = ""
        if self._encryption and isinstance(hello, Hello):
            try:
                key = self._encryption.keys_for(node, hello)
            except ValueError:
                self.refuse(
                    PeerError(node, "nothing can be encrypted for the key that it has sent")
                )
                return
        self.send(
            node,
            Welcome(session=hello.session, server=self._session, contributed=contributed, key=key),
        )

    def refuse(self, error: PeerError) -> None:
        """Report a peer that broke the protocol; if it is a member, send it the reason."""
        node = error.peer
        session = self._membership.expel(node)
        if self._membership.is_first_report("refused", node):
            self._report(
                progress.NodeRefused(node=node, round=self._server.round, reason=error.why)
            )
        if session is not None:
            self.send(
                node, Refusal(session=session, reason=error.why, remedy=error.remedy or _REMEDY)
            )
            self._server.exclude(node)

    def is_flooding(self, node: str, cost: int = 1) -> bool:
        """Count a member's message; whether it sends so many that this one is to be ignored.

        Raises:
            PeerError: they are certainly its own. Signed messages the broker may have repeated.
        """
        if not self._membership.is_flooding(node, time.monotonic(), cost):
            return False
        reason = f"it sends more than {MAX_MESSAGES} messages in {WINDOW:g} s"
        if self._endpoint.signer is None:
            raise PeerError(node, reason)
        if self._membership.is_first_report("flooding", node):
            self._report(
                progress.Note(
                    text=f"ignoring {node} for a while: {reason}, or the broker repeats them"
                )
            )
        return True

    # Events

    def handle(self, event: Delivery | Connected | Disconnected | TakenOver) -> None:
        """Act on an event of the connection. UsageError if another server has taken our place."""
        match event:
            case Delivery():
                self._receive(event)
                self.mqtt.ack(event)
            case Connected():
                self.announce()
            case Disconnected(_, reason):
                self._report(progress.Note(text=f"connection lost ({reason}); trying again"))
            case TakenOver():
                raise another_server(self._endpoint, self._spec.federation)

    def _receive(self, delivery: Delivery) -> None:
        node = topics.sender(delivery.topic)
        if not delivery.payload or node == topics.COORDINATOR:
            return
        try:
            self._server.process(node, delivery)
        except DecodeError as error:
            self.refuse(PeerError(node, f"its message cannot be read: {error}"))
        except PeerError as error:
            self.refuse(error)


def publish_retained(
    endpoint: Endpoint, messages: Mapping[str, bytes], timeout: float = 10.0
) -> bool:
    """Publish retained messages (topic -> payload) of a server that does not run;
    whether the broker confirmed it.
    """
    with MqttClient(
        endpoint, f"retained-{secrets.token_hex(8)}", inbox=queue.Queue(), persistent=False
    ) as mqtt:
        for topic, payload in messages.items():
            mqtt.publish(topic, payload, retain=True)
        return mqtt.flush(timeout)
