"""Image files that take minutes or gigabytes to decode, each within the limits on bytes,
pixels and sides.
"""

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
        (256, long, 1, SIDE),
        (257, long, 1, SIDE),
        (258, short, 1, 8),
        (259, short, 1, 7),
        (262, short, 1, 1),
        (273, long, 1, 8),
        (277, short, 1, 1),
        (278, long, 1, SIDE),
        (279, long, 1, len(jpeg)),
    ]
    directory = (
        struct.pack("<H", len(tags))
        + b"".join(struct.pack("<HHII", *tag) for tag in tags)
        + bytes(4)
    )
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
    return small[:33] + _chunk(b"teSt", b"") * 1_000_000 + small[33:]


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


def transparent_png_and_more() -> bytes:
    """The same, and bytes behind its end that are no chunk."""
    return transparent_png() + b"end"


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(*chunks: bytes, width: int = 64, height: int = 64) -> bytes:
    """A small PNG with other chunks before its pixels, that may claim another size."""
    small = _encoded(64, "PNG")
    head = _chunk(b"IHDR", struct.pack(">II", width, height) + small[24:29])
    return small[:8] + head + b"".join(chunks) + small[33:]


def _directory(*tags: tuple[int, int, int, int], behind: bytes = b"", following: int = 0) -> bytes:
    """TIFF's (and EXIF's) structure: tags of number, type, count, and value or offset."""
    packed = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return (
        struct.pack("<4sIH", b"II*\0", 8, len(tags))
        + packed
        + struct.pack("<I", following)
        + behind
    )


def _many_fractions() -> bytes:
    """EXIF whose maker is a million fractions, each of which becomes an object in Python."""
    return _directory((0x010F, 5, 1 << 20, 26), behind=b"\1\0\0\0\3\0\0\0" * (1 << 20))


def fractions_in_png() -> bytes:
    """A PNG with megabytes of EXIF."""
    return _png(_chunk(b"eXIf", _many_fractions()))


def fractions_in_jpeg() -> bytes:
    """A JPEG with the same, in a segment after the other."""
    small, exif = _encoded(64, "JPEG"), _many_fractions()
    pieces = [b"Exif\0\0" + exif[at : at + 65_000] for at in range(0, len(exif), 65_000)]
    return (
        small[:2]
        + b"".join(struct.pack(">HH", 0xFFE1, len(each) + 2) + each for each in pieces)
        + small[2:]
    )


def _overlapping_tags(size: int = 1_000_000, count: int = 20_000) -> bytes:
    """A TIFF of many tags that all share the same bytes."""
    tags = ((number, 7, size, 8 + 2 + 12 * count + 4) for number in range(count))
    return _directory(*tags, behind=bytes(size))


def _tiff(width: int, height: int, *others: tuple[int, int, int, int], following: int = 0) -> bytes:
    """A TIFF of one strip of 4096 bytes, and of other tags."""
    size = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
    strip = {273: (273, 4, 1, 8), 278: (278, 4, 1, 64), 279: (279, 4, 1, 4096)} | {
        each[0]: each for each in others
    }
    return _directory(
        *size, *(strip[number] for number in sorted(strip)), behind=bytes(4096), following=following
    )


def _many_directories() -> bytes:
    """A TIFF of a hundred thousand frames."""
    first = _tiff(64, 64, following=8 + 2 + 8 * 12 + 4 + 4096)
    frames = (
        struct.pack("<HHHIII", 1, 256, 4, 1, 64, len(first) + 18 * number)
        for number in range(1, 100_000)
    )
    return first + b"".join(frames)


def _tiles(side: int = 16) -> bytes:
    """A TIFF whose 62,500 tiles are all the same one."""
    count, at = (SIDE // side) ** 2, 8 + 2 + 10 * 12 + 4
    tags = (
        (256, 4, 1, SIDE),
        (257, 4, 1, SIDE),
        (258, 3, 1, 8),
        (259, 3, 1, 1),
        (262, 3, 1, 1),
        (277, 3, 1, 1),
        (322, 4, 1, side),
        (323, 4, 1, side),
        (324, 4, count, at),
        (325, 4, count, at + 4 * count),
    )
    offsets, sizes = (struct.pack("<I", each) * count for each in (at + 8 * count, side * side))
    return _directory(*tags, behind=offsets + sizes + bytes(side * side))


def _animated(kind: str, frames: int = 300) -> bytes:
    out = io.BytesIO()
    first, *others = (Image.new("L", (64, 64), number % 256) for number in range(frames))
    first.save(out, kind, save_all=True, append_images=others)
    return out.getvalue()


def _patched(content: bytes, mark: bytes, behind: int, data: bytes) -> bytes:
    """A file whose bytes so far behind a mark are others."""
    at = content.index(mark) + len(mark) + behind
    return content[:at] + data + content[at + len(data) :]


def strange() -> dict[str, bytes]:
    """What lies about its size or holds more than one picture: to be refused,
    or taken for its first, at once.
    """
    text = zlib.compress(bytes(60 << 20))
    return {
        "TIFF of overlapping tags": _overlapping_tags(),
        "TIFF of many frames": _many_directories(),
        "TIFF that follows itself": _tiff(64, 64, following=8),
        "TIFF whose EXIF is itself": _tiff(64, 64, (34665, 4, 1, 8)),
        "TIFF of many tiles": _tiles(),
        "TIFF of a billion strips": _tiff(64, 64, (273, 4, 0x3FFFFFFF, 8), (279, 4, 0x3FFFFFFF, 8)),
        "TIFF of 65,535 channels": _tiff(64, 64, (277, 3, 1, 65_535)),
        "TIFF of no pixels": _tiff(0, 0),
        "TIFF of all pixels": _tiff(2**32 - 1, 2**32 - 1),
        "PNG of overlapping tags": _png(_chunk(b"eXIf", _overlapping_tags(100_000))),
        "PNG of texts that burst": _png(_chunk(b"zTXt", b"a\0\0" + text) * 50),
        "PNG of profiles that burst": _png(_chunk(b"iCCP", b"a\0\0" + text) * 50),
        "PNG of pixels that burst": _png(_chunk(b"IDAT", text)),
        "PNG of no pixels": _png(width=0, height=0),
        "PNG of all pixels": _png(width=2**31 - 1, height=2**31 - 1),
        "PNG of many frames": _animated("PNG"),
        "JPEG of no pixels": _patched(_encoded(8, "JPEG"), b"\xff\xc0", 3, bytes(4)),
        "JPEG of many frames": _animated("MPO"),
        "BMP of no pixels": _patched(_encoded(8, "BMP"), b"BM", 16, bytes(8)),
        "BMP of all pixels": _patched(_encoded(8, "BMP"), b"BM", 16, b"\xff\xff\xff\x7f" * 2),
        "WebP of no pixels": _patched(_encoded(8, "WEBP"), b"\x9d\x01\x2a", 0, bytes(4)),
        "WebP of many frames": _animated("WEBP"),
        "GIF of many frames": _animated("GIF"),
    }


SLOW = (
    fractions_in_jpeg,
    fractions_in_png,
    many_scans,
    many_scans_in_tiff,
    many_segments,
    long_padding,
    many_chunks,
    short_runs,
    lossless_webp,
    transparent_png,
    transparent_png_and_more,
)
