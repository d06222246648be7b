"""Pictures of one spot are found among pictures of the same surface,
however they were taken or changed.
"""

import io
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageOps

from trainer.data import drawn_surfaces
from trainer.data.checks.likeness import Pair, find_alike, make_thumbnail

SIZE = 96


def draw(count: int, seed: int = 0) -> list[Image.Image]:
    """Gray pictures of different spots."""
    labels = np.arange(count) % len(drawn_surfaces.CLASSES)
    return [
        Image.fromarray(each).convert("L")
        for each in drawn_surfaces.draw_images(labels, SIZE, seed)
    ]


SPOTS = draw(24)


def compare(*images: Image.Image) -> list[Pair]:
    return find_alike([make_thumbnail(image) for image in images])


def positions(pairs: list[Pair]) -> set[tuple[int, int]]:
    return {(pair.one, pair.other) for pair in pairs}


def noisier(image: Image.Image) -> Image.Image:
    noise = np.random.default_rng(0).normal(0, 2, (SIZE, SIZE))
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))


def exposed(image: Image.Image) -> Image.Image:
    return image.point(lambda value: 200 * (value / 255) ** 1.6)


def lit_from_a_side(image: Image.Image) -> Image.Image:
    return Image.fromarray((np.asarray(image) * np.linspace(0.5, 1, SIZE)).astype(np.uint8))


def compressed(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=70)
    return Image.open(file)


def moved(image: Image.Image) -> Image.Image:
    return image.crop((8, 4, SIZE, SIZE - 4))


def cropped(image: Image.Image) -> Image.Image:
    return image.crop((0, SIZE // 8, SIZE - SIZE // 8, SIZE)).resize((SIZE, SIZE))


CHANGES: list[Callable[[Image.Image], Image.Image]] = [
    noisier,
    exposed,
    lit_from_a_side,
    compressed,
    moved,
    cropped,
    ImageOps.mirror,
    ImageOps.flip,
    *(
        lambda image, turn=turn: image.transpose(turn)
        for turn in (
            Image.Transpose.ROTATE_90,
            Image.Transpose.ROTATE_180,
            Image.Transpose.TRANSVERSE,
        )
    ),
    lambda image: image.rotate(4, Image.Resampling.BILINEAR, fillcolor=128),
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_a_changed_copy_is_found_and_nothing_else_is(number: int) -> None:
    changed = [*SPOTS[:6], *map(CHANGES[number], SPOTS[:6])]
    assert positions(compare(*changed)) == {(spot, spot + 6) for spot in range(6)}


def test_changes_add_up() -> None:
    assert positions(
        compare(SPOTS[0], SPOTS[1], compressed(exposed(moved(SPOTS[0].rotate(90)))))
    ) == {(0, 2)}


def test_different_spots_of_one_surface_are_not_alike() -> None:
    assert compare(*SPOTS) == []


def test_the_likest_pair_comes_first() -> None:
    pairs = compare(SPOTS[0], SPOTS[1], cropped(SPOTS[0]), exposed(SPOTS[1]))
    assert [(pair.one, pair.other) for pair in pairs] == [(1, 3), (0, 2)]
    assert 1 > pairs[0].likeness > pairs[1].likeness > 0.4


def framed(image: Image.Image) -> Image.Image:
    """The spot in the middle of a part that is the same in every picture."""
    scene = Image.new("L", (2 * SIZE, 2 * SIZE), 20)
    scene.paste(200, (8, 8, 40, 184))
    scene.paste(120, (150, 8, 184, 90))
    scene.paste(image.resize((140, 140)), (30, 30))
    return scene


def test_what_all_pictures_show_does_not_make_them_alike() -> None:
    pictures = [framed(image) for image in [*SPOTS, exposed(SPOTS[3])]]
    assert positions(compare(*pictures)) == {(3, 24)}


def test_empty_and_tiny_pictures_are_like_no_other() -> None:
    assert compare(*[Image.new("L", (SIZE, SIZE), gray) for gray in (0, 0, 90, 255)]) == []
    assert compare(*[SPOTS[0].resize((8, 8))] * 2) == []


def test_no_and_single_pictures_have_no_pairs() -> None:
    assert compare() == compare(SPOTS[0]) == []
