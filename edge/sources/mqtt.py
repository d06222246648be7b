"""Images that arrive on an MQTT topic, one a message."""

import asyncio
import hashlib
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from broker_config.mqtt.client import Delivery, Disconnected, Endpoint, MqttClient
from broker_config.protocol.errors import UsageError, brief
from edge.inference.image_decoding import MAX_BYTES
from edge.inference.pipeline import Frame
from edge.inference.verdict import Failure, Verdict
from edge.sources.thread_event import bell

if TYPE_CHECKING:
    from edge.sources.source_checkpoint import Memory

WINDOW = 8  # images that the broker sends before the first of them is judged
_REMEMBERED = 1000  # images; more than the broker can send again
_CONNECT = 10.0  # seconds
_LAST = 5.0  # seconds for the images in hand at the end

_log = logging.getLogger(__name__)


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="mqtt"):
    """`[[sources]] kind = "mqtt"`: image files as payloads."""

    url: str
    topic: str  # a filter: + and # are allowed
    ca: str | None = None
    cert: str | None = None
    key: str | None = None


class Mqtt:
    """Brings the image files that are published on a topic, at most MAX_BYTES each.

    The broker keeps for a day what comes while the line is away (QoS 1, a session that lasts). An image is acknowledged
    when it was judged; one that the broker repeats although it was is left out. Retained messages are too:
    each connection would bring the same one again.
    """

    def __init__(self, settings: Settings, endpoint: Endpoint, line: str, memory: "Memory") -> None:
        """UsageError when there can be no such topic."""
        if not _is_filter(settings.topic):
            raise UsageError(
                f"the topic {settings.topic!r} cannot be subscribed to",
                "write levels between slashes; + is any, # the rest",
            )
        self.name = name(settings)
        self._endpoint = endpoint
        self._topic = settings.topic
        self._client_id = f"edge-node-{line}-{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"
        self._memory = memory
        self._in_hand: deque[tuple[Delivery, bytes]] = deque()
        self._finished = asyncio.Event()

    async def frames(self, stop: asyncio.Event) -> AsyncGenerator[Frame]:
        """Each image once, in the broker's order; ends soon after `stop` is set. BrokerError when we cannot connect.

        An image is called by its user property `name`, else by its topic.
        """
        with bell(stop) as news:
            inbox = _Inbox(2 * WINDOW, news.ring)
            mqtt = MqttClient(self._endpoint, self._client_id, inbox=inbox, persistent=True)
            mqtt.longest, mqtt.window = MAX_BYTES, WINDOW
            mqtt.subscribe(self._topic)
            if not await _opened(mqtt, stop):
                return
            try:
                while not stop.is_set():
                    await news.wait()
                    news.clear()
                    while not (stop.is_set() or inbox.empty()):
                        if frame := self._frame(inbox.get_nowait()):
                            yield frame
                await self._until_all_are_judged()
            finally:
                await asyncio.to_thread(mqtt.close)

    def done(self, frame: Frame, outcome: Verdict | Failure) -> None:  # noqa: ARG002  (they come in order)
        """Acknowledge the image."""
        delivery, key = self._in_hand.popleft()
        self._memory.keep(key)
        delivery.client.ack(delivery)
        self._finished.set()

    def _frame(self, event: Any) -> Frame | None:
        """What an event of the client brings, if it is a new image."""
        if isinstance(event, Disconnected):
            _log.warning("%s: the broker is away (%s); trying again", self.name, event.reason)
        if not isinstance(event, Delivery):
            return None
        called = brief(dict(event.user).get("name", event.topic))
        key = _key(event, called)
        if event.retain or (event.repeated and key in self._memory):
            event.client.ack(event)
            return None
        if event.repeated and (again := [index for index, (_, known) in enumerate(self._in_hand) if known == key]):
            self._in_hand[again[0]] = (event, key)  # an acknowledgement counts in the connection of its delivery
            return None
        if (
            not event.repeated and key in self._memory
        ):  # the same picture, sent anew with an identifier that has come round
            self._memory.forget([key])
        self._in_hand.append((event, key))
        return Frame(called, event.payload, self.name)

    async def _until_all_are_judged(self) -> None:
        self._memory.forget_but(_REMEMBERED)
        while self._in_hand:
            self._finished.clear()
            try:
                await asyncio.wait_for(self._finished.wait(), _LAST)
            except TimeoutError:
                return


class _Inbox(queue.Queue[Any]):
    """Tells when something is put in."""

    def __init__(self, room: int, ring: Callable[[], None]) -> None:
        super().__init__(room)
        self._ring = ring

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """As a queue does."""
        super().put(item, block, timeout)
        self._ring()


async def _opened(mqtt: MqttClient, stop: asyncio.Event) -> bool:
    """Connect, unless `stop` comes first: a silent broker must not hold up the end. Raises BrokerError."""
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


def name(settings: Settings) -> str:
    """How the source is called."""
    return f"mqtt {settings.topic}"


def _key(image: Delivery, called: str) -> bytes:
    """Tells an image from others, also from an equal one beside it: a broker repeats with the same identifier."""
    return hashlib.sha256(f"{image.topic}\0{called}\0{image.mid}\0".encode() + image.payload).digest()


def _is_filter(topic: str) -> bool:
    """Whether MQTT has such topic filters."""
    levels = topic.split("/")
    whole = all(level in ("+", "#") or not set(level) & set("+#\0") for level in levels)
    return bool(topic) and whole and "#" not in levels[:-1] and len(topic.encode()) <= 1000
