"""What is known to be decoded quickly, and what is not: told from a file's structure."""

import io
import struct

import pytest
from PIL import Image

from edge.inference.decoding_effort import is_quick
from tests.support.hostile_images import SLOW, many_scans


def encoded(kind: str, mode: str = "RGB", side: int = 400, **options: object) -> bytes:
    out = io.BytesIO()
    Image.new(mode, (side, side)).save(out, kind, **options)
    return out.getvalue()


def with_thumbnail() -> bytes:
    """As cameras write them: another JPEG in the EXIF segment, with a scan of its own."""
    inner = b"Exif\0\0" + encoded("JPEG", side=64)
    return encoded("JPEG", exif=inner)


@pytest.mark.parametrize(
    "ordinary",
    [
        encoded("JPEG"),
        encoded("JPEG", "L"),
        encoded("JPEG", progressive=True, side=2000),
        encoded("JPEG", icc_profile=bytes(300_000)),
        with_thumbnail(),
        encoded("PNG"),
        encoded("PNG", "RGBA"),
        encoded("PNG", "P", transparency=0),
        encoded("PNG", "I;16"),
        encoded("BMP"),
        encoded("BMP", "P"),
    ],
)
def test_ordinary_files_are_quick_whole_and_cut_off(ordinary):
    assert is_quick(ordinary)
    assert is_quick(ordinary[: len(ordinary) // 2])


@pytest.mark.parametrize("hostile", SLOW)
def test_hostile_files_are_not(hostile):
    assert not is_quick(hostile())


def test_scans_are_counted_in_proportion_to_the_pixels():
    assert is_quick(many_scans(repeats=50, side=1000))
    assert not is_quick(many_scans(repeats=70, side=1000))


def test_a_frame_that_is_told_twice_counts_with_its_larger_size():
    small = encoded("JPEG", side=8, progressive=True)
    frame = small.index(b"\xff\xc2")
    head = bytearray(small[frame : frame + 2 + struct.unpack_from(">H", small, frame + 2)[0]])
    struct.pack_into(">HH", head, 5, 9000, 9000)
    assert not is_quick(small[:frame] + head + small[frame:])


@pytest.mark.parametrize("kind", ["TIFF", "WEBP"])
def test_of_other_formats_nothing_is_known(kind):
    assert not is_quick(encoded(kind))
