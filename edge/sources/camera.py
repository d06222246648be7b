"""A camera or a video file, through OpenCV (the extra `camera`),
and what sources of camera frames share.
"""

import abc
import asyncio
import importlib.util
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from broker_config.protocol.errors import EdgeNodeError, UsageError
from edge.config.instance import Instance
from edge.inference.outcomes import Failure, Verdict
from edge.inference.pipeline import Frame
from edge.sources.source import Access
from edge.sources.thread_event import event_or_stop

AHEAD = 2  # frames read ahead of the line
_TIMEOUT = 10_000  # milliseconds until a network camera counts as gone
_CLOSE = 2.0  # seconds for a camera to be closed
_WARN_EVERY = 60.0  # seconds between two warnings of dropped frames

_log = logging.getLogger(__name__)


class Settings(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="video"
):
    """`[[sources]] kind = "video"`: the frames of a camera or a video file."""

    input: str | int  # a file, an address such as rtsp://..., or a camera's number
    every: Annotated[int, Meta(ge=1)] = 1  # only each Nth frame
    # at most this many frames a second, of the video's time
    rate: Annotated[float, Meta(gt=0)] | None = None

    def open_source(self, instance: Instance) -> "Video":
        """Open the source."""
        return Video(self)

    def access(self) -> Access:
        """Return the access to the camera."""
        return access_to(self.input)


class CameraSource(abc.ABC):
    """Brings the frames of a camera, named by their numbers.

    Of a live camera the newest frames matter: when the line is slower, those that have waited
    longest are dropped, and counted in `dropped`.
    """

    def __init__(self, kind: str, label: str) -> None:
        self._label = label
        self.name = f"{kind} {label}"
        self.dropped = 0
        self._warned = time.monotonic()

    @abc.abstractmethod
    def _new_reader(self, on_change: Callable[[], None]) -> "FrameReader":
        """A reader of the camera's frames, not yet started."""

    async def frames(self, stop: asyncio.Event) -> AsyncGenerator[Frame]:
        """Each frame, named by its number; ends with the file, or soon after `stop` is set.

        EdgeNodeError when it cannot be opened, or a camera has gone; it may then be called again.
        """
        with event_or_stop(stop) as changed:
            reader = self._new_reader(changed.set_threadsafe)
            reader.start()
            try:
                while True:
                    await changed.wait()
                    changed.clear()
                    while not stop.is_set() and (found := reader.next()):
                        number, pixels = found
                        self._count(reader)
                        yield Frame(f"{self._label}#{number}", pixels, self.name)
                    if stop.is_set() or reader.is_over:
                        break
            finally:
                reader.stop.set()
                await asyncio.to_thread(reader.join, _CLOSE)  # who opens it next finds it free
            if reader.error and not stop.is_set():
                raise EdgeNodeError(f"{self.name} {reader.error}", reader.remedy)

    # The same for all
    def done(self, frame: Frame, outcome: Verdict | Failure) -> None:  # noqa: B027
        """Nothing to record: what a camera has shown does not come again."""

    def _count(self, reader: "FrameReader") -> None:
        dropped = reader.dropped
        reader.dropped = 0
        self.dropped += dropped
        if dropped and time.monotonic() - self._warned > _WARN_EVERY:
            self._warned = time.monotonic()
            _log.warning(
                "%s is faster than the line: %d frames were dropped so far", self.name, self.dropped
            )


class Video(CameraSource):
    """Brings the frames of a camera or a video file.

    A file is inspected from beginning to end, as fast as the line can; after a restart it begins
    anew.
    """

    def __init__(self, settings: Settings) -> None:
        """UsageError when OpenCV is not installed, or there is no such file."""
        if importlib.util.find_spec("cv2") is None:
            raise UsageError(
                "a camera or a video file needs OpenCV, which is not installed here",
                "install it: pip install 'edge-node[camera]'",
            )
        self._settings = settings
        self._file = _file(settings.input)
        if self._file and not self._file.exists():
            raise UsageError(
                f"there is no video {self._file}", "name a file, an address or a camera's number"
            )
        super().__init__("video", _label(settings.input))

    def _new_reader(self, on_change: Callable[[], None]) -> "FrameReader":
        live = not (self._file and self._file.is_file())
        return VideoReader(self._settings, live=live, on_change=on_change)


class FrameReader(threading.Thread, abc.ABC):
    """Reads frames ahead, in a thread of its own: cameras are waited for."""

    def __init__(
        self, on_change: Callable[[], None], *, live: bool = True, ahead: int = AHEAD
    ) -> None:
        super().__init__(name="frames", daemon=True)  # a camera that hangs must not delay shutdown
        self.stop = threading.Event()
        self.error = ""
        self.remedy = "check that it is there, switched on and connected"
        self.dropped = 0
        self._live = live
        self._on_change = on_change
        self._finished = False
        self._waiting: queue.Queue[tuple[int, NDArray[np.uint8]]] = queue.Queue(ahead)

    @property
    def is_over(self) -> bool:
        """Whether there will be no more frames."""
        return self._finished and self._waiting.empty()

    def next(self) -> tuple[int, NDArray[np.uint8]] | None:
        """The next frame's number and its pixels, uint8 [height, width, 3] RGB, if there is one."""
        try:
            return self._waiting.get_nowait()
        except queue.Empty:
            return None

    def run(self) -> None:
        """Read until the end, or until `stop` is set."""
        try:
            self._read()
        except EdgeNodeError as error:
            self.error = error.what
            self.remedy = error.remedy
        # the library's own: whatever a driver or a damaged file gives it
        except Exception as error:
            self.error = f"cannot be read: {error}"
        self._finished = True
        self._on_change()

    @abc.abstractmethod
    def _read(self) -> None:
        """Put each frame, until the end or until `stop` is set; an error ends it, too."""

    def _put(self, frame: tuple[int, NDArray[np.uint8]]) -> None:
        while not self.stop.is_set():
            try:
                timeout = None if self._live else 0.2
                self._waiting.put(frame, timeout=timeout, block=not self._live)
            except queue.Full:
                if self._live and self.next():
                    self.dropped += 1
            else:
                self._on_change()
                return


class VideoReader(FrameReader):
    """Reads what OpenCV opens."""

    def __init__(self, settings: Settings, *, live: bool, on_change: Callable[[], None]) -> None:
        super().__init__(on_change, live=live)
        self._settings = settings

    def _read(self) -> None:
        import cv2  # noqa: PLC0415  (an extra, and slow to import)

        video = _open(cv2, self._settings.input)
        try:
            if not video.isOpened():
                self.error = "cannot be opened"
                return
            clock = (
                time.monotonic if self._live else lambda: video.get(cv2.CAP_PROP_POS_MSEC) / 1000
            )
            is_wanted = FrameSelector(self._settings.every, self._settings.rate, clock)
            number = 0
            while not self.stop.is_set() and video.grab():
                number += 1
                if is_wanted(number):
                    whole, pixels = video.retrieve()
                    if whole:
                        self._put((number, np.ascontiguousarray(pixels[..., ::-1])))
            if self._live or not number:
                self.error = "brings no frames any more" if number else "brings no frames"
        finally:
            video.release()


class FrameSelector:
    """Selection of frames, by number and rate."""

    def __init__(self, every: int, rate: float | None, clock: Callable[[], float]) -> None:
        self._every = every
        self._period = 1 / rate if rate else 0.0
        self._clock = clock  # seconds
        self._due: float | None = None

    def __call__(self, number: int) -> bool:
        """Whether to take the frame with this number, now."""
        if (number - 1) % self._every:
            return False
        now = self._clock()
        due = now if self._due is None else self._due
        if now < due - 0.001:  # cameras are not punctual
            return False
        self._due = max(due, now - self._period) + self._period
        return True


def _open(cv2: Any, where: str | int) -> Any:
    if isinstance(where, str) and "://" in where:
        timeouts = [
            cv2.CAP_PROP_OPEN_TIMEOUT_MSEC,
            _TIMEOUT,
            cv2.CAP_PROP_READ_TIMEOUT_MSEC,
            _TIMEOUT,
        ]
        return cv2.VideoCapture(where, cv2.CAP_FFMPEG, timeouts)
    return cv2.VideoCapture(where)


def _file(where: str | int) -> Path | None:
    return Path(where) if isinstance(where, str) and "://" not in where else None


def _label(where: str | int) -> str:
    """A name for people, without the password of an address."""
    if isinstance(where, int):
        return f"camera-{where}"
    if "://" not in where:
        return Path(where).name
    address = urlsplit(where)
    return f"{address.scheme}://{address.netloc.rpartition('@')[2]}{address.path}"


def access_to(where: str | int) -> Access:
    """Return the access to a camera, or to the video file that stands in for it."""
    if isinstance(where, int):
        return Access(devices=(f"/dev/video{where}",))
    if where.startswith("/dev/"):
        return Access(devices=(where,))
    return Access() if "://" in where else Access(reads=(Path(where),))
