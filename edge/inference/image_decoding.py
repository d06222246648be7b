"""Decoding of image files to pixels, the same for training and for the line."""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.ExifTags import Base

from broker_config.protocol.errors import UsageError
from broker_config.storage import disk
from edge.inference.decoding_effort import is_quick
from edge.inference.outcomes import Box
from edge.inference.worker_process import WorkerEndedError, WorkerProcesses

FULL_DEPTH = 16
"""Bits of gray whose full range is read as black to white."""
_USED = 15  # bits from which a dark image is as likely as a camera of so few
_LOOKED_AT = 10  # images, before anything is said
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp")
# of images that cannot be read
OTHER_SUFFIXES = (".avif", ".dng", ".gif", ".heic", ".heif", ".jp2", ".jxl")
MAX_PIXELS = 64_000_000
MAX_SIDE = 65_535  # JPEG's own; resizing needs memory that grows with the side
MAX_BYTES = 64 << 20
_BAND = 256  # rows
# in the head of every file in which edge-node has drawn on images
ANNOTATED = "edge-node: annotated picture"
_HEAD = 1024  # bytes
PATIENCE = 60.0  # seconds that decoding may take where nobody else waits for it
_FORMATS = ("JPEG", "PNG", "BMP", "TIFF", "WEBP")
_PROCESSES = WorkerProcesses("edge.inference.decoder_process")
_log = logging.getLogger(__name__)

# Pillow warns of each damaged tag, in words of its own: one file could fill a log with 65,535 of
# them.
warnings.filterwarnings("ignore", module=r"PIL\.")


class ImageError(UsageError):
    """An image that cannot be used: which one, why, and what to do."""


class Photo(NamedTuple):
    """A decoded image at its own size."""

    image: Image.Image  # mode L or RGB with full-range 8-bit channels, upright
    format: str  # JPEG, PNG, BMP, TIFF or WEBP
    mode: str  # Pillow's name of the file's own colour mode
    camera: str  # maker and model from EXIF, or empty
    bits: int = 0  # that the brightest pixel of an image of 16 bits takes; 0 for other images

    @classmethod
    def from_array(cls, pixels: NDArray[np.uint8]) -> "Photo":
        """A camera's frame, uint8 [height, width, 3] RGB; ValueError for anything else."""
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            raise ValueError(
                f"expected uint8 [height, width, 3], got {pixels.dtype} {list(pixels.shape)}"
            )
        return cls(Image.fromarray(pixels), "", "RGB", "")

    def crop(self, box: Box) -> "Photo":
        """The part within a rectangle."""
        left, top, width, height = box
        if (width, height) == self.image.size:
            return self
        return self._replace(image=self.image.crop((left, top, left + width, top + height)))

    def resize(self, size: int) -> NDArray[np.uint8]:
        """Its pixels, uint8 [size, size, 3]: resized (bilinear, antialiased,
        aspect ratio not kept) RGB.
        """
        return np.array(self.image.resize((size, size), Image.Resampling.BILINEAR).convert("RGB"))


def drop_annotated(paths: Iterable[Path]) -> list[Path]:
    """The files without those that edge-node has drawn, with marks, text or heat:
    none trains or judges a model.

    They are known by their head or, if another program has saved them since, by their name; what is
    left out is logged.
    """
    kept: list[Path] = []
    left_out: list[Path] = []
    for path in paths:
        group = left_out if _is_annotated(path) else kept
        group.append(path)
    if left_out:
        _log.warning(
            "%d annotated picture(s) are left out, the first is %s", len(left_out), left_out[0]
        )
    return kept


def annotated_tags() -> Image.Exif:
    """EXIF tags with which a file is left out."""
    tags = Image.Exif()
    tags[Base.ImageDescription] = ANNOTATED
    return tags


def _is_annotated(path: Path) -> bool:
    if path.stem.endswith(".annotated"):
        return True
    try:
        with disk.open_regular(path) as file:
            return ANNOTATED.encode() in file.read(_HEAD)
    except OSError:  # whoever wants its pixels says so
        return False


class SlowImageError(Exception):
    """An image whose decoding can take long, while only others were wanted."""


def decode_image(
    data: bytes | Path, size: int, name: str = "", seconds: float = PATIENCE
) -> NDArray[np.uint8]:
    """An image file as uint8 [size, size, 3], RGB: `read_image`, then `resize`.

    Raises as the former.
    """
    return read_image(data, name, seconds).resize(size)


def read_image(data: bytes | Path, name: str = "", seconds: float = PATIENCE) -> Photo:
    """Decode an image file at its own size.

    The result is the first frame, turned as its EXIF tag says. Transparent pixels are laid over
    black, 16-bit gray is scaled from its full range, colour profiles are ignored. Raises
    ImageError, which names it `name` (default: the path), for anything that is not a complete image
    of at most MAX_PIXELS pixels, MAX_SIDE a side, and MAX_BYTES bytes in one of the formats of
    SUFFIXES.

    A file that `decoding_effort` does not show to be quick is decoded in a process of its own,
    which is ended after so many `seconds` of the processor's time: also an ImageError. With 0
    seconds SlowImageError is raised instead.
    """
    if not name:
        name = str(data) if isinstance(data, Path) else "the image"
    # Never Pillow's own reading of paths: it maps the file, and if that is truncated meanwhile the
    # process dies.
    content = _read(data, name) if isinstance(data, Path) else data
    if len(content) > MAX_BYTES:
        raise _too_large(name)
    if not content:
        raise ImageError(
            f"{name} is empty", "check that the camera or the copy finished writing it"
        )
    if is_quick(content):
        return _decode(content, name)
    if not seconds:
        raise SlowImageError
    return _decode_elsewhere(content, name, seconds)


def _decode_elsewhere(content: bytes, name: str, seconds: float) -> Photo:
    """As `_decode`, in a process of its own."""
    try:
        answer = _PROCESSES.ask((name.encode(errors="backslashreplace"), b"\0", content), seconds)
    except WorkerEndedError as error:
        if error.is_late:
            raise ImageError(
                f"{name} takes more than {seconds:g} s to decode",
                "save it as a baseline JPEG or as PNG, or smaller",
            ) from None
        raise ImageError(
            f"{name} brings its decoder down: {error}", "use an undamaged file"
        ) from None
    except OSError as error:
        raise ImageError(
            f"{name} cannot be decoded: no process can be started ({error.strerror})",
            "free memory, or raise limits",
        ) from error
    head, _, pixels = answer.partition(b"\n")
    found = msgspec.json.decode(head, type=_Decoded | _Refused)
    if isinstance(found, _Refused):
        raise ImageError(found.what, found.remedy)
    return Photo(
        Image.frombuffer(found.mode, found.size, pixels),
        found.format,
        found.file_mode,
        found.camera,
        found.bits,
    )


class _Decoded(Struct, tag=True):
    """What precedes the pixels in a decoding process's answer."""

    mode: str
    size: tuple[int, int]
    format: str
    file_mode: str
    camera: str
    bits: int


class _Refused(Struct, tag=True):
    """The answer of a decoding process to what is no image."""

    what: str
    remedy: str


def answer_decoding(request: bytes) -> Sequence[bytes]:
    """A decoding process's answer to a request of `read_image`."""
    name, _, content = request.partition(b"\0")
    try:
        photo = _decode(content, name.decode())
    except ImageError as error:
        return [msgspec.json.encode(_Refused(error.what, error.remedy))]
    image = photo.image
    head = _Decoded(image.mode, image.size, photo.format, photo.mode, photo.camera, photo.bits)
    return msgspec.json.encode(head), b"\n", image.tobytes()


def _decode(content: bytes, name: str) -> Photo:
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            _check_pixels(image, name)
            image.load()
            mode = image.mode
            camera = _camera(image)
            bits = _count_bits(image)
            ImageOps.exif_transpose(image, in_place=True)
            return Photo(_convert(image, name), str(image.format), mode, camera, bits)
    except ImageError:
        raise
    except Exception as error:  # a hostile or broken file can raise anything inside a decoder
        reason = "its format is not known" if isinstance(error, UnidentifiedImageError) else error
        raise ImageError(
            f"{name} is not a whole image: {reason}",
            "use an undamaged JPEG, PNG, BMP, TIFF or WebP file",
        ) from error


def _camera(image: Image.Image) -> str:
    with contextlib.suppress(Exception):  # damaged tags do not make an image unusable
        exif = image.getexif()
        return " ".join(
            str(exif[tag]).strip("\0 ") for tag in (Base.Make, Base.Model) if tag in exif
        )
    return ""


def _read(path: Path, name: str) -> bytes:
    try:
        with disk.open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > MAX_BYTES:
                raise _too_large(name)
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ImageError(
            f"{name} cannot be read: {error.strerror}",
            "check that the file is there and may be read",
        ) from error


def _too_large(name: str) -> ImageError:
    return ImageError(
        f"{name} is larger than {MAX_BYTES >> 20} MiB", "crop it or save it compressed"
    )


def _check_pixels(image: Image.Image, name: str) -> None:
    """Refuse a decompression bomb before its pixels are unpacked."""
    if image.width * image.height > MAX_PIXELS:
        raise ImageError(
            f"{name} has {image.width} x {image.height} pixels, more than "
            f"{MAX_PIXELS // 1_000_000} million",
            "crop or scale it first",
        )
    if max(image.size) > MAX_SIDE:
        raise ImageError(
            f"{name} has a side of {max(image.size)} pixels, more than {MAX_SIDE}",
            "crop or scale it first",
        )


def _count_bits(image: Image.Image) -> int:
    """Return how many bits the brightest pixel takes, if the file has 16; in bands, as below."""
    if not image.mode.startswith("I;16"):
        return 0
    highest = 0
    for top in range(0, image.height, _BAND):
        band = image.crop((0, top, image.width, min(top + _BAND, image.height)))
        highest = max(highest, int(np.asarray(band).max()))
    return max(1, highest.bit_length())


def unused_factor(bits: int) -> int:
    """Return how many times too dark images are read whose brightest pixel takes so many of 16
    bits; 1 if they may well be dark.

    Cameras of 10, 12 or 14 bits often save them as they are. A single image cannot tell a camera's
    depth, so nothing is scaled by it: the line, which sees one image at a time, must read pixels as
    training did.
    """
    return 1 if bits >= _USED or not bits else 1 << (FULL_DEPTH - bits)


class DepthWatch:
    """Warns once if images of 16 bits leave the upper ones unused."""

    def __init__(self) -> None:
        self._seen = 0
        self._bits = 0  # the most that any took

    def look(self, photo: Photo) -> None:
        """Take account of an image that is about to be judged."""
        if not photo.bits or self._seen == _LOOKED_AT:
            return
        self._seen += 1
        self._bits = max(self._bits, photo.bits)
        factor = unused_factor(self._bits)
        if self._seen == _LOOKED_AT and factor > 1:
            _log.warning(
                "images of 16 bits use %d of them, and are read %d times too dark: have the camera "
                "save values times %d, and train with such images, too",
                self._bits,
                factor,
                factor,
            )


def _convert(image: Image.Image, name: str) -> Image.Image:
    """The same picture in mode L or RGB, with full-range 8-bit channels.

    It is converted in bands: intermediate results would take several times the memory of a large
    image.
    """
    if image.mode in ("L", "RGB"):
        return image
    if image.mode in ("I", "F"):
        raise ImageError(
            f"{name} has 32-bit pixels, whose range is not known",
            "save it with 8 or 16 bits a channel",
        )
    mode = "L" if image.mode == "1" or image.mode.startswith("I;16") else "RGB"
    plain = Image.new(mode, image.size)
    for top in range(0, image.height, _BAND):
        band = image.crop((0, top, image.width, min(top + _BAND, image.height)))
        plain.paste(_convert_band(band, plain.mode), (0, top))
    return plain


def _convert_band(image: Image.Image, mode: str) -> Image.Image:
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image, np.float32) / 257 + 0.5).astype(np.uint8))
    if image.has_transparency_data:
        black = Image.new("RGBA", image.size, (0, 0, 0, 255))
        return Image.alpha_composite(black, image.convert("RGBA")).convert(mode)
    return image.convert(mode)
