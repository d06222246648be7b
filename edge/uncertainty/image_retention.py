"""Retention of images that a person should look at or label, in a folder of bounded size."""

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
from edge.inference.outcomes import Verdict
from edge.inference.pipeline import Inspection

_QUEUED = 8  # images at most that wait for the disk; others are dropped
_CLOSING = 5  # seconds to write queued images
_STEM = re.compile(r"\d{8}T\d{9}-[0-9a-f]{8}")  # of a kept image's file name: time, and id of the verdict
_SUFFIXES = {"JPEG": "jpg", "PNG": "png", "BMP": "bmp", "TIFF": "tif", "WEBP": "webp", "": "png"}  # "": a camera's

_log = logging.getLogger(__name__)


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[keep]` of a line's settings: which images are kept, where, and how many."""

    path: Annotated[str, Meta(min_length=1)]  # folder; made if need be
    what: Literal["doubtful", "defects", "all"] = "doubtful"
    megabytes: Annotated[int, Meta(ge=1)] = 1000
    images: Annotated[int, Meta(ge=1)] = 10_000
    annotate: bool = False  # put an annotated picture beside each


class _Job(NamedTuple):
    """An image to be written. A file is already open, since its source may move or remove it meanwhile."""

    stem: str
    data: bytes | BinaryIO | NDArray[np.uint8]
    verdict: Verdict
    inspection: Inspection | None  # for the annotated picture, where one is wanted


class _Kept(NamedTuple):
    """The files of a kept image, and their size together."""

    files: tuple[Path, ...]
    bytes: int


class ImageRetention:
    """The monitor that keeps images as they came (a camera's as PNG), their verdicts as JSON beside them.

    The oldest make room for new ones. It writes in its own thread: a slow disk costs images, never time. Images kept
    before a restart count; other files in the folder are left alone.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises EdgeNodeError when the folder cannot be made or read."""
        self._settings, self._folder = settings, Path(settings.path)
        with disk.writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._kept = deque(_find_kept(self._folder))
        self._bytes = sum(each.bytes for each in self._kept)
        self.lost = 0  # images dropped for lack of room, in the queue or on the disk
        self._queue: queue.Queue[_Job | None] = queue.Queue(_QUEUED)
        self._thread = threading.Thread(target=self._write_all, name="keep", daemon=True)
        self._thread.start()

    def __call__(self, inspection: Inspection) -> Verdict:
        """The verdict, with the name of the file in which its image will be kept."""
        verdict = inspection.verdict
        wanted = {"doubtful": bool(verdict.doubts), "defects": verdict.defect, "all": True}
        if not wanted[self._settings.what]:
            return verdict
        stem = f"{re.sub(r'[^0-9T]', '', verdict.time.partition('+')[0])}-{verdict.id[:8]}"
        try:
            data = (
                disk.open_regular(inspection.frame.data)
                if isinstance(inspection.frame.data, Path)
                else inspection.frame.data
            )
            amended = msgspec.structs.replace(verdict, kept=f"{stem}.{_SUFFIXES[inspection.tiled.photo.format]}")
            drawn = inspection._replace(verdict=amended) if self._settings.annotate else None
            self._queue.put_nowait(_Job(stem, data, amended, drawn))
        except (OSError, queue.Full) as error:
            self._drop(verdict, "too many wait for the disk" if isinstance(error, queue.Full) else error)
            return verdict
        return amended

    def close(self) -> None:
        """Write queued images, within seconds."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_CLOSING)
        self._thread.join(_CLOSING)

    def _write_all(self) -> None:
        while job := self._queue.get():
            try:
                self._write(job)
            except Exception as error:  # a full disk, a broken library: the next image may succeed
                self._drop(job.verdict, error)
            finally:
                self._queue.task_done()

    def _write(self, job: _Job) -> None:
        files = {
            self._folder / str(job.verdict.kept): _content(job.data),
            self._folder / f"{job.stem}.json": msgspec.json.format(msgspec.json.encode(job.verdict)),
        }
        if job.inspection:
            from edge.inference.annotation import annotate  # noqa: PLC0415  (only some lines draw)

            files[self._folder / f"{job.stem}.annotated.jpg"] = _encode(annotate(job.inspection), "JPEG", quality=90)
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
            with contextlib.suppress(OSError):  # nor may partial files take up room
                self._delete(_Kept((*files, *(path.with_name(f"{path.name}.tmp") for path in files)), 0))
            raise
        self._kept.append(fresh)
        self._bytes += fresh.bytes

    def _delete(self, kept: _Kept) -> None:
        for path in kept.files:
            path.unlink(missing_ok=True)

    def _drop(self, verdict: Verdict, reason: object) -> None:
        self.lost += 1
        if self.lost & (self.lost - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
            _log.error("%s is not kept (%d so far): %s", verdict.image, self.lost, reason)


def _content(data: bytes | BinaryIO | NDArray[np.uint8]) -> bytes:
    if isinstance(data, bytes):
        return data
    if isinstance(data, np.ndarray):
        return _encode(Image.fromarray(data), "PNG", compress_level=1)
    with data:
        return data.read()


def _encode(image: Image.Image, format_: str, **options: int) -> bytes:
    image.save(out := io.BytesIO(), format_, **options)
    return out.getvalue()


def _find_kept(folder: Path) -> Iterator[_Kept]:
    """The kept images in a folder, the oldest first."""
    found = sorted(path for path in folder.iterdir() if _STEM.fullmatch(path.name.partition(".")[0]))
    for _, files in itertools.groupby(found, lambda path: path.name.partition(".")[0]):
        both = tuple(files)
        yield _Kept(both, sum(path.stat().st_size for path in both))
