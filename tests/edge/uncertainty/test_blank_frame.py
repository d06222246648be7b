"""A frame that shows nothing is told from one that shows a plain surface, by its pixels alone."""

import io

import numpy as np
import pytest
from PIL import Image

from edge.inference.image_decoding import Photo, read_image
from edge.inference.outcomes import Box
from edge.uncertainty.blank_frame import is_blank
from trainer.data import drawn_surfaces

SIZES = [(1, 1), (3, 2), (9, 9), (64, 64), (200, 200), (640, 480), (4096, 60)]


def photo(values: np.ndarray, mode: str = "L") -> Photo:
    return Photo(
        Image.fromarray(values.round().clip(0, 255).astype(np.uint8)).convert(mode), "PNG", mode, ""
    )


def blank(frame: Photo) -> bool:
    return is_blank(frame, Box(0, 0, *frame.image.size))


def noise(size: tuple[int, int], level: float, deviation: float) -> np.ndarray:
    return level + np.random.default_rng(0).normal(0, deviation, size[::-1])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("level", [0, 7, 128, 255])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_one_gray_shows_nothing_at_any_size(size, level, mode):
    assert blank(photo(np.full(size[::-1], level), mode))


@pytest.mark.parametrize("size", [(64, 64), (200, 200), (640, 480)])
@pytest.mark.parametrize("deviation", [1, 5, 20, 80])
def test_the_noise_of_a_sensor_shows_nothing_however_strong_it_is(size, deviation):
    assert blank(photo(noise(size, 128, deviation)))


def test_noise_in_three_colours_or_interpolated_between_pixels_shows_nothing():
    colours = np.random.default_rng(1).normal(128, 30, (200, 200, 3))
    assert blank(photo(colours, "RGB"))
    mixed = sum(np.roll(colours, shift, axis) for shift in (-1, 0, 1) for axis in (0, 1)) / 6
    assert blank(photo(mixed, "RGB"))


def test_light_that_falls_off_towards_the_edges_shows_nothing():
    y, x = (np.linspace(-1, 1, side) for side in (150, 200))
    assert blank(photo(noise((200, 150), 0, 2) + 140 + 30 * x - 40 * (x**2 + y[:, None] ** 2)))


@pytest.mark.parametrize("plant", range(8))
def test_surfaces_show_something_also_without_a_defect_and_at_a_fifth_of_their_contrast(plant):
    images = drawn_surfaces.draw_images(
        np.repeat(np.arange(len(drawn_surfaces.CLASSES)), 3), 128, 1, plant
    )
    assert not any(blank(photo(image)) for image in images)
    steel = [image for image in images if image.std() > 10]
    assert not any(blank(photo(128 + 0.2 * (image - 128.0))) for image in steel)


@pytest.mark.parametrize("pitch", [2, 6, 16])
def test_stripes_and_chequers_show_something_whatever_their_pitch(pitch):
    rows, columns = np.indices((128, 128))
    assert not blank(photo(100 + 30 * (rows // pitch % 2)))
    assert not blank(photo(100 + 30 * ((rows // pitch + columns // pitch) % 2)))


def test_one_scratch_on_a_plain_ground_shows_something():
    ground = noise((1440, 1080), 200, 0.3)
    assert blank(photo(ground))
    ground[500:504, 300:700] = 60
    assert not blank(photo(ground))


def test_what_differs_in_colour_alone_shows_something():
    halves = np.zeros((64, 64, 3))
    halves[:, :40, 0] = halves[:, 40:, 1] = 120
    assert not blank(photo(halves, "RGB"))


def test_only_the_area_that_is_inspected_counts():
    frame = np.full((300, 300), 90.0)
    frame[100:228, 150:278] = drawn_surfaces.draw_images(np.array([0]), 128, 1, 0)[0, ..., 0]
    assert is_blank(photo(frame), Box(0, 0, 140, 300))
    assert not is_blank(photo(frame), Box(150, 100, 128, 128))


def test_files_with_transparency_and_of_16_bits_are_judged_as_the_line_sees_them():
    steel = drawn_surfaces.draw_images(np.array([0]), 128, 1, 0)[0, ..., 0]
    opaque = np.dstack([steel] * 3 + [np.full_like(steel, 255)])
    hidden = np.dstack([steel] * 3 + [np.zeros_like(steel)])
    for pixels, expected in (
        (opaque, False),
        (hidden, True),
        (steel.astype(np.uint16) * 257, False),
    ):
        Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
        assert blank(read_image(file.getvalue())) == expected


def test_of_the_largest_frame_hardly_more_is_read_than_of_a_small_one(monkeypatch):
    read, reduce = [], Image.Image.reduce

    def counted(image, *arguments):
        read.append(image.width * image.height)
        return reduce(image, *arguments)

    monkeypatch.setattr(Image.Image, "reduce", counted)
    for frame in (noisy(480, 360), noisy(4000, 3000)):
        blank(frame)
    small, large = read
    assert large < 5 * small


def noisy(width: int, height: int) -> Photo:
    """Noise is looked at longest: nothing is found early."""
    part = np.random.default_rng(0).integers(60, 200, (height // 8, width // 8, 3))
    return photo(np.tile(part, (8, 8, 1)), "RGB")
