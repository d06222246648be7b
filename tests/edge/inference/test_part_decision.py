"""From frame to verdict: tiles cover the region of interest,
and what they show makes one verdict a part.
"""

import contextlib
import io
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from broker_config.protocol.errors import UsageError
from edge.inference import tiling as cutting
from edge.inference.image_decoding import ImageError, Photo, read_image
from edge.inference.outcomes import Box, Failure, Outcome, Verdict
from edge.inference.part_decision import check_no_defect_class, decide, defect_threshold
from edge.inference.pipeline import Frame, Pipeline
from edge.inference.served_model import load_model
from edge.inference.tiling import View, cut_tiles, region_of_interest, tile_boxes
from tests.support.tiny_bundle import tiny_bundle

areas = st.builds(
    Box, st.integers(0, 50), st.integers(0, 50), st.integers(1, 300), st.integers(1, 300)
)
views = st.builds(View, tile=st.integers(0, 120), overlap=st.floats(0, 0.9))


def photo(width: int, height: int, seed: int = 0) -> Photo:
    """A frame of noise."""
    return Photo.from_array(
        np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    )


# ---------------------------------------------------------------- tiles


@given(areas, views)
def test_tiles_see_every_pixel_of_the_region_and_none_outside_and_are_of_one_size(area, view):
    try:
        found = tile_boxes(area, view)
    except ImageError:
        assert view.tile
        return
    seen = np.zeros((area.height, area.width), bool)
    for left, top, width, height in found:
        assert (width, height) == (
            min(view.tile or area.width, area.width),
            min(view.tile or area.height, area.height),
        )
        assert left >= area.left
        assert left + width <= area.left + area.width
        assert top >= area.top
        assert top + height <= area.top + area.height
        seen[top - area.top :, left - area.left :][:height, :width] = True
    assert seen.all()
    assert len(set(found)) == len(found) <= cutting.MAX_TILES


@given(areas, st.integers(1, 120), st.floats(0, 0.9))
def test_neighbouring_tiles_overlap_by_what_was_asked_at_least(area, tile, overlap):
    view = View(tile=tile, overlap=overlap)
    columns = sorted({box.left for box in cutting.tile_boxes(area._replace(height=1), view)})
    for one, next_ in itertools.pairwise(columns):
        assert one + tile - next_ >= int(tile * overlap)


@given(areas, views, st.integers(0, 40), st.integers(0, 40))
def test_moving_the_region_moves_its_tiles(area, view, right, down):
    def there(where: Box) -> set[Box] | str:
        try:
            return set(tile_boxes(where, view))
        except ImageError as error:
            return str(error)

    moved = there(area._replace(left=area.left + right, top=area.top + down))
    found = there(area)
    assert moved == (
        found
        if isinstance(found, str)
        else {box._replace(left=box.left + right, top=box.top + down) for box in found}
    )


@given(
    st.integers(1, 70),
    st.integers(1, 50),
    st.sampled_from([0, *range(5, 40)]),
    st.integers(1, 24),
    st.integers(0, 9),
)
def test_a_tile_is_what_photo_fit_makes_of_that_part_of_the_frame_alone(
    width, height, tile, size, seed
):
    frame = photo(width, height, seed)
    found = cut_tiles(frame, View(tile=tile), size)
    assert found.pixels.shape == (len(found.boxes), size, size, 3)
    assert found.pixels.dtype == np.uint8
    everything = np.asarray(frame.image)
    for pixels, (left, top, wide, high) in zip(found.pixels, found.boxes, strict=True):
        alone = Photo.from_array(
            np.ascontiguousarray(everything[top : top + high, left : left + wide])
        )
        assert np.array_equal(pixels, alone.resize(size))


def test_a_tile_does_not_see_what_lies_beside_it():
    black = np.zeros((40, 80, 3), np.uint8)
    black[:, 40:] = 255
    found = cut_tiles(Photo.from_array(black), View(tile=40, overlap=0), 13)
    assert [int(pixels.max()) for pixels in found.pixels] == [0, 255]
    assert found.pixels[1].min() == 255


def test_a_region_without_tiles_is_one_tile_and_one_smaller_than_a_tile_too():
    frame = photo(60, 40)
    assert cut_tiles(frame, View(), 8).boxes == (Box(0, 0, 60, 40),)
    assert cut_tiles(frame, View(roi=(10, 5, 30, 20)), 8).boxes == (Box(10, 5, 30, 20),)
    assert cut_tiles(frame, View(roi=(10, 5, 30, 20), tile=200), 8).boxes == (Box(10, 5, 30, 20),)
    assert cut_tiles(frame, View(tile=40, overlap=0), 8).boxes == (
        Box(0, 0, 40, 40),
        Box(20, 0, 40, 40),
    )


@pytest.mark.parametrize(
    "roi", [(0, 0, 61, 40), (0, 1, 60, 40), (-1, 0, 5, 5), (0, 0, 0, 5), (60, 0, 1, 1)]
)
def test_a_region_that_does_not_lie_in_the_frame_is_refused_and_both_are_named(roi):
    with pytest.raises(ImageError, match=r"part-7.*60 x 40") as caught:
        region_of_interest((60, 40), View(roi=roi), "part-7")
    assert "roi" in caught.value.remedy


def test_more_tiles_than_the_limit_are_refused_before_one_is_cut():
    with pytest.raises(ImageError, match=r"1600 tiles.*512") as caught:
        cut_tiles(photo(400, 400), View(tile=10, overlap=0), 8)
    assert "tile" in caught.value.remedy


def test_the_region_counts_in_the_frame_as_people_see_it_turned_by_its_exif_tag():
    stripes = np.zeros((20, 60, 3), np.uint8)
    # white on the right; after a turn by 90 degrees clockwise it is at the bottom
    stripes[:, 40:] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    out = io.BytesIO()
    Image.fromarray(stripes).save(out, "PNG", exif=exif)
    found = cut_tiles(read_image(out.getvalue()), View(roi=(0, 40, 20, 20)), 4)
    assert found.pixels.min() == 255


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_gray_frames_are_cut_as_coloured_ones(mode):
    image = photo(50, 30).image.convert("L")
    gray = cut_tiles(Photo(image.convert(mode), "PNG", mode, ""), View(tile=20), 7)
    assert np.array_equal(gray.pixels[..., 0], gray.pixels[..., 2])
    assert np.array_equal(
        gray.pixels, cut_tiles(Photo(image, "PNG", "L", ""), View(tile=20), 7).pixels
    )


# ---------------------------------------------------------------- the verdict

CLASSES = ("no_defect", "scratch", "dent")
WHOLE = Box(0, 0, 10, 10)


def rows(*given: tuple[float, ...]) -> tuple[np.ndarray, list[Box]]:
    return np.array(given, np.float32), [
        WHOLE._replace(left=10 * index) for index in range(len(given))
    ]


def test_one_tile_with_a_defect_makes_the_part_defective_and_the_surest_one_names_it():
    found = decide(*rows((0.9, 0.1, 0.0), (0.3, 0.6, 0.1), (0.1, 0.2, 0.7)), CLASSES, View())
    assert (found.tile, found.label, found.defect) == (2, "dent", True)
    assert [tile.defect for tile in found.tiles] == [False, True, True]
    assert [tile.label for tile in found.tiles] == ["no_defect", "scratch", "dent"]


def test_a_part_without_a_defect_is_as_sure_as_its_least_sure_tile():
    found = decide(*rows((0.9, 0.1, 0.0), (0.6, 0.4, 0.0), (0.8, 0.1, 0.1)), CLASSES, View())
    assert (found.tile, found.label, found.defect) == (1, "no_defect", False)


def test_a_tile_below_the_threshold_counts_as_no_defect_but_lowers_the_confidence():
    scores = rows((0.9, 0.1, 0.0), (0.3, 0.6, 0.1))
    assert decide(*scores, CLASSES, View(threshold=0.69)).defect  # 0.6 + 0.1
    found = decide(*scores, CLASSES, View(threshold=0.71))
    assert (found.tile, found.label, found.defect) == (1, "no_defect", False)
    assert found.tiles[1].label == "scratch"
    assert not found.tiles[1].defect


def test_defects_that_are_likelier_together_than_no_defect_make_one_named_by_the_likeliest():
    found = decide(*rows((0.4, 0.25, 0.35)), CLASSES, View())
    assert (found.label, found.defect) == ("dent", True)
    found = decide(*rows((0.8, 0.15, 0.05)), CLASSES, View(missed_cost=5))
    assert (found.label, found.defect) == ("scratch", True)


@given(st.floats(0.01, 0.99), st.floats(0.05, 50))
def test_the_decision_is_the_one_that_is_expected_to_cost_less(defect, cost):
    # false rejects if it is good, missed defects if it is not
    expected = {True: 1 - defect, False: cost * defect}
    if abs(expected[True] - expected[False]) > 1e-4:
        found = decide(*rows((1 - defect, defect, 0.0)), CLASSES, View(missed_cost=cost))
        assert found.defect == (expected[True] < expected[False])


def test_a_threshold_by_hand_stands_and_a_cost_beside_it_or_without_effect_is_refused():
    assert defect_threshold(View(threshold=0.9), CLASSES) == 0.9
    assert defect_threshold(View(), CLASSES) == 0.5
    assert defect_threshold(View(), ("crack", "dent")) == 0
    with pytest.raises(UsageError, match=r"threshold = 0\.9.*missed_cost = 5"):
        check_no_defect_class(View(threshold=0.9, missed_cost=5), CLASSES)
    with pytest.raises(UsageError, match=r"missed_cost = 5.*no effect"):
        check_no_defect_class(View(missed_cost=5), ("crack", "dent"))


def test_as_many_tiles_as_asked_make_a_part_defective_or_all_when_there_are_fewer():
    scores = rows((0.2, 0.8, 0.0), (0.9, 0.1, 0.0), (0.4, 0.6, 0.0))
    assert decide(*scores, CLASSES, View(least_tiles=2)).defect
    assert not decide(*scores, CLASSES, View(least_tiles=3)).defect
    assert decide(*rows((0.2, 0.8, 0.0)), CLASSES, View(least_tiles=3)).defect


def test_without_a_class_for_no_defect_every_sure_tile_is_one_and_unsure_ones_are_none():
    classes = ("crack", "scratch", "dent")
    scores = rows((0.4, 0.3, 0.3), (0.2, 0.7, 0.1))
    assert decide(*scores, classes, View()).defect
    found = decide(*scores, classes, View(threshold=0.8))
    assert (found.tile, found.label, found.defect) == (1, "scratch", False)


def test_a_frame_that_is_one_tile_lists_no_tiles():
    assert decide(*rows((0.2, 0.8, 0.0)), CLASSES, View()).tiles == ()


def test_a_class_that_the_model_does_not_have_is_named_with_those_that_it_has():
    check_no_defect_class(View(), ("a", "b"))
    check_no_defect_class(View(no_defect="b"), ("a", "b"))
    with pytest.raises(UsageError, match=r"'sound'.*a, b"):
        check_no_defect_class(View(no_defect="sound"), ("a", "b"))


@given(
    st.lists(st.tuples(*[st.floats(0.01, 1)] * 3), min_size=1, max_size=9),
    st.integers(1, 4),
    st.floats(0, 1),
)
def test_the_verdict_does_not_depend_on_the_order_of_the_tiles(given_, least, threshold):
    scores = np.array(given_, np.float32)
    scores /= scores.sum(1, keepdims=True)
    view = View(least_tiles=least, threshold=threshold)
    boxes = [WHOLE] * len(scores)
    one, other = decide(scores, boxes, CLASSES, view), decide(scores[::-1], boxes, CLASSES, view)
    index = CLASSES.index(one.label)
    assert one.defect == other.defect
    if one.tiles:
        assert one.defect == (sum(tile.defect for tile in one.tiles) >= min(least, len(scores)))
    assert scores[one.tile].max() == scores[::-1][other.tile].max() or one.label == other.label
    assert np.isclose(scores[one.tile, index], scores[::-1][other.tile, CLASSES.index(other.label)])


# ---------------------------------------------------------------- a line


def judge(line: Pipeline, frame: Frame) -> Verdict | Failure:
    with contextlib.closing(line):
        found = line.inspect_sync(frame)
    return found if isinstance(found, Failure) else found.verdict


class Kept:
    """An outbox that remembers."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def put(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(
        tiny_bundle(tmp_path_factory.mktemp("view") / "bundle").folder
    )  # red, green, blue by the mean colour


def test_a_frame_gets_one_verdict_that_says_where_the_defect_lies(model, tmp_path: Path):
    frame = np.zeros((100, 200, 3), np.uint8)
    frame[..., 1] = 255
    frame[60:, 150:] = (0, 0, 255)
    Image.fromarray(frame).save(tmp_path / "part.png")
    view = View(tile=50, overlap=0, no_defect="green")
    verdict = judge(Pipeline(model, Kept(), view), Frame("part", tmp_path / "part.png"))
    assert isinstance(verdict, Verdict)
    assert (verdict.label, verdict.defect) == ("blue", True)
    assert [tile.box for tile in verdict.tiles if tile.defect] == [Box(150, 50, 50, 50)]
    assert (
        verdict.confidence == verdict.probabilities["blue"] == max(verdict.probabilities.values())
    )


def test_a_line_without_a_defect_tells_the_confidence_of_that(model):
    frame = Frame("part", np.full((8, 8, 3), (255, 0, 0), np.uint8))
    verdict = judge(Pipeline(model, Kept(), View(no_defect="green", threshold=1.0)), frame)
    assert isinstance(verdict, Verdict)
    assert (verdict.label, verdict.defect) == ("green", False)
    assert verdict.confidence == verdict.probabilities["green"] < 0.01


def test_a_line_refuses_a_class_for_no_defect_that_its_model_lacks(model):
    with pytest.raises(UsageError, match=r"'sound'.*red, green, blue"):
        Pipeline(model, Kept(), View(no_defect="sound"))


def test_a_frame_in_which_the_region_does_not_lie_is_a_failure_and_the_next_is_judged(model):
    kept = Kept()
    with contextlib.closing(Pipeline(model, kept, View(roi=(0, 0, 20, 20)))) as line:
        for side in (10, 30):
            line.inspect_sync(Frame("part", np.zeros((side, side, 3), np.uint8)))
    failure, verdict = kept.outcomes
    assert isinstance(failure, Failure)
    assert "region of interest" in failure.error
    assert isinstance(verdict, Verdict)
