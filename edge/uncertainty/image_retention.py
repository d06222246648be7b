"""Images that somebody should look at or label, kept in a folder that does not grow beyond its limits."""

import contextlib
import io
import itertools
import logging
import queue
import re
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray
from PIL import Image

from broker_config.storage import disk
from edge.inference.pipeline import Inspection
from edge.inference.verdict import Verdict

_WAITING = 8  # images for the disk; more are let go
_CLOSING = 5  # seconds for what is still waiting
_OURS = re.compile(r"\d{8}T\d{9}-[0-9a-f]{8}")  # a kept image's stem: when, and of which verdict
_SUFFIXES = {"JPEG": "jpg", "PNG": "png", "BMP": "bmp", "TIFF": "tif", "WEBP": "webp", "": "png"}  # "": a camera's

_log = logging.getLogger(__name__)


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[keep]` of a line's settings: which images are kept, where, and how many."""

    path: Annotated[str, Meta(min_length=1)]  # folder; made if need be
    what: Literal["doubtful", "defects", "all"] = "doubtful"
    megabytes: Annotated[int, Meta(ge=1)] = 1000
    images: Annotated[int, Meta(ge=1)] = 10_000
    annotate: bool = False  # put a picture of what was seen beside each


class _Order(NamedTuple):
    """An image to be written. A file's is open, since its source may move or remove it meanwhile."""

    stem: str
    data: bytes | BinaryIO | NDArray[np.uint8]
    verdict: Verdict
    inspection: Inspection | None  # for the picture, where one is wanted


class _Kept(NamedTuple):
    """An image that was, its verdict, and their size together."""

    files: tuple[Path, ...]
    bytes: int


class ImageRetention:
    """Writes images as they came (a camera's as PNG) and their verdicts as JSON beside them; the oldest make room.

    It has a thread of its own: a slow disk costs images, never time. What the folder held before counts, other files
    in it are left alone.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises EdgeNodeError when the folder cannot be made or read."""
        self._settings, self._folder = settings, Path(settings.path)
        with disk.writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._kept = deque(_kept(self._folder))
        self._bytes = sum(each.bytes for each in self._kept)
        self.lost = 0  # images that found no room: in the queue, or on the disk
        self._queue: queue.Queue[_Order | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._write_all, name="keep", daemon=True)
        self._thread.start()

    def __call__(self, inspection: Inspection) -> Verdict:
        """The verdict, with the name of the file in which its image will be."""
        verdict = inspection.verdict
        wanted = {"doubtful": bool(verdict.doubts), "defects": verdict.defect, "all": True}
        if not wanted[self._settings.what]:
            return verdict
        stem = f"{re.sub(r'[^0-9T]', '', verdict.time.partition('+')[0])}-{verdict.id[:8]}"
        try:
            data = (
                inspection.frame.data.open("rb") if isinstance(inspection.frame.data, Path) else inspection.frame.data
            )
            told = msgspec.structs.replace(verdict, kept=f"{stem}.{_SUFFIXES[inspection.tiled.photo.format]}")
            drawn = inspection._replace(verdict=told) if self._settings.annotate else None
            self._queue.put_nowait(_Order(stem, data, told, drawn))
        except (OSError, queue.Full) as error:
            self._lose(verdict, "too many wait for the disk" if isinstance(error, queue.Full) else error)
            return verdict
        return told

    def close(self) -> None:
        """Write what is still waiting, within seconds."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_CLOSING)
        self._thread.join(_CLOSING)

    def _write_all(self) -> None:
        while order := self._queue.get():
            try:
                self._write(order)
            except Exception as error:  # a full disk, a broken library: it may be better with the next image
                self._lose(order.verdict, error)
            finally:
                self._queue.task_done()

    def _write(self, order: _Order) -> None:
        files = {
            self._folder / str(order.verdict.kept): _bytes(order.data),
            self._folder / f"{order.stem}.json": msgspec.json.format(msgspec.json.encode(order.verdict)),
        }
        if order.inspection:
            from edge.inference.annotation import annotate  # noqa: PLC0415  (only some lines draw)

            files[self._folder / f"{order.stem}.annotated.jpg"] = _encoded(
                annotate(order.inspection), "JPEG", quality=90
            )
        fresh, most = _Kept(tuple(files), sum(map(len, files.values()))), self._settings.megabytes * 1_000_000
        if fresh.bytes > most:
            raise OSError(f"it is larger than megabytes = {self._settings.megabytes}")
        while self._kept and (len(self._kept) >= self._settings.images or self._bytes + fresh.bytes > most):
            self._delete(self._kept[0])
            self._bytes -= self._kept.popleft().bytes
        try:
            for path, content in files.items():
                disk.replace_bytes(path, content)
        except OSError:
            with contextlib.suppress(OSError):  # nor may what was begun take up room
                self._delete(_Kept((*files, *(path.with_name(f"{path.name}.tmp") for path in files)), 0))
            raise
        self._kept.append(fresh)
        self._bytes += fresh.bytes

    def _delete(self, kept: _Kept) -> None:
        for path in kept.files:
            path.unlink(missing_ok=True)

    def _lose(self, verdict: Verdict, reason: object) -> None:
        self.lost += 1
        if self.lost & (self.lost - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
            _log.error("%s is not kept (%d so far): %s", verdict.image, self.lost, reason)


def _bytes(data: bytes | BinaryIO | NDArray[np.uint8]) -> bytes:
    if isinstance(data, bytes):
        return data
    if isinstance(data, np.ndarray):
        return _encoded(Image.fromarray(data), "PNG", compress_level=1)
    with data:
        return data.read()


def _encoded(image: Image.Image, format_: str, **options: int) -> bytes:
    image.save(out := io.BytesIO(), format_, **options)
    return out.getvalue()


def _kept(folder: Path) -> Iterator[_Kept]:
    """The kept images in a folder, the oldest first."""
    found = sorted(path for path in folder.iterdir() if _OURS.fullmatch(path.name.partition(".")[0]))
    for _, files in itertools.groupby(found, lambda path: path.name.partition(".")[0]):
        both = tuple(files)
        yield _Kept(both, sum(path.stat().st_size for path in both))
