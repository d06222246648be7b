"""Decoding: every kind of image file becomes the same kind of array,
or an error that says what to do.
"""

import contextlib
import io
import itertools
import os
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageFile

from edge.inference import image_decoding
from edge.inference.image_decoding import (
    DepthWatch,
    ImageError,
    SlowImageError,
    decode_image,
    read_image,
)
from tests.support.counted_calls import count_calls
from tests.support.hostile_images import SLOW, many_scans, strange, transparent_png

SIZE = 8
GRAY = np.tile(np.linspace(0, 255, 32).astype(np.uint8), (32, 1))  # [32, 32], dark to bright


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def plain(color: tuple[int, ...], mode: str = "RGB") -> Image.Image:
    return Image.new(mode, (32, 24), color)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "TIFF", "WEBP"])
def test_each_format_becomes_rgb_bytes_of_the_asked_size(kind):
    pixels = decode_image(encoded(plain((200, 100, 50)), kind), SIZE)
    assert pixels.shape == (SIZE, SIZE, 3)
    assert pixels.dtype == np.uint8
    assert np.abs(pixels.astype(int) - (200, 100, 50)).max() <= 3


def test_every_suffix_names_a_format_that_is_read():
    registered = Image.registered_extensions()
    assert {registered[suffix] for suffix in image_decoding.SUFFIXES} == set(
        image_decoding._FORMATS
    )


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (plain((200,), "L"), (200, 200, 200)),
        (plain((1,), "1"), (255, 255, 255)),
        (plain((200, 100, 50)).quantize(), (200, 100, 50)),
        (plain((200, 100, 50, 255), "RGBA"), (200, 100, 50)),
        (plain((200, 100, 50, 128), "RGBA"), (100, 50, 25)),
        (plain((200, 100, 50, 0), "RGBA"), (0, 0, 0)),
        (plain((200, 128), "LA"), (100, 100, 100)),
    ],
    ids=[
        "gray",
        "one bit",
        "palette",
        "opaque",
        "half transparent",
        "transparent",
        "gray half transparent",
    ],
)
def test_each_mode_becomes_rgb_with_transparency_over_black(image, expected):
    assert np.abs(decode_image(encoded(image), SIZE).astype(int) - expected).max() <= 1


def test_a_palette_with_a_transparent_color_is_laid_over_black():
    image = plain((200, 100, 50)).quantize()
    assert decode_image(encoded(image, transparency=0), SIZE).max() == 0


def test_a_cmyk_photograph_becomes_rgb():
    image = plain((255, 0, 0)).convert("CMYK")
    assert np.abs(decode_image(encoded(image, "JPEG"), SIZE).astype(int) - (255, 0, 0)).max() <= 3


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_gray_is_scaled_from_its_full_range(kind):
    deep = Image.fromarray(GRAY.astype(np.uint16) * 257)
    assert np.array_equal(
        decode_image(encoded(deep, kind), SIZE), decode_image(encoded(Image.fromarray(GRAY)), SIZE)
    )


def test_the_exif_orientation_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to view
    turned = decode_image(encoded(Image.fromarray(GRAY), "JPEG", exif=exif, quality=100), SIZE)
    upright = decode_image(encoded(Image.fromarray(np.rot90(GRAY, -1)), "JPEG", quality=100), SIZE)
    assert np.abs(turned.astype(int) - upright).max() <= 1
    assert turned[0].mean() < turned[-1].mean()


def test_shrinking_averages_instead_of_picking_pixels():
    checkerboard = np.indices((64, 64)).sum(0) % 2 * 255
    pixels = decode_image(encoded(Image.fromarray(checkerboard.astype(np.uint8))), SIZE)
    assert np.abs(pixels.astype(int) - 127).max() <= 4


def test_an_image_of_the_right_size_keeps_its_pixels():
    pixels = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), np.uint8)
    assert np.array_equal(decode_image(encoded(Image.fromarray(pixels)), SIZE), pixels)


def test_a_path_decodes_as_its_bytes_do(tmp_path):
    path = tmp_path / "part.png"
    path.write_bytes(encoded(Image.fromarray(GRAY)))
    assert np.array_equal(decode_image(path, SIZE), decode_image(path.read_bytes(), SIZE))


def header_of_a_bomb() -> bytes:
    """A PNG of 60,000 x 60,000 pixels in a few bytes."""
    small = bytearray(encoded(Image.new("L", (1, 1))))
    ihdr = b"IHDR" + (60_000).to_bytes(4, "big") * 2 + small[24:29]
    small[12:33] = ihdr + zlib.crc32(ihdr).to_bytes(4, "big")
    return bytes(small)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (b"not an image at all", "not a whole image"),
        (encoded(Image.fromarray(GRAY))[:-40], "not a whole image"),
        (encoded(Image.fromarray(GRAY), "JPEG")[:-200], "not a whole image"),
        (encoded(Image.fromarray(GRAY), "BMP")[:-200], "not a whole image"),
        (encoded(Image.fromarray(GRAY), "GIF"), "not a whole image"),
        (encoded(Image.fromarray(GRAY.astype(np.float32)), "TIFF"), "32-bit"),
        (header_of_a_bomb(), "pixels"),
    ],
    ids=["empty", "text", "cut PNG", "cut JPEG", "cut BMP", "format not served", "32-bit", "bomb"],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_what_is_no_whole_image_is_named_with_a_remedy(data, why):
    with pytest.raises(ImageError, match=why) as caught:
        decode_image(data, SIZE, "part-7.png")
    assert caught.value.what.startswith("part-7.png")
    assert caught.value.remedy


def test_more_pixels_than_the_limit_are_refused_before_they_are_unpacked(monkeypatch):
    monkeypatch.setattr(image_decoding, "MAX_PIXELS", 32 * 32)
    decode_image(encoded(Image.fromarray(GRAY)), SIZE)
    monkeypatch.setattr(image_decoding, "MAX_PIXELS", 32 * 32 - 1)
    with pytest.raises(ImageError, match="32 x 32 pixels"):
        decode_image(encoded(Image.fromarray(GRAY)), SIZE)


def test_a_side_beyond_the_limit_is_refused_since_memory_to_resize_it_grows_with_the_side():
    assert decode_image(encoded(Image.new("L", (1, image_decoding.MAX_SIDE))), SIZE).shape == (
        SIZE,
        SIZE,
        3,
    )
    for size in ((image_decoding.MAX_SIDE + 1, 1), (1, image_decoding.MAX_SIDE + 1)):
        with pytest.raises(ImageError, match="65536 pixels"):
            decode_image(encoded(Image.new("L", size)), SIZE)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ImageError, match=r"gone\.png.*No such file"):
        decode_image(tmp_path / "gone.png", SIZE)
    with pytest.raises(ImageError, match="Is a directory"):
        decode_image(tmp_path, SIZE)


def test_a_pipe_under_an_images_name_keeps_nobody_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ImageError, match="pipe or a device"):
        decode_image(tmp_path / "pipe.png", SIZE)


def test_a_file_beyond_the_size_limit_is_not_even_opened(tmp_path):
    path = tmp_path / "huge.bmp"
    with path.open("wb") as file:
        file.truncate(image_decoding.MAX_BYTES + 1)
    with pytest.raises(ImageError, match="64 MiB"):
        decode_image(path, SIZE)


WHOLE = [encoded(Image.fromarray(GRAY), kind) for kind in ("JPEG", "PNG", "BMP", "TIFF", "WEBP")]


def test_of_several_pictures_in_a_file_the_first_counts():
    pages = [plain((200, 100, 50)), plain((0, 0, 0))]
    for kind in ("TIFF", "WEBP", "PNG"):
        data = encoded(pages[0], kind, save_all=True, append_images=pages[1:])
        assert np.abs(decode_image(data, SIZE).astype(int) - (200, 100, 50)).max() <= 3


def test_a_colour_profile_is_ignored():
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    assert np.array_equal(
        decode_image(encoded(plain((200, 100, 50)), icc_profile=profile), SIZE)[0, 0],
        (200, 100, 50),
    )


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_what_a_large_image_becomes_does_not_depend_on_the_bands_in_which_it_is_unpacked(mode):
    """Of 256 rows: its parts become what the whole does."""
    pixels = np.random.default_rng(7).integers(0, 256, (600, 20, 4), np.uint8)
    image = (
        Image.fromarray(pixels.view(np.uint16)[..., 0])
        if mode == "I;16"
        else Image.fromarray(pixels).convert(mode)
    )
    whole = np.asarray(read_image(encoded(image, "TIFF")).image)
    for top, bottom in itertools.pairwise((0, 99, 270, 500, 600)):
        part = read_image(encoded(image.crop((0, top, image.width, bottom)), "TIFF")).image
        assert np.array_equal(np.asarray(part), whole[top:bottom])


def test_a_large_image_is_unpacked_in_bands_else_it_would_take_several_times_its_memory(
    monkeypatch,
):
    """A small file of 16 million pixels."""
    rows, crop = [], Image.Image.crop
    monkeypatch.setattr(
        Image.Image, "crop", lambda image, box: rows.append(box[3] - box[1]) or crop(image, box)
    )
    assert image_decoding._decode(transparent_png(), "part").image.size == (4000, 4000)
    assert sum(rows) == 4000
    assert max(rows) <= 256


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow grumbles about broken TIFF tags
@given(st.data())
def test_damaged_bytes_give_an_image_or_an_image_error_and_nothing_else(data):
    content = bytearray(data.draw(st.sampled_from(WHOLE)))
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut_tiles = data.draw(st.integers(1, len(content)))
    with contextlib.suppress(ImageError):
        assert decode_image(bytes(content[:cut_tiles]), SIZE).shape == (SIZE, SIZE, 3)


def test_decoding_leaves_pillows_global_settings_alone():
    def settings() -> tuple[int | None, bool]:
        return Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES

    before = settings()
    decode_image(WHOLE[0], SIZE)
    assert settings() == before


# ---------------------------------------------------------------- what can take long


@pytest.mark.parametrize("hostile", SLOW)
def test_no_image_takes_longer_than_its_time(hostile):
    """Of the processor: minutes otherwise."""
    with pytest.raises(ImageError, match=r"part-7.*0\.1 s"):
        decode_image(hostile(), SIZE, "part-7", 0.1)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_files_that_lie_about_their_size_are_refused_and_of_many_pictures_the_first_is_taken():
    for kind, content in strange().items():

        def decode(content: bytes = content, kind: str = kind) -> None:
            with contextlib.suppress(ImageError):
                assert decode_image(content, SIZE, kind, 2.0).shape == (SIZE, SIZE, 3)

        # others are decoded in a process that has two seconds
        assert count_calls(decode) < 1_000_000, kind


def test_a_file_of_thousands_of_damaged_tags_says_nothing_in_the_log(tmp_path):
    (tmp_path / "damaged.png").write_bytes(strange()["PNG of overlapping tags"])
    script = "import sys; from pathlib import Path; from edge.inference.image_decoding import *; "
    script += "read_image(Path(sys.argv[1]))"
    read = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "damaged.png"], capture_output=True, check=True
    )
    assert (read.stdout, read.stderr) == (b"", b"")


def test_who_wants_quick_images_only_is_told_of_others_before_anything_is_decoded():
    with pytest.raises(SlowImageError):
        decode_image(many_scans(), SIZE, seconds=0)
    assert decode_image(encoded(plain((1, 2, 3))), SIZE, seconds=0).shape == (SIZE, SIZE, 3)


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_an_image_that_is_decoded_elsewhere_is_the_same(mode, tmp_path):
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "Maker"  # to be turned
    pixels = np.random.default_rng(3).integers(0, 256, (40, 30, 3), np.uint8)
    whole = encoded(Image.fromarray(pixels).convert(mode), "TIFF", exif=exif)
    here, elsewhere = image_decoding._decode(whole, "part"), read_image(whole, "part")
    assert np.array_equal(np.asarray(elsewhere.image), np.asarray(here.image))
    assert elsewhere._replace(image=None) == here._replace(image=None)
    assert elsewhere.camera == "Maker"


def test_what_is_no_image_elsewhere_is_named_as_it_is_here():
    with pytest.raises(ImageError, match=r"part-\\udcff.*whole"):
        decode_image(encoded(plain((1, 2, 3)), "TIFF")[:50], SIZE, "part-\udcff")


def test_a_decoder_that_crashes_costs_one_image():
    with ThreadPoolExecutor() as pool:
        decoding = pool.submit(decode_image, SLOW[0](), SIZE, "part")
        while not decoding.done():
            for process in psutil.Process().children():
                with contextlib.suppress(psutil.Error):  # it has just ended
                    if "edge.inference.decoder_process" in process.cmdline():
                        process.kill()
        with pytest.raises(ImageError, match=r"part.*-9"):
            decoding.result()
    assert decode_image(encoded(plain((1, 2, 3)), "TIFF"), SIZE).shape == (SIZE, SIZE, 3)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize(("bits", "is_told"), [(12, True), (14, True), (16, False)])
def test_a_line_is_told_once_of_images_of_16_bits_that_use_fewer(
    bits: int, is_told: bool, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """However they are decoded: TIFF may go to a process of its own."""
    deep = GRAY.astype(np.uint16) << (bits - 8)
    deep[0, 0] = (1 << bits) - 1
    data = encoded(Image.fromarray(deep), kind)
    watch = DepthWatch()
    for _ in range(30):
        watch.look(read_image(data))
    told = [each.getMessage() for each in caplog.records]
    assert len(told) == int(is_told)
    assert all(str(1 << (16 - bits)) in text for text in told)


def test_a_few_dark_images_of_16_bits_among_others_are_no_matter(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = DepthWatch()
    for scale in (1, 1, 1, 256, 1, 1, 1, 1, 1, 1, 1, 1):
        watch.look(read_image(encoded(Image.fromarray(GRAY.astype(np.uint16) * scale), "PNG")))
    assert not caplog.records
