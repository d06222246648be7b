"""Control connection of a federation's member: presence, hello, and what its server answers."""

import importlib.metadata
import queue
from typing import Any

from broker_config.mqtt.client import (
    Claim,
    Connected,
    Disconnected,
    Endpoint,
    MqttClient,
    TakenOver,
)
from broker_config.mqtt.collision import another_process
from broker_config.protocol import topics
from broker_config.protocol.codec import encode
from broker_config.protocol.errors import EdgeNodeError
from broker_config.protocol.messages import CommonSpec, Finished, Message, Refusal
from trainer import progress
from trainer.federation.client.checkpoint import Identity

_FAREWELL = 5.0  # seconds for the last presence to reach the broker


class ClientConnection:
    """The control connection of one member's process; what arrives goes to `inbox`.

    Args:
        endpoint: the broker.
        spec: of the federation.
        name: of the member.
        identity: of its state folder and of this process.
        inbox: receives what happens on the connection.
        report: shows progress.
        server: what the federation's server is to its members, such as the coordinator.
        persistent: whether the broker keeps messages while this process is away.
        remedy: for two processes of one name.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        spec: CommonSpec,
        name: str,
        identity: Identity,
        inbox: queue.Queue[Any],
        report: progress.Report,
        *,
        server: str,
        persistent: bool,
        remedy: str = "stop one of them",
    ):
        self._name = name
        self._identity = identity
        self._server = server
        self._report = report
        self._spec = spec
        self._told_change = False
        self._run = spec.run
        self._remedy = remedy
        self._up = topics.up(spec.federation, name)
        self.mqtt = MqttClient(
            endpoint,
            f"edge-node/{spec.federation}/{name}",
            inbox=inbox,
            persistent=persistent,
            claim=Claim(
                topics.presence(spec.federation, name), identity.session, identity.identity
            ),
        )
        self.mqtt.subscribe(
            topics.spec(spec.federation),
            topics.down(spec.federation, name),
            topics.round_state(spec.federation),
            topics.presence(spec.federation, topics.COORDINATOR),
        )

    def close(self) -> None:
        """Publish that we have gone, if the broker can be reached, and disconnect."""
        if self.mqtt.is_connected:
            self.mqtt.publish_presence(online=False)
            self.mqtt.flush(_FAREWELL)
        self.mqtt.close()

    @property
    def hello(self) -> dict[str, Any]:
        """The fields of a Hello."""
        return {
            "session": self._identity.session,
            "run": self._run,
            "software": importlib.metadata.version("edge-node"),
            "identity": self._identity.identity,
            "incarnation": self._identity.incarnation,
        }

    def announce(self) -> None:
        """Publish that we are connected."""
        self.mqtt.publish_presence(online=True)

    def send(self, message: Message) -> None:
        """Send to the server."""
        self.mqtt.publish(self._up, encode(message))

    def finish(self, timeout: float) -> None:
        """Tell the server that nothing more is needed; wait until the broker has that,
        even if it is away at first.
        """
        self.tell_finished()
        self.mqtt.flush(timeout)

    def tell_finished(self) -> None:
        """Tell the server that nothing more is needed."""
        self.send(Finished(session=self._identity.session, run=self._run))

    def observe(self, event: Connected | Disconnected | TakenOver) -> None:
        """Report that the connection was lost.

        EdgeNodeError if another process has taken our place.
        """
        if isinstance(event, Disconnected):
            self._report(progress.Note(text=f"connection lost ({event.reason}); trying again"))
        if isinstance(event, TakenOver):
            raise another_process(self._name, self._remedy)

    def observe_spec(self, spec: CommonSpec) -> None:
        """Report once that the spec of this run is not any more what this member goes by,
        and others may not.
        """
        if spec.run == self._run and spec != self._spec and not self._told_change:
            self._told_change = True
            text = (
                f"the {self._server} has changed the spec of this run: going on with the one of "
                "before; others may not"
            )
            self._report(progress.Note(text=text))

    def raise_refusal(self, refusal: Refusal) -> None:
        """Raise EdgeNodeError for a refusal that is meant for this process,
        and not for an earlier one.
        """
        if refusal.session == self._identity.session:
            raise EdgeNodeError(
                f"the {self._server} refused {self._name}: {refusal.reason}", refusal.remedy
            )
