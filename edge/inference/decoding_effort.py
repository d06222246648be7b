"""The effort of decoding an image file, told from its structure before anything is decoded.

What is quick takes a second at most, whatever the file holds: a JPEG of few scans, a PNG of
ordinary chunks, a BMP without compression. Of others (TIFF and WebP, a JPEG that goes over its
pixels again and again, files with megabytes of metadata, of which Pillow makes Python objects)
nothing is known.
"""

import struct

_PASSES = 64_000_000  # pixels of a JPEG times its scans; of a PNG times their weight
_SEGMENTS = 256  # of a JPEG before its first scan: phones write dozens
# a PNG's chunks: so many, and one more for so many bytes
_CHUNKS = 64
_CHUNK = 4096
_WEIGHT = 8  # of a PNG's pixel that has to be converted
_METADATA = 1 << 20  # bytes of a file besides its pixels

_SCAN = 0xDA
# baseline, extended, progressive; arithmetic coding and others are rare and slow
_FRAMES = (0xC0, 0xC1, 0xC2)
# and applications' segments, and comments
_TABLES = (0xC4, *range(0xDB, 0xDE), *range(0xE0, 0xF0), 0xFE)


def is_quick(content: bytes) -> bool:
    """Whether decoding this file takes a second at most."""
    try:
        if content.startswith(b"\xff\xd8\xff"):
            return _is_quick_jpeg(content)
        if content.startswith(b"\x89PNG\r\n\x1a\n"):
            return _is_quick_png(content)
        return content.startswith(b"BM") and _is_quick_bmp(content)
    except (struct.error, IndexError):  # it ends too early
        return True


def _is_quick_jpeg(content: bytes) -> bool:
    """Whether pixels times scans are few, and so are the segments before them:
    all decoders must read them alike.
    """
    at = 2
    pixels = 0
    for _ in range(_SEGMENTS):
        mark, kind, length = struct.unpack_from(">BBH", content, at)
        if mark != 0xFF or length < 2:
            return False
        if kind == _SCAN:
            # A scan's marker is nowhere in coded data: so this is not fewer than there are.
            return at <= _METADATA and pixels * content.count(b"\xff\xda", at) <= _PASSES
        if kind in _FRAMES:
            height, width = struct.unpack_from(">HH", content, at + 5)
            pixels = max(pixels, width * height)
        elif kind not in _TABLES:
            return False
        at += 2 + length
    return False


def _is_quick_png(content: bytes) -> bool:
    """Whether its chunks are few for their bytes,
    and its pixels few for what has to be done with them.
    """
    width, height, depth, color = struct.unpack_from(">IIBB", content, 16)
    weight = 1 if depth <= 8 and color in (0, 2) else _WEIGHT  # gray, RGB
    at = 8
    metadata = 0
    for _ in range(_CHUNKS + len(content) // _CHUNK):
        if at + 8 > len(content):  # what is left is no chunk
            return bool(width * height * weight <= _PASSES and metadata <= _METADATA)
        length, kind = struct.unpack_from(">I4s", content, at)
        metadata += length if kind != b"IDAT" else 0
        if kind == b"tRNS":
            weight = _WEIGHT
        at += 12 + length
    return False


def _is_quick_bmp(content: bytes) -> bool:
    """Whether it is not compressed; the old header of 12 bytes knows no compression."""
    size, compression = struct.unpack_from("<I12xI", content, 14)
    return bool(size == 12 or compression in (0, 3))
