"""Annotated pictures show the region, the tiles, the verdict and, for each encoder,
where it looked.
"""

import asyncio
import contextlib
import io

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from edge.http.app import App
from edge.http.prometheus_metrics import Metrics
from edge.inference import annotation as drawing
from edge.inference.annotation import annotate, encode_jpeg, render_frame
from edge.inference.heatmap import class_heat, heat_colors
from edge.inference.image_decoding import drop_annotated
from edge.inference.outcomes import Box
from edge.inference.pipeline import Frame, Inspection, NullConsumer, Pipeline
from edge.inference.served_model import Model, load_model
from edge.inference.tiling import View
from tests.support.tiny_bundle import RED as RED_FILE
from tests.support.tiny_bundle import tiny_bundle

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(
        tiny_bundle(tmp_path_factory.mktemp("annotate") / "bundle", extras=True).folder
    )


def seen(model: Model, pixels: np.ndarray, **view: object) -> Inspection:
    with contextlib.closing(Pipeline(model, NullConsumer(), View(**view))) as line:
        found = line.inspect_sync(Frame("part-7", pixels, "camera-1"))
    assert isinstance(found, Inspection)
    return found


def plain(width: int, height: int, color: tuple[int, int, int]) -> np.ndarray:
    return np.full((height, width, 3), color, np.uint8)


def has(picture: Image.Image, color: tuple[int, int, int], least: int = 1) -> bool:
    return int((np.asarray(picture) == color).all(-1).sum()) >= least


# ---------------------------------------------------------------- heat


@pytest.mark.parametrize(("encoder", "left"), [(0, True), (1, False)], ids=["received", "own"])
def test_heat_lies_where_an_encoder_sees_the_class_and_nowhere_else(model, encoder, left):
    """Of the tiny model the received encoder sees the left half of an image,
    its own the right half.
    """
    frame = plain(160, 160, BLUE)
    frame[:40] = RED
    maps = model.predictor.run_one_by_one(seen(model, frame).tiled.pixels, ("maps",)).maps
    found = class_heat(maps, 0, [Box(0, 0, 160, 160)], 1.0, (160, 160))[encoder]
    mine, other = (
        (np.s_[:10, :60], np.s_[:10, 100:]) if left else (np.s_[:10, 100:], np.s_[:10, :60])
    )
    assert found[mine].min() > 0.9 * found.max() > 0
    assert found[other].max() == 0
    assert found[70:].max() == 0


def test_what_a_place_adds_to_all_classes_alike_is_no_heat():
    same = (
        np.random.default_rng(1).normal(size=(1, 2, 1, 4, 4)).astype(np.float32).repeat(3, axis=2)
    )
    assert class_heat(same, 1, [Box(0, 0, 8, 8)], 1.0, (8, 8)).max() < 1e-6


@given(st.integers(1, 5), st.integers(1, 90), st.integers(1, 90), st.floats(0.05, 4))
def test_equal_heat_in_all_tiles_is_equal_heat_all_over_however_they_overlap(
    count, width, height, scale
):
    maps = np.zeros((count, 2, 3, 2, 2), np.float32)
    maps[:, :, 2] = 1.5
    boxes = [Box(each * width // 2, 0, width, height) for each in range(count)]
    size = (max(1, round((boxes[-1].left + width) * scale)), max(1, round(height * scale)))
    found = class_heat(maps, 2, boxes, scale, size)
    assert found.shape == (2, size[1], size[0])
    assert np.allclose(found, 1.0, atol=1e-4)


def test_the_colours_grow_brighter_evenly():
    shades = heat_colors(np.linspace(0, 1, 256, dtype=np.float32)).astype(float) @ (
        0.2126,
        0.7152,
        0.0722,
    )
    assert (np.diff(shades) >= -0.5).all()
    assert shades[-1] > shades[0] + 150


# ---------------------------------------------------------------- pictures


def test_a_defect_is_marked_and_named_in_its_colour_and_a_sound_part_in_another(model):
    frame = plain(400, 200, GREEN)
    frame[:100, :100] = RED
    found = seen(model, frame, tile=100, overlap=0, no_defect="green")
    assert has(annotate(found), drawing._DEFECT, 300)
    assert not has(annotate(found), drawing._SOUND)
    sound = annotate(seen(model, plain(400, 200, GREEN), tile=100, no_defect="green"))
    assert has(sound, drawing._SOUND, 100)
    assert not has(sound, drawing._DEFECT)


def test_what_lies_outside_the_region_is_dark(model):
    picture = np.asarray(annotate(seen(model, plain(600, 600, GREEN), roi=(300, 0, 300, 600))))
    dark, bright = picture[400, 100], picture[400, 500]
    assert dark.max() < 100
    assert tuple(bright) == GREEN


def test_with_heat_the_frame_stands_there_once_more_for_each_encoder(model):
    found = seen(model, plain(200, 200, RED))
    assert annotate(found, heat=True).width > 2.9 * annotate(found).width
    wide = seen(model, plain(900, 100, RED))
    assert annotate(wide, heat=True).height > 2 * annotate(wide).height


@pytest.mark.parametrize("heat", [False, True])
@pytest.mark.parametrize("draw", [annotate, render_frame])
def test_what_was_drawn_is_told_from_an_image_of_a_surface(model, tmp_path, draw, heat):
    drawn, plain_ = tmp_path / "drawn.jpg", tmp_path / "plain.jpg"
    drawn.write_bytes(encode_jpeg(draw(seen(model, plain(100, 100, RED)), heat=heat)))
    plain_.write_bytes(encode_jpeg(plain(100, 100, RED)))
    assert drop_annotated([drawn, plain_]) == [plain_]


def test_the_frame_alone_lies_under_the_heat_of_all_encoders_together(model):
    found = seen(model, plain(100, 100, RED))
    cold, hot = np.asarray(render_frame(found)), np.asarray(render_frame(found, heat=True))
    assert cold.shape == hot.shape == (480, 480, 3)
    assert tuple(cold[240, 240]) == RED
    assert not np.array_equal(cold, hot)


def test_a_bundle_without_maps_is_drawn_without_heat(tmp_path):
    found = seen(load_model(tiny_bundle(tmp_path / "bundle").folder), plain(100, 100, RED))
    assert np.array_equal(annotate(found, heat=True), annotate(found))


@pytest.mark.parametrize("heat", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (3000, 7), (7, 3000), (64, 64), (2600, 2000)])
def test_pictures_are_neither_too_small_to_read_nor_too_large_to_send(model, size, heat):
    picture = annotate(seen(model, plain(*size, RED), tile=1500), heat=heat)
    assert picture.mode == "RGB"
    assert min(picture.width, 1300) >= 480
    assert max(picture.size) <= 3 * 720 + 400


def test_more_is_said_of_a_verdict_in_doubt(model):
    found = seen(model, plain(100, 100, RED))
    doubts = ("confidence below the threshold of its class", "a very long reason " * 50)
    doubted = found._replace(
        verdict=_changed(found, doubts=doubts, disagreement=0.5, image="x\n\x1b[31m" * 80)
    )
    plain_, more = annotate(found), annotate(doubted)
    assert more.width == plain_.width
    assert more.height > plain_.height + 40


def test_a_class_that_this_plant_never_taught_has_a_line_of_its_own(model):
    found = seen(model, plain(100, 100, RED))
    assert (
        annotate(found._replace(verdict=_changed(found, taught=False))).height
        > annotate(found).height
    )


def test_over_http_the_answer_is_the_picture_when_it_is_asked_for(model):
    async def ask(*queries: str) -> list[httpx.Response]:
        with contextlib.closing(Pipeline(model, NullConsumer())) as line:
            transport = httpx.ASGITransport(App(line, Metrics()))
            async with httpx.AsyncClient(transport=transport, base_url="http://line") as client:
                return [
                    await client.post(f"/classify{query}", content=RED_FILE) for query in queries
                ]

    plain_, hot, wrong = asyncio.run(ask("?annotate=1", "?annotate=heat", "?annotate=yes"))
    assert (plain_.headers["content-type"], plain_.headers["x-model"]) == (
        "image/jpeg",
        model.digest,
    )
    assert (
        Image.open(io.BytesIO(hot.content)).width > 2 * Image.open(io.BytesIO(plain_.content)).width
    )
    assert wrong.status_code == 400


def _changed(found: Inspection, **changes: object) -> object:
    return msgspec.structs.replace(found.verdict, **changes)
