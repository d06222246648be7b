"""A camera whose frames are taken when a variable of an OPC UA server, such as a PLC, says so."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from broker_config.protocol.errors import EdgeNodeError, abbreviate
from edge.config.instance import Instance
from edge.inference.outcomes import Failure, Verdict
from edge.inference.pipeline import Frame
from edge.sources import camera
from edge.sources.source import Access
from edge.sources.thread_event import ThreadEvent, event_or_stop
from edge_node.extensions.opcua.opcua_settings import OpcUaSettings

if TYPE_CHECKING:
    from asyncua import Client

_PERIOD = 20  # milliseconds in which the server sends what has changed
_CHANGES = 100  # of the variable, which the server keeps in between
_FRAME = 5.0  # seconds for the camera's next frame
_CLOSE = 3.0  # seconds
_WARN_EVERY = 60.0  # seconds between two warnings of dropped images

_log = logging.getLogger(__name__)


class Settings(OpcUaSettings, frozen=True, kw_only=True, tag_field="kind", tag="opcua"):
    """`[[sources]] kind = "opcua"`: a camera's frame at each trigger."""

    trigger: str  # node id of a Boolean, whose rise counts, or of a counter, whose change does
    input: str | int  # the camera, as that of `video`
    part: str | None = None  # node id of the part's name

    def open_source(self, instance: Instance) -> "OpcUa":
        """Open the source."""
        return OpcUa(self)

    def access(self) -> Access:
        """Return the access to the camera."""
        return camera.access_to(self.input)


class OpcUa:
    """Brings, for each trigger, the first frame that the camera gives after it.

    Frames are taken while the line is busy: `ahead` wait, more are dropped and counted in
    `dropped`. Triggers that come while server or camera are out of reach belong to parts that
    nobody saw: a counter tells how many.
    """

    def __init__(self, settings: Settings, ahead: int = 8) -> None:
        """UsageError when the settings cannot be used."""
        part_nodes = [settings.part] if settings.part else []
        settings.check(settings.trigger, *part_nodes)
        self._settings = settings
        self._ahead = ahead
        self._camera = camera.Settings(input=settings.input)
        self._label = camera.Video(self._camera).name
        self.name = f"opcua {settings.url} {settings.trigger}"
        self.dropped = 0
        self._warned = -_WARN_EVERY
        self._last: bool | int | None = None  # value of the trigger that was seen last

    async def frames(self, stop: asyncio.Event) -> AsyncGenerator[Frame]:
        """Frames in the triggers' order, named by the part or else numbered;
        ends soon after `stop` is set.

        EdgeNodeError when server or camera are out of reach; it may then be called again.
        """
        ready: asyncio.Queue[Frame] = asyncio.Queue(self._ahead)
        with event_or_stop(stop) as changed:
            taking = asyncio.create_task(self._take_all(ready, changed))
            taking.add_done_callback(lambda _: changed.set())
            try:
                while not stop.is_set():
                    await changed.wait()
                    changed.clear()
                    while not (stop.is_set() or ready.empty()):
                        yield ready.get_nowait()
                    if taking.done():
                        taking.result()
            finally:
                taking.cancel()
                await asyncio.gather(taking, return_exceptions=True)

    def done(self, frame: Frame, outcome: Verdict | Failure) -> None:
        """Nothing to record: a part that has passed does not come again."""

    async def _take_all(self, ready: asyncio.Queue[Frame], changed: ThreadEvent) -> None:
        """Take a frame at each trigger. EdgeNodeError when that is not possible any more."""
        pictures = ThreadEvent()
        reader = camera.VideoReader(self._camera, live=True, on_change=pictures.set_threadsafe)
        reader.start()
        try:
            async with contextlib.AsyncExitStack() as stack:
                client = await self._settings.connect()
                stack.push_async_callback(_disconnect, client)
                triggers = await self._subscribe(client)
                while True:
                    number = await triggers.get()
                    if number is None:
                        raise EdgeNodeError(
                            f"the connection to {self._settings.url} was lost",
                            "check that the server runs",
                        )
                    while reader.next():
                        pass  # what the camera saw before
                    name = await self._read_part(client) if self._settings.part else f"#{number}"
                    self._put(
                        ready, Frame(name, await self._next_frame(reader, pictures), self.name)
                    )
                    changed.set()
        finally:
            reader.stop.set()

    async def _subscribe(self, client: "Client") -> "asyncio.Queue[int | None]":
        """A queue that gets the number of each trigger, and None when the connection is lost."""
        from asyncua import ua  # noqa: PLC0415

        triggers: asyncio.Queue[int | None] = asyncio.Queue()

        class Handler:
            def datachange_notification(
                _,  # noqa: N805
                node: object,
                value: Any,
                data: object,
            ) -> None:
                # none while its status is bad
                if isinstance(value, int) and self._is_trigger(value):
                    triggers.put_nowait(int(value))

        async def lose(_: Exception) -> None:
            triggers.put_nowait(None)

        client.connection_lost_callback = lose
        try:
            value = await client.get_node(self._settings.trigger).read_value()
            if not isinstance(value, int):
                raise EdgeNodeError(
                    f"the node {self._settings.trigger} is no trigger: it holds "
                    f"{abbreviate(repr(value), 60)}",
                    "name a Boolean, whose rise triggers, or a whole number that counts",
                )
            self._tell_missed(value)
            subscription = await client.create_subscription(_PERIOD, Handler())
            node = client.get_node(self._settings.trigger)
            await subscription.subscribe_data_change(node, queuesize=_CHANGES, sampling_interval=0)
        except ua.UaError as error:
            raise self._unusable(self._settings.trigger, error) from error
        return triggers

    def _is_trigger(self, value: bool | int) -> bool:
        last = self._last
        self._last = value
        if last is None or value == last:
            return False
        if isinstance(value, bool):
            return value
        if value > last + 1:
            self._warn_missed(value - last - 1)
        return True

    def _tell_missed(self, value: bool | int) -> None:
        """The value on connecting is no trigger; of a counter it tells how many were missed."""
        if self._last is not None and not isinstance(value, bool) and value > self._last:
            self._warn_missed(value - self._last)
        self._last = value

    def _warn_missed(self, count: int) -> None:
        _log.warning(
            "%s: %d trigger(s) were missed; these parts were not inspected", self.name, count
        )

    async def _read_part(self, client: "Client") -> str:
        from asyncua import ua  # noqa: PLC0415

        assert self._settings.part
        try:
            return abbreviate(str(await client.get_node(self._settings.part).read_value()))
        except ua.UaError as error:
            raise self._unusable(self._settings.part, error) from error

    async def _next_frame(
        self, reader: camera.VideoReader, pictures: ThreadEvent
    ) -> NDArray[np.uint8]:
        deadline = time.monotonic() + _FRAME
        while not (found := reader.next()):
            pictures.clear()
            if reader.is_over or time.monotonic() > deadline:
                raise EdgeNodeError(
                    f"{self._label} {reader.error or 'brings no frames'}",
                    "check that it is there, switched on and connected",
                )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(pictures.wait(), deadline - time.monotonic())
        return found[1]

    def _put(self, ready: asyncio.Queue[Frame], frame: Frame) -> None:
        if not ready.full():
            ready.put_nowait(frame)
            return
        self.dropped += 1
        if time.monotonic() - self._warned > _WARN_EVERY:
            self._warned = time.monotonic()
            _log.warning(
                "%s: triggers come faster than the line inspects: %d images were dropped so far",
                self.name,
                self.dropped,
            )

    def _unusable(self, node: str, error: Exception) -> EdgeNodeError:
        return EdgeNodeError(
            f"the node {node} at {self._settings.url} cannot be read ({type(error).__name__})",
            "write its id as the server's browser shows it, and let this user read it",
        )


async def _disconnect(client: "Client") -> None:
    with contextlib.suppress(Exception):  # it may be gone already
        await asyncio.wait_for(client.disconnect(), _CLOSE)
