"""What a coordinator says: its presence, the spec and the round, all retained; and answers to single nodes."""

import contextlib
import queue
import secrets
from collections.abc import Collection
from typing import Any

import msgspec

from broker_config.mqtt.client import Endpoint, MqttClient, probe
from broker_config.protocol import topics
from broker_config.protocol.codec import DecodeError, decode, encode
from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import AnyMessage, Manifest, Overview, Presence, RoundState, Spec, Stage
from trainer.federation.server import round_state as rounds
from trainer.federation.server.journal import Blob

_FAREWELL = 5.0  # seconds for the last words


class Herald:
    """The control connection of one coordinator's process; what arrives goes to `inbox`.

    Several nodes' messages come by one connection, so the broker must admit it to `up` and `presence` of all of them.
    """

    def __init__(self, endpoint: Endpoint, spec: Spec, session: str, inbox: queue.Queue[Any]):
        self._spec, self._session, self._seal = spec, session, endpoint.seal
        self._presence = topics.presence(spec.federation, topics.COORDINATOR)
        self.mqtt = MqttClient(
            endpoint,
            f"edge-node/{spec.federation}/{topics.COORDINATOR}",
            inbox=inbox,
            persistent=True,
            will=(self._presence, encode(Presence(session=session, online=False))),
        )

    def open(self) -> None:
        """Connect, and hear all nodes. BrokerError if the broker cannot be reached."""
        self.mqtt.subscribe(topics.presence(self._spec.federation, "+"), topics.up(self._spec.federation, "+"))
        self.mqtt.open()

    def close(self) -> None:
        """Say goodbye, if there is somebody to hear it, and disconnect."""
        if self.mqtt.is_connected:
            self.say_presence(online=False)
            self.mqtt.flush(_FAREWELL)
        self.mqtt.close()

    def say_presence(self, *, online: bool) -> None:
        """That the coordinator is there; nodes answer with Hello."""
        self.mqtt.publish(self._presence, encode(Presence(session=self._session, online=online)), retain=True)

    def say_spec(self) -> None:
        """What the federation is."""
        self.mqtt.publish(topics.spec(self._spec.federation), encode(self._spec), retain=True)

    def say_round(self, state: rounds.Federation, broadcast: Blob, chunk_size: int) -> None:
        """Where the federation stands, and the blob that nodes can fetch, in chunks of so many bytes."""
        spec = self._spec
        manifest = Manifest(
            federation=spec.federation,
            run=spec.run,
            round=state.round,
            node=topics.COORDINATOR,
            digest=broadcast.digest,
            size=broadcast.size,
            chunk_size=chunk_size,
        )
        if self._seal:
            manifest = msgspec.structs.replace(manifest, signature=self._seal.attest(manifest))
        here, needed = len(state.missing | state.contributed), state.plan.quorum
        message = RoundState(
            run=spec.run,
            round=state.round,
            status=_STAGES[state.status],
            broadcast=None if state.status is rounds.Status.GATHERING else manifest,
            reason=f"paused: {here} of the {needed} nodes that a round needs are there" if state.paused else "",
            participants=tuple(sorted(state.drawn)),
        )
        self.mqtt.publish(topics.round_state(spec.federation), encode(message), retain=True)

    def say_overview(self, overview: Overview) -> None:
        """How the nodes are doing, for whoever watches."""
        self.mqtt.publish(topics.status(self._spec.federation), encode(overview), retain=True)

    def answer(self, node: str, message: AnyMessage) -> None:
        """A message for one node; none while the broker takes them more slowly than nodes ask for them.

        A node can do without: it says Hello again when it next connects, and a later round tells what was accepted.
        """
        if not self.mqtt.is_crowded:
            self.mqtt.publish(topics.down(self._spec.federation, node), encode(message))


def say_aborted(endpoint: Endpoint, spec: Spec, round_: int, reason: str) -> bool:
    """Tell the nodes of a run that nobody coordinates at the moment that it is over; whether the broker has it."""
    message = RoundState(run=spec.run, round=round_, status="aborted", reason=reason)
    with MqttClient(endpoint, f"abort-{secrets.token_hex(8)}", inbox=queue.Queue(), persistent=False) as mqtt:
        mqtt.publish(topics.round_state(spec.federation), encode(message), retain=True)
        return mqtt.flush(10)


_STAGES: dict[rounds.Status, Stage] = {
    rounds.Status.GATHERING: "gathering",
    rounds.Status.OPEN: "open",
    rounds.Status.FINISHED: "finished",
}


def check_unclaimed(endpoint: Endpoint, federation: str, ours: Collection[str]) -> None:
    """Raise UsageError if a coordinator is connected whose session is none of `ours`."""
    topic = topics.presence(federation, topics.COORDINATOR)
    for payload in probe(endpoint, [topic], wait=1.0).values():
        with contextlib.suppress(DecodeError):  # what cannot be read is nobody's presence; ours replaces it
            presence = decode(payload, Presence)
            if presence.online and presence.session not in ours:
                raise claimed(federation, endpoint)


def claimed(federation: str, endpoint: Endpoint) -> UsageError:
    """There is another coordinator."""
    return UsageError(
        f"federation {federation!r} already has a coordinator on {endpoint}",
        "stop that one, or choose another name with --federation (after a crash the broker notices within a minute)",
    )
