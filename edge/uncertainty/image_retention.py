"""Retention of images that a person should look at or label, in a folder of bounded size."""

import contextlib
import io
import itertools
import logging
import queue
import random
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray
from PIL import Image

from broker_config.storage import disk
from edge.inference.outcomes import Box, Verdict
from edge.inference.pipeline import Inspection

_QUEUED = 8  # images at most that wait for the disk; others are dropped
_CLOSING = 5  # seconds to write queued images
# of a kept image's file name: time, and id of the verdict
STEM = re.compile(r"\d{8}T\d{9}-[0-9a-f]{8}")
LARGEST_SIDECAR = 1 << 22  # bytes of the JSON beside a kept image; an embedding is most of it
OVERRULED = "overruled"  # the doubt of a person
# "": a camera's
_SUFFIXES = {"JPEG": "jpg", "PNG": "png", "BMP": "bmp", "TIFF": "tif", "WEBP": "webp", "": "png"}

_log = logging.getLogger(__name__)


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[keep]` of a line's settings: which images are kept, where, and how many."""

    path: Annotated[str, Meta(min_length=1)]  # folder; made if need be
    what: Literal["doubtful", "defects", "all"] = "doubtful"
    megabytes: Annotated[int, Meta(ge=1)] = 1000
    images: Annotated[int, Meta(ge=1)] = 10_000
    # share of all images that is kept at random besides
    sample: Annotated[float, Meta(ge=0, le=1)] = 0.0
    annotate: bool = False  # put an annotated picture beside each


class KeptImage(Verdict, frozen=True, kw_only=True, tag_field="type", tag="Verdict"):
    """What stands beside a kept image: its verdict, and what the model saw in it."""

    seen: Box | None = None  # the tile that decided, in the frame's pixels; None: the whole frame
    # float16 [EMBEDDED], see `Reference.embedding`; nothing without a reference
    embedding: bytes = b""
    sampled: bool = False  # kept at random, whatever the verdict

    @property
    def numbers(self) -> NDArray[np.float32] | None:
        """The embedding, if there is one."""
        return np.frombuffer(self.embedding, "<f2").astype(np.float32) if self.embedding else None

    @classmethod
    def of(cls, inspection: Inspection, kept: str, *, sampled: bool = False) -> "KeptImage":
        """Of an inspection, whose image is kept in the file of this name."""
        features = inspection.outputs.features
        reference = inspection.model.predictor.reference
        box = inspection.tiled.boxes[inspection.tile]
        embedding = b""
        if features is not None and reference is not None:
            embedding = reference.embedding(features[inspection.tile]).astype("<f2").tobytes()
        whole = (box.width, box.height) == inspection.tiled.photo.image.size
        fields = msgspec.structs.asdict(inspection.verdict)
        seen = None if whole else box
        fields |= {"kept": kept, "seen": seen, "embedding": embedding, "sampled": sampled}
        return cls(**fields)


class _Job(NamedTuple):
    """An image to be written.

    A file is already open, since its source may move or remove it meanwhile.
    """

    data: bytes | BinaryIO | NDArray[np.uint8]
    image: KeptImage
    inspection: Inspection | None  # for the annotated picture, where one is wanted


class _Kept(NamedTuple):
    """The files of a kept image, and their size together."""

    files: tuple[Path, ...]
    bytes: int


class ImageRetention:
    """The monitor that keeps images as they came (a camera's as PNG),
    their verdicts as JSON beside them.

    The oldest make room for new ones. It writes in its own thread: a slow disk costs images, never
    time. Images kept before a restart count; other files in the folder are left alone.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises EdgeNodeError when the folder cannot be made or read."""
        self._settings = settings
        self.folder = Path(settings.path)
        with disk.writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._kept = dict(_find_kept(self.folder))  # by stem, the oldest first
        self._bytes = sum(each.bytes for each in self._kept.values())
        self._lock = threading.Lock()  # of these two
        self._random = random.Random()
        self.lost = 0  # images dropped for lack of room, in the queue or on the disk
        self._queue: queue.Queue[_Job | None] = queue.Queue(_QUEUED)
        self._thread = threading.Thread(target=self._write_all, name="keep", daemon=True)
        self._thread.start()

    def __call__(self, inspection: Inspection) -> Verdict:
        """The verdict, with the name of the file in which its image will be kept."""
        verdict = inspection.verdict
        wanted = {"doubtful": bool(verdict.doubts), "defects": verdict.defect, "all": True}
        sampled = self._random.random() < self._settings.sample
        if not (sampled or wanted[self._settings.what]):
            return verdict
        kept = f"{_stem(verdict)}.{_SUFFIXES[inspection.tiled.photo.format]}"
        try:
            data = (
                disk.open_regular(inspection.frame.data)
                if isinstance(inspection.frame.data, Path)
                else inspection.frame.data
            )
            amended = msgspec.structs.replace(verdict, kept=kept)
            drawn = inspection._replace(verdict=amended) if self._settings.annotate else None
            self._queue.put_nowait(
                _Job(data, KeptImage.of(inspection, kept, sampled=sampled), drawn)
            )
        except (OSError, queue.Full) as error:
            reason = "too many wait for the disk" if isinstance(error, queue.Full) else error
            self._drop(verdict, reason)
            return verdict
        return amended

    def keep(self, inspection: Inspection) -> str:
        """Keep an image that a person has overruled, if it is not kept already;
        the name of its file.

        Waits for the disk. OSError if that fails.
        """
        self._queue.join()  # it may be on its way
        verdict = inspection.verdict
        file = self.folder / (verdict.kept or f"{_stem(verdict)}.png")
        sidecar = file.with_suffix(".json")
        if file.exists():
            image = msgspec.json.decode(disk.read_regular(sidecar, LARGEST_SIDECAR), type=KeptImage)
            disk.replace_bytes(sidecar, _sidecar(_doubted(image)))
        else:  # its source may have removed it: what was decoded of it is kept
            pixels = np.asarray(inspection.tiled.photo.image.convert("RGB"))
            self._write(_Job(pixels, _doubted(KeptImage.of(inspection, file.name)), None))
        return file.name

    def delete(self, names: Iterable[str]) -> None:
        """Delete kept images, by the names of their files, with what stands beside them."""
        with self._lock:
            for name in names:
                self._delete(Path(name).stem)

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
                self._drop(job.image, error)
            finally:
                self._queue.task_done()

    def _write(self, job: _Job) -> None:
        image = self.folder / str(job.image.kept)
        files = {image: _content(job.data), image.with_suffix(".json"): _sidecar(job.image)}
        if job.inspection:
            from edge.inference.annotation import annotate  # noqa: PLC0415  (only some lines draw)

            files[image.with_suffix(".annotated.jpg")] = encode(
                annotate(job.inspection), "JPEG", quality=90
            )
        fresh = _Kept(tuple(files), sum(map(len, files.values())))
        most = self._settings.megabytes * 1_000_000
        if fresh.bytes > most:
            raise OSError(f"it is larger than megabytes = {self._settings.megabytes}")
        with self._lock:
            while self._kept and (
                len(self._kept) >= self._settings.images or self._bytes + fresh.bytes > most
            ):
                self._delete(next(iter(self._kept)))
            try:
                for path, content in files.items():
                    disk.replace_bytes(path, content)
            except OSError:
                with contextlib.suppress(OSError):  # nor may partial files take up room
                    _unlink((*files, *(path.with_name(f"{path.name}.tmp") for path in files)))
                raise
            self._kept[image.stem] = fresh
            self._bytes += fresh.bytes

    def _delete(self, stem: str) -> None:
        if found := self._kept.get(stem):
            _unlink(found.files)
            self._bytes -= found.bytes
            del self._kept[stem]

    def _drop(self, verdict: Verdict, reason: object) -> None:
        self.lost += 1
        if self.lost & (self.lost - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
            _log.error("%s is not kept (%d so far): %s", verdict.image, self.lost, reason)


def _content(data: bytes | BinaryIO | NDArray[np.uint8]) -> bytes:
    if isinstance(data, bytes):
        return data
    if isinstance(data, np.ndarray):
        return encode(Image.fromarray(data), "PNG", compress_level=1)
    with data:
        return data.read()


def encode(image: Image.Image, format_: str, **options: int) -> bytes:
    """An image file's content."""
    image.save(out := io.BytesIO(), format_, **options)
    return out.getvalue()


def _find_kept(folder: Path) -> Iterator[tuple[str, _Kept]]:
    """The kept images in a folder by their stems, the oldest first."""
    found = sorted(path for path in folder.iterdir() if STEM.fullmatch(path.name.partition(".")[0]))
    for stem, files in itertools.groupby(found, lambda path: path.name.partition(".")[0]):
        together = tuple(files)
        yield stem, _Kept(together, sum(path.stat().st_size for path in together))


def _stem(verdict: Verdict) -> str:
    return f"{re.sub(r'[^0-9T]', '', verdict.time.partition('+')[0])}-{verdict.id[:8]}"


def _doubted(image: KeptImage) -> KeptImage:
    return msgspec.structs.replace(
        image, doubts=(*(each for each in image.doubts if each != OVERRULED), OVERRULED)
    )


def _sidecar(image: KeptImage) -> bytes:
    return msgspec.json.format(msgspec.json.encode(image))


def _unlink(files: Iterable[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)
