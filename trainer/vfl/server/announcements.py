"""What a line's head says: its presence, the spec, the state and an overview, all retained; frames; answers."""

import queue
import time
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Any

from broker_config.mqtt.client import MqttClient
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import encode
from broker_config.protocol.frames import LARGEST_FRAME, encode_frame
from broker_config.protocol.messages import Finished, Presence, Refusal, RoundState, Stage, Welcome
from broker_config.protocol.vfl_messages import SensorState, VflOverview, VflSpec
from trainer.vfl import tensor_frames
from trainer.vfl.server.journal import ClosedRound
from trainer.vfl.server.round_state import OpenRound

_EVERY = 1.0  # seconds between two overviews, at least
_FAREWELL = 5.0  # seconds for the last words
Replies = Sequence[tuple[str | None, bytes]]
"""Frames of a round's answer, and for which sensor each is; None: for all."""
_MOST = 1_000_000  # rounds that a RoundState can tell of


class Crier:
    """The connection of one head's process; what arrives goes to `inbox`."""

    def __init__(self, endpoint: Endpoint, spec: VflSpec, session: str, inbox: queue.Queue[Any]):
        self._spec, self._session = spec, session
        self._presence = topics.presence(spec.federation, topics.COORDINATOR)
        self.latency: dict[str, float] = {}  # of each sensor, seconds
        self.lacks: dict[str, str] = {}  # what each sensor waits for, in words
        self._fact: ClosedRound | None = None  # of the last round
        self._rounds, self._since = 0, time.monotonic()  # closed since the last overview
        self.mqtt = MqttClient(
            endpoint,
            f"edge-node/{spec.federation}/{topics.COORDINATOR}",
            inbox=inbox,
            persistent=False,
            will=(self._presence, encode(Presence(session=session, online=False))),
        )
        self.mqtt.longest = LARGEST_FRAME

    def open(self) -> None:
        """Connect, and hear all sensors. BrokerError if the broker cannot be reached."""
        federation = self._spec.federation
        self.mqtt.subscribe(topics.presence(federation, "+"), topics.up(federation, "+"))
        self.mqtt.subscribe(topics.embeddings(federation, "+"), qos=0)
        self.mqtt.open()

    def close(self) -> None:
        """Say goodbye, if there is somebody to hear it, and disconnect."""
        if self.mqtt.is_connected:
            self.say_presence(online=False)
            self.mqtt.flush(_FAREWELL)
        self.mqtt.close()

    def publish(self, topic: str, payload: bytes) -> None:
        """A frame: what is lost of it is asked for again."""
        self.mqtt.publish(topic, payload, qos=0)

    def open_round(
        self,
        round_: OpenRound,
        positions: tuple[int, int],
        since: int,
        products: Sequence[str],
        sensor: str | None = None,
    ) -> None:
        """A round is open, with these products from position `since` on; said to all, or to one sensor again."""
        federation = self._spec.federation
        topic = topics.gradients(federation, sensor) if sensor else topics.opened(federation)
        first, last = positions
        frame = {"run": round_.run, "attempt": round_.attempt, "round": round_.round}
        for each in tensor_frames.opening_frames(first, last, since, products, **frame):
            self.publish(topic, encode_frame(each))

    def reply(self, replies: Replies) -> None:
        """What a round trains with, to whom it is for."""
        for sensor, payload in replies:
            federation = self._spec.federation
            self.publish(topics.gradients(federation, sensor) if sensor else topics.representation(federation), payload)

    def reply_again(self, replies: Replies, sensor: str) -> None:
        """To this sensor, what is for it."""
        for name, payload in replies:
            if name in (None, sensor):
                self.publish(topics.gradients(self._spec.federation, sensor), payload)

    def answer(self, sensor: str, message: Welcome | Refusal | Finished) -> None:
        """A message for one sensor; none while the broker takes them more slowly than sensors ask for them."""
        if not self.mqtt.is_crowded:
            self.mqtt.publish(topics.down(self._spec.federation, sensor), encode(message))

    def say_presence(self, *, online: bool) -> None:
        """That the head is there; sensors answer with VflHello."""
        self.mqtt.publish(self._presence, encode(Presence(session=self._session, online=online)), retain=True)

    def say_spec(self) -> None:
        """How the line learns."""
        self.mqtt.publish(topics.spec(self._spec.federation), encode(self._spec), retain=True)

    def say_state(self, status: Stage, round_: int) -> None:
        """That the line has begun, or is over."""
        state = RoundState(run=self._spec.run, round=min(round_, _MOST), status=status)
        self.mqtt.publish(topics.round_state(self._spec.federation), encode(state), retain=True)

    def withdraw(self) -> None:
        """Take back what is retained of a line that has learnt nothing: nobody is to wait for it."""
        federation = self._spec.federation
        if self.mqtt.is_connected:
            for topic in (topics.spec(federation), topics.round_state(federation), topics.status(federation)):
                self.mqtt.publish(topic, b"", retain=True)

    def closed(self, fact: ClosedRound) -> None:
        """A round is over."""
        self._fact, self._rounds = fact, self._rounds + 1

    def say_overview(
        self, round_: int, status: Stage, present: Collection[str], *, paused: bool, anyway: bool
    ) -> dict[str, float]:
        """How the line is doing, for whoever watches, once a second; returns the figures of it, if it was time.

        What the broker cannot take now is not kept for later: by then it is old.
        """
        elapsed = time.monotonic() - self._since
        if elapsed < _EVERY and not anyway:
            return {}
        fact, rate = self._fact, self._rounds / max(elapsed, 1e-3)
        self._rounds, self._since = 0, time.monotonic()
        taken = dict(zip(self._spec.sensors, fact.iterations, strict=True)) if fact else {}
        sensors = tuple(
            SensorState(
                name=name,
                present=name in present,
                latency=self.latency.get(name),
                iterations=taken.get(name, 0),
                lacks=self.lacks.get(name, ""),
            )
            for name in self._spec.sensors
        )
        loss = fact.loss if fact else None
        overview = VflOverview(
            run=self._spec.run,
            time=datetime.now(UTC),
            round=round_,
            status=status,
            paused=paused,
            loss=loss,
            rate=rate,
            sensors=sensors,
        )
        if self.mqtt.is_connected and not self.mqtt.is_crowded:
            self.mqtt.publish(topics.status(self._spec.federation), encode(overview), retain=True)
        return {} if loss is None else {"loss": loss, "rate": rate}
