"""The process of a GenICam camera, in which its vendor's GenTL producer runs and frames become
RGB.
"""

import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from broker_config.protocol.errors import EdgeNodeError, abbreviate, suggest
from edge.sources.camera import FrameSelector
from edge_node.extensions.genicam.source import LENGTH, Message, Settings

_BUFFERS = 8  # frames that the producer holds
_ALIVE = 1.0  # seconds without a frame until the process says that it is alive
_SILENCE = 10.0  # seconds without a frame until a camera that is not triggered counts as gone
_POLL = 100  # milliseconds

_FORMAT = re.compile(
    r"(?:(Mono|BayerRG|BayerGR|BayerGB|BayerBG)(8|10|12|14|16)|(RGB|BGR|RGBa|BGRa)8)"
)
_THROWN = re.compile(r" : \w+Exception thrown")  # what GenApi adds about itself
# which are red, green, blue
_CHANNELS = {"RGB": [0, 1, 2], "BGR": [2, 1, 0], "RGBa": [0, 1, 2], "BGRa": [2, 1, 0]}
# OpenCV's names
_MOSAICS = {"BayerRG": "RGGB", "BayerGR": "GRBG", "BayerGB": "GBRG", "BayerBG": "BGGR"}

_Send = Callable[..., None]  # of a message, and the pixels that follow it


def to_rgb(name: str, values: NDArray[Any], height: int, width: int) -> NDArray[np.uint8]:
    """A frame as uint8 [height, width, 3] RGB, from values in the pixel format `name`;
    lines may be padded.

    The upper 8 bits of each value count. EdgeNodeError for another pixel format than those of
    `_FORMAT`.
    """
    mono, bits, color = check_format(name)
    rows = values.reshape(height, -1)
    if color:
        pixels = rows[:, : width * len(color)].reshape(height, width, len(color))
        return np.ascontiguousarray(pixels[..., _CHANNELS[color]])
    gray = (rows[:, :width] >> (int(bits) - 8)).astype(np.uint8)
    if mono == "Mono":
        return np.repeat(gray[..., np.newaxis], 3, axis=2)
    import cv2  # noqa: PLC0415  (slow to import)

    return np.asarray(
        cv2.cvtColor(gray, getattr(cv2, f"COLOR_Bayer{_MOSAICS[mono]}2RGB")), np.uint8
    )


def check_format(name: str) -> tuple[str, str, str]:
    """A pixel format's kind and bits, or else the order of its colors;
    EdgeNodeError unless it is supported.
    """
    found = _FORMAT.fullmatch(name)
    if not found:
        raise EdgeNodeError(
            f"sends the pixel format {name}, which is not supported",
            "write PixelFormat under features: Mono8, 10, 12 or 16, RGB8, BGR8, or BayerRG8 and "
            "its relatives, not packed",
        )
    mono, bits, color = found.groups("")
    return mono, bits, color


def set_features(node_map: Any, features: dict[str, bool | int | float | str]) -> None:
    """Write features in their order; EdgeNodeError names the first that the camera does not have
    or take, and why.
    """
    names = [node.node.name for node in node_map.nodes]
    for name, value in features.items():
        if name not in names:
            raise EdgeNodeError(f"has no feature {name}", abbreviate(suggest(name, names)))
        try:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            node_map.get_node(name).from_string(text)
        except Exception as error:  # GenApi's own
            raise EdgeNodeError(
                f"does not take {name} = {value!r}: {abbreviate(_THROWN.split(str(error))[0])}",
                "the vendor's viewer shows what it takes; what a feature depends on must stand "
                "before it",
            ) from error


def acquire(settings: Settings, send: _Send, stop: threading.Event) -> None:
    """Send each frame until `stop` is set; EdgeNodeError when that is not possible any more."""
    try:
        # An extra
        from harvesters.core import Harvester, ParameterKey, ParameterSet  # noqa: PLC0415
    # genicam loads the shared library of Python, which Debian's does without
    except ImportError as error:
        library = f"libpython{sys.version_info.major}.{sys.version_info.minor}"
        raise EdgeNodeError(
            f"cannot load the package genicam: {error}",
            f"install what is missing (Debian, Ubuntu: apt install {library})",
        ) from error
    harvester = Harvester()
    try:
        harvester.add_file(settings.producer, check_validity=True)
    except OSError as error:
        raise EdgeNodeError(
            f"cannot load its producer: {error}",
            "take the .cti file for this machine's architecture, and install what the vendor's "
            "package needs",
        ) from error
    try:
        harvester.update()
        device = _find(harvester.device_info_list, settings.camera)
        options = {
            ParameterKey.TIMEOUT_PERIOD_ON_UPDATE_EVENT_DATA_CALL: _POLL,
            ParameterKey.ENABLE_AUTO_CHUNK_DATA_UPDATE: False,
        }
        try:
            acquirer = harvester.create(device, config=ParameterSet(options))
        except Exception as error:  # GenTL's own
            raise EdgeNodeError(
                f"cannot be opened: {abbreviate(str(error))}",
                "close what else uses it, such as the vendor's viewer",
            ) from error
        _send_frames(acquirer, settings, send, stop)
    finally:
        harvester.reset()


def _find(devices: list[Any], wanted: str | None) -> Any:
    names = [_names(device) for device in devices]
    found = [
        device
        for device, its in zip(devices, names, strict=True)
        if wanted is None or wanted in its
    ]
    if not devices:
        raise EdgeNodeError(
            "finds no camera", "check cable, power and network; the vendor's viewer should show it"
        )
    if len(found) != 1:
        raise EdgeNodeError(
            "names none, or several, of the cameras "
            f"{', '.join(' or '.join(its) for its in names)}",
            "write one of these as camera",
        )
    return found[0]


def _names(device: Any) -> list[str]:
    """Serial number and user-defined name, as far as a camera has them."""
    found = []
    for name in ("serial_number", "user_defined_name"):
        with contextlib.suppress(Exception):  # GenTL's own
            found.append(getattr(device, name))
    return [name for name in found if name]


def _send_frames(acquirer: Any, settings: Settings, send: _Send, stop: threading.Event) -> None:
    node_map = acquirer.remote_device.node_map
    set_features(node_map, settings.features)
    name = node_map.PixelFormat.value
    check_format(name)
    acquirer.num_buffers = max(_BUFFERS, acquirer.min_num_buffers)
    acquirer.start()
    is_wanted = FrameSelector(settings.every, settings.rate, time.monotonic)
    number = lost = 0
    last = 0  # what the camera itself counts
    heard = time.monotonic()
    while not stop.is_set():
        began = time.monotonic()
        buffer = acquirer.try_fetch(timeout=_ALIVE)
        if buffer is None:
            if time.monotonic() - began < 0.9 * _ALIVE:  # one came, but not whole
                number = number + 1
                lost = lost + 1
                last = last and last + 1
            silent = 0 if settings.is_triggered else time.monotonic() - heard
            check_alive(node_map, silent)
            send(Message(lost=lost))
            lost = 0
            continue
        with buffer:
            heard = time.monotonic()
            frame_id = _frame_id(buffer)
            missed = max(0, frame_id - last - 1) if last else 0
            number = number + missed + 1
            lost = lost + missed
            last = frame_id
            if is_wanted(number):
                image = buffer.payload.components[0]
                pixels = to_rgb(name, image.data, image.height, image.width)
                send(
                    Message(number=number, shape=(image.height, image.width), lost=lost),
                    pixels.data,
                )
                lost = 0


def _frame_id(buffer: Any) -> int:
    """The camera's own number of a frame; 0 where the producer does not know it."""
    with contextlib.suppress(Exception):  # GenTL's own
        return int(buffer.frame_id)
    return 0


def check_alive(node_map: Any, silent: float) -> None:
    """EdgeNodeError when a camera that has been silent for these seconds is gone."""
    if silent > _SILENCE:
        raise EdgeNodeError(
            "brings no frames",
            'check its cable; if something triggers it, write TriggerMode = "On" among its '
            "features",
        )
    try:
        node_map.Width.get_value(False, True)  # of the camera itself
    except Exception as error:  # GenApi's own
        raise EdgeNodeError(
            f"does not answer any more: {abbreviate(_THROWN.split(str(error))[0])}",
            "check that it is switched on and connected",
        ) from error


def _serve() -> None:
    """Send what the camera brings to standard output, until standard input ends."""
    # a service manager's, for all processes: the line ends this one
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.disable()  # what matters is sent
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not answer
    stop = threading.Event()

    def send(message: Message, pixels: bytes | memoryview = b"") -> None:
        body = msgspec.json.encode(message)
        pipe.writelines((LENGTH.pack(len(body)), body, pixels))
        pipe.flush()

    def wait_for_end() -> None:
        sys.stdin.buffer.read()
        stop.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    try:
        acquire(msgspec.json.decode(sys.argv[1], type=Settings), send, stop)
    except Exception as error:  # GenTL's own, whatever a vendor's library says; a closed pipe
        what, remedy = (
            (error.what, error.remedy) if isinstance(error, EdgeNodeError) else (str(error), "")
        )
        with contextlib.suppress(OSError):
            send(Message(error=what or type(error).__name__, remedy=remedy))
    os._exit(0)  # past the destructors of vendors' libraries


if __name__ == "__main__":
    _serve()
