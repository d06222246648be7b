"""Connection of a head to its sensors: that of a federation's server,
and the frames of each round.
"""

import queue
from collections.abc import Sequence
from typing import Any

from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from edge_node.extensions.vfl import tensor_frames
from edge_node.extensions.vfl import topics as vfl_topics
from edge_node.extensions.vfl.frames import LARGEST_FRAME, encode_frame
from edge_node.extensions.vfl.messages import VflSpec
from edge_node.extensions.vfl.privacy import needed_revision
from edge_node.extensions.vfl.server.round_state import OpenRound
from trainer import progress
from trainer.federation.server.connection import Server, ServerConnection
from trainer.federation.server.membership import Membership

Replies = Sequence[tuple[str | None, bytes]]
"""Frames of a round's reply, and the sensor that each is for; None: for all."""


class HeadConnection(ServerConnection):
    """The connection of one head process. Frames are sent once: sensors ask for what is lost."""

    def __init__(
        self,
        endpoint: Endpoint,
        spec: VflSpec,
        session: str,
        inbox: queue.Queue[Any],
        server: Server,
        membership: Membership,
        report: progress.Report,
    ):
        super().__init__(
            endpoint,
            spec,
            session,
            inbox,
            server,
            membership,
            report,
            persistent=False,
            needs_revision=needed_revision(spec),
        )
        self._federation = spec.federation
        self.mqtt.max_payload = LARGEST_FRAME

    def open(self) -> None:
        """Connect and subscribe to all sensors. BrokerError if the broker cannot be reached."""
        self.mqtt.subscribe(vfl_topics.embeddings(self._federation, "+"), qos=0)
        super().open()

    def withdraw(self) -> None:
        """Remove what is retained of a federation that has learnt nothing:
        nobody is to wait for it.
        """
        if self.mqtt.is_connected:
            for topic in (topics.spec, topics.round_state, topics.status):
                self.mqtt.publish(topic(self._federation), b"", retain=True)

    def publish_frame(self, topic: str, payload: bytes) -> None:
        """Publish a frame."""
        self.mqtt.publish(topic, payload, qos=0)

    def send_opening(
        self,
        round_: OpenRound,
        positions: tuple[int, int],
        since: int,
        products: Sequence[str],
        sensor: str | None = None,
    ) -> None:
        """Announce an open round and its products from position `since` on: to all,
        or again to one sensor.
        """
        topic = (
            vfl_topics.gradients(self._federation, sensor)
            if sensor
            else vfl_topics.opened(self._federation)
        )
        first, last = positions
        frame = {"run": round_.run, "attempt": round_.attempt, "round": round_.round}
        for each in tensor_frames.opening_frames(first, last, since, products, **frame):
            self.publish_frame(topic, encode_frame(each))

    def send_replies(self, replies: Replies) -> None:
        """Send what a round trains with."""
        for sensor, payload in replies:
            topic = (
                vfl_topics.gradients(self._federation, sensor)
                if sensor
                else vfl_topics.representation(self._federation)
            )
            self.publish_frame(topic, payload)

    def resend_replies(self, replies: Replies, sensor: str) -> None:
        """Send one sensor again what is for it."""
        for name, payload in replies:
            if name in (None, sensor):
                self.publish_frame(vfl_topics.gradients(self._federation, sensor), payload)
