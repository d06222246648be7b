"""Image files of a few bytes that take minutes to decode, each within the limits on bytes, pixels and sides."""

import io
import struct
import zlib

from PIL import Image

SIDE = 4000  # pixels
REPEATS = 10_000  # scans; each takes 0.05 s


def _encoded(side: int, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    Image.new("L", (side, side), 128).save(out, kind, **options)
    return out.getvalue()


def many_scans(repeats: int = REPEATS, side: int = SIDE) -> bytes:
    """A progressive JPEG that refines its pixels again and again."""
    whole = _encoded(side, "JPEG", progressive=True)
    return whole[:-2] + whole[whole.rfind(b"\xff\xda") : -2] * repeats + whole[-2:]


def many_scans_in_tiff() -> bytes:
    """The same as the only strip of a TIFF, with as many scans as libtiff allows."""
    jpeg = many_scans(80)
    long, short = 4, 3
    tags = [
        (256, long, 1, SIDE), (257, long, 1, SIDE), (258, short, 1, 8), (259, short, 1, 7), (262, short, 1, 1),
        (273, long, 1, 8), (277, short, 1, 1), (278, long, 1, SIDE), (279, long, 1, len(jpeg)),
    ]  # fmt: skip
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + len(jpeg)) + jpeg + directory


def many_segments() -> bytes:
    """A JPEG with a million empty comments."""
    small = _encoded(64, "JPEG")
    return small[:2] + b"\xff\xfe\x00\x02" * 1_000_000 + small[2:]


def long_padding() -> bytes:
    """A JPEG whose first segment is preceded by megabytes of padding."""
    small = _encoded(64, "JPEG")
    return small[:2] + b"\xff" * 4_000_000 + small[2:]


def many_chunks() -> bytes:
    """A PNG with a million empty chunks."""
    small = _encoded(64, "PNG")
    chunk = struct.pack(">I4sI", 0, b"teSt", zlib.crc32(b"teSt"))
    return small[:33] + chunk * 1_000_000 + small[33:]


def short_runs() -> bytes:
    """A BMP of runs of one pixel, which Pillow decodes in Python."""
    pixels = (b"\x01\x05" * SIDE + b"\0\0") * 4000
    out = io.BytesIO()
    Image.new("P", (SIDE, 4000)).save(out, "BMP")
    head = bytearray(out.getvalue()[: struct.unpack_from("<I", out.getvalue(), 10)[0]])
    struct.pack_into("<II", head, 30, 1, len(pixels))  # RLE
    return bytes(head) + pixels


def lossless_webp() -> bytes:
    """A WebP of few bytes for many pixels."""
    out = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE)).save(out, "WEBP", lossless=True, method=0, quality=0)
    return out.getvalue()


def transparent_png() -> bytes:
    """A PNG whose pixels all have to be laid over black."""
    out = io.BytesIO()
    Image.new("LA", (SIDE, SIDE), (200, 100)).save(out, "PNG", compress_level=1)
    return out.getvalue()


SLOW = (
    many_scans,
    many_scans_in_tiff,
    many_segments,
    long_padding,
    many_chunks,
    short_runs,
    lossless_webp,
    transparent_png,
)
