"""A GenICam camera (GigE Vision, USB3 Vision, CoaXPress),
through its vendor's GenTL producer (the extra `genicam`).

The producer runs in a process of its own: the vendor's code may hang or crash, and Python waits
while it is called.
"""

import importlib.util
import logging
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.security.secret_environment import environment_without_secrets
from edge.config.instance import Instance
from edge.sources import camera
from edge.sources.source import Access

_PROCESS = "edge_node.extensions.genicam.genicam_process"
_AHEAD = 8  # triggered frames that wait for the line
_POLL = 100  # milliseconds
_WARN_EVERY = 60.0  # seconds between two warnings of lost frames
_CLOSE = 1.5  # seconds for the process to close the camera
LENGTH = struct.Struct("=I")  # bytes of the message that follows

_log = logging.getLogger(__name__)


class Settings(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="genicam"
):
    """`[[sources]] kind = "genicam"`: the frames of a camera with a GenTL producer."""

    producer: str  # the vendor's .cti file
    # serial number or user-defined name; may be left out where there is one camera
    camera: str | None = None
    # written in this order before frames are taken
    features: dict[str, bool | int | float | str] = {}
    every: Annotated[int, Meta(ge=1)] = 1  # only each Nth frame
    rate: Annotated[float, Meta(gt=0)] | None = None  # at most this many frames a second

    def open_source(self, instance: Instance) -> "Genicam":
        """Open the source."""
        return Genicam(self)

    def access(self) -> Access:
        """Return the access to all USB devices and interfaces: the producer knows which."""
        return Access(devices=("char-usb_device",), interfaces=True)

    @property
    def is_triggered(self) -> bool:
        """Whether frames come only when something triggers them."""
        return self.features.get("TriggerMode") == "On"


class Message(Struct, omit_defaults=True):
    """What the camera's process says: that it lives, that a frame's pixels follow,
    or why it ends.
    """

    number: int = 0  # of the frame; 0: there is none
    shape: tuple[int, int] = (0, 0)  # height, width
    lost: int = 0  # frames before it that never arrived, or not whole
    error: str = ""
    remedy: str = ""


class Genicam(camera.CameraSource):
    """Brings a camera's frames as they come, or as they are triggered."""

    def __init__(self, settings: Settings, patience: float = 60.0) -> None:
        """`patience`: seconds without a word until the producer's process counts as hung.

        UsageError when the extra is not installed, or there is no such producer.
        """
        if importlib.util.find_spec("harvesters") is None:
            raise UsageError(
                "a GenICam camera needs harvesters, which is not installed here",
                "install it: pip install 'edge-node[genicam]'",
            )
        if not Path(settings.producer).is_file():
            raise UsageError(
                f"there is no GenTL producer {settings.producer}",
                "name the .cti file of the camera vendor's package",
            )
        self._settings = settings
        self._patience = patience
        super().__init__("genicam", settings.camera or Path(settings.producer).stem)

    def _new_reader(self, on_change: Callable[[], None]) -> camera.FrameReader:
        return Reader(self._settings, self.name, on_change, self._patience)


class Reader(camera.FrameReader):
    """Reads the frames that the camera's process sends."""

    def __init__(
        self, settings: Settings, name: str, on_change: Callable[[], None], patience: float
    ) -> None:
        frames_ahead = _AHEAD if settings.is_triggered else camera.AHEAD
        super().__init__(on_change, ahead=frames_ahead)
        self._settings = settings
        self._patience = patience
        self._source = name
        self.lost = 0  # frames that never arrived, or not whole
        self._warned = -_WARN_EVERY

    def _read(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _PROCESS, msgspec.json.encode(self._settings).decode()],
            stdin=subprocess.PIPE,  # whose end tells it to stop
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # vendors' libraries grumble
            bufsize=0,
            env=environment_without_secrets(),
            start_new_session=True,  # Ctrl-C is for us
        )
        assert process.stdin
        assert process.stdout
        try:
            while True:
                self._read_message(process.stdout)
        except EOFError:
            pass  # the process has ended, or `stop` is set
        finally:
            process.stdin.close()
            process.stdout.close()
            try:
                process.wait(_CLOSE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.error = f"has lost its producer, whose process ended with {process.returncode}"
        self.remedy = "update the vendor's package, and see whether its viewer shows the camera"

    def _read_message(self, pipe: IO[bytes]) -> None:
        head = bytearray(LENGTH.size)
        self._fill(memoryview(head), pipe)
        body = bytearray(*LENGTH.unpack(head))
        self._fill(memoryview(body), pipe)
        message = msgspec.json.decode(body, type=Message)
        if message.error:
            raise EdgeNodeError(message.error, message.remedy)
        if message.lost:
            self._warn_lost(message.lost)
        if message.number:
            pixels = np.empty((*message.shape, 3), np.uint8)
            self._fill(pixels.data.cast("B"), pipe)
            self._put((message.number, pixels))

    def _fill(self, wanted: memoryview, pipe: Any) -> None:
        """Read so many bytes; EOFError when the process ends or `stop` is set,
        EdgeNodeError when it hangs.
        """
        ready = select.poll()
        ready.register(pipe, select.POLLIN)
        deadline = time.monotonic() + self._patience
        while wanted:
            count = pipe.readinto(wanted) if ready.poll(_POLL) else None
            if count == 0 or self.stop.is_set():
                raise EOFError
            if count is None and time.monotonic() > deadline:
                raise EdgeNodeError(
                    "hangs in its producer", "see whether the vendor's viewer shows the camera"
                )
            wanted = wanted[count or 0 :]

    def _warn_lost(self, count: int) -> None:
        self.lost += count
        if time.monotonic() - self._warned > _WARN_EVERY:
            self._warned = time.monotonic()
            _log.warning(
                "%s: %d frames did not arrive, or not whole, so far", self._source, self.lost
            )
