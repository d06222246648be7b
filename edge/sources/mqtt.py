"""Images that arrive on an MQTT topic, one in each message."""

import asyncio
import hashlib
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from broker_config.mqtt.client import Delivery, Disconnected, MqttClient, TakenOver
from broker_config.protocol.errors import UsageError, abbreviate
from edge.config.broker_settings import BrokerSettings
from edge.config.instance import Instance
from edge.inference.image_decoding import MAX_BYTES
from edge.inference.outcomes import Failure, Verdict
from edge.inference.pipeline import Frame
from edge.sources.source import Access
from edge.sources.thread_event import event_or_stop

if TYPE_CHECKING:
    from edge.sources.source_checkpoint import SourceCheckpoint

WINDOW = 8  # images that the broker sends before the first of them is inspected
_REMEMBERED = 1000  # images; more than the broker can repeat
_CONNECT = 10.0  # seconds
_LAST = 5.0  # seconds for the images in hand at the end

_log = logging.getLogger(__name__)


class Settings(BrokerSettings, frozen=True, kw_only=True, tag_field="kind", tag="mqtt"):
    """`[[sources]] kind = "mqtt"`: image files as payloads."""

    topic: str  # a filter: + and # are allowed

    def open_source(self, instance: Instance) -> "Mqtt":
        """Open the source."""
        # Only some sources need SQLite
        from edge.sources.source_checkpoint import SourceCheckpoint  # noqa: PLC0415

        checkpoint = SourceCheckpoint(instance.state, source_name(self))
        return Mqtt(self, instance.line, checkpoint)

    def access(self) -> Access:
        """Return none: the broker is reached through the network."""
        return Access()


class Mqtt:
    """Brings the image files that are published on a topic, at most MAX_BYTES each.

    What comes while the line is away, the broker keeps for a day (QoS 1, persistent session). An
    image is acknowledged once it has been inspected; one that the broker repeats nevertheless is
    skipped, and so are retained messages, which every connection would bring again.
    """

    def __init__(self, settings: Settings, line: str, checkpoint: "SourceCheckpoint") -> None:
        """UsageError when the broker's settings or the topic cannot be used."""
        if not _is_filter(settings.topic):
            raise UsageError(
                f"the topic {settings.topic!r} cannot be subscribed to",
                "write levels between slashes; + is any, # the rest",
            )
        self.name = source_name(settings)
        self._endpoint = settings.endpoint()
        self._topic = settings.topic
        self._client_id = f"edge-node-{line}-{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"
        self._checkpoint = checkpoint
        self._in_hand: deque[tuple[Delivery, bytes]] = deque()
        self._finished = asyncio.Event()

    async def frames(self, stop: asyncio.Event) -> AsyncGenerator[Frame]:
        """Each image once, in the broker's order; ends soon after `stop` is set.

        BrokerError when we cannot connect.

        An image's name is its user property `name`, or else its topic.
        """
        with event_or_stop(stop) as arrived:
            inbox = _Inbox(2 * WINDOW, arrived.set_threadsafe)
            mqtt = MqttClient(self._endpoint, self._client_id, inbox=inbox, persistent=True)
            mqtt.max_payload = MAX_BYTES
            mqtt.receive_maximum = WINDOW
            mqtt.subscribe(self._topic)
            if not await _open(mqtt, stop):
                return
            try:
                while not stop.is_set():
                    await arrived.wait()
                    arrived.clear()
                    while not (stop.is_set() or inbox.empty()):
                        if frame := self._frame(inbox.get_nowait()):
                            yield frame
                await self._wait_until_inspected()
            finally:
                await asyncio.to_thread(mqtt.close)

    # They come in order
    def done(self, frame: Frame, outcome: Verdict | Failure) -> None:
        """Acknowledge the image."""
        delivery, key = self._in_hand.popleft()
        self._checkpoint.put(key)
        delivery.client.ack(delivery)
        self._finished.set()

    def _frame(self, event: Any) -> Frame | None:
        """The frame in an event of the link, if it is a new image."""
        if isinstance(event, Disconnected):
            _log.warning("%s: the broker is away (%s); trying again", self.name, event.reason)
        if isinstance(event, TakenOver):
            _log.warning(
                "%s: another process takes the connection as %s: no two lines on one broker may "
                "have the same name",
                self.name,
                self._client_id,
            )
        if not isinstance(event, Delivery):
            return None
        name = abbreviate(dict(event.user).get("name", event.topic))
        key = _key(event, name)
        if event.retain or (event.repeated and key in self._checkpoint):
            event.client.ack(event)
            return None
        if event.repeated and (
            again := [index for index, (_, known) in enumerate(self._in_hand) if known == key]
        ):
            # an acknowledgement counts in the connection of its delivery
            self._in_hand[again[0]] = (event, key)
            return None
        # the same picture again, with a message id that is reused
        if not event.repeated and key in self._checkpoint:
            self._checkpoint.remove([key])
        self._in_hand.append((event, key))
        return Frame(name, event.payload, self.name, self._checkpoint.begin(key))

    async def _wait_until_inspected(self) -> None:
        self._checkpoint.prune(_REMEMBERED)
        while self._in_hand:
            self._finished.clear()
            try:
                await asyncio.wait_for(self._finished.wait(), _LAST)
            except TimeoutError:
                return


class _Inbox(queue.Queue[Any]):
    """A queue that reports each item."""

    def __init__(self, maxsize: int, on_put: Callable[[], None]) -> None:
        super().__init__(maxsize)
        self._on_put = on_put

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Put an item, and report it."""
        super().put(item, block, timeout)
        self._on_put()


async def _open(mqtt: MqttClient, stop: asyncio.Event) -> bool:
    """Connect unless `stop` comes first: a silent broker must not delay shutdown.

    Raises BrokerError.
    """
    opening: Future[MqttClient] = Future()
    opening.set_running_or_notify_cancel()  # so that nobody can cancel it

    def run() -> None:
        try:
            opening.set_result(mqtt.open(_CONNECT))
        except Exception as error:
            opening.set_exception(error)

    threading.Thread(target=run, name="mqtt", daemon=True).start()
    waiting: asyncio.Future[Any] = asyncio.wrap_future(opening)
    ending: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
    await asyncio.wait([waiting, ending], return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
    if waiting.done():
        waiting.result()
        return True
    waiting.cancel()
    opening.add_done_callback(_close)
    return False


def _close(late: Future[MqttClient]) -> None:
    if not late.exception():
        late.result().close()


def source_name(settings: Settings) -> str:
    """Name of the source, in outcomes, logs and its checkpoint."""
    return f"mqtt {settings.topic}"


def _key(image: Delivery, name: str) -> bytes:
    """Identifies an image, even beside an equal one:
    a broker repeats a message with the same message id.
    """
    return hashlib.sha256(f"{image.topic}\0{name}\0{image.mid}\0".encode() + image.payload).digest()


def _is_filter(topic: str) -> bool:
    """Whether this is a valid MQTT topic filter."""
    levels = topic.split("/")
    whole = all(level in ("+", "#") or not set(level) & set("+#\0") for level in levels)
    return bool(topic) and whole and "#" not in levels[:-1] and len(topic.encode()) <= 1000
