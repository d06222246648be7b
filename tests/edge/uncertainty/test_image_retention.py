"""Images that are kept: which, as what, how many,
and what happens when the disk does not take them.
"""

import contextlib
import io
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from broker_config.storage import disk
from edge.inference.outcomes import Failure
from edge.inference.pipeline import Frame, Pipeline
from edge.inference.tiling import View
from edge.uncertainty.image_retention import ImageRetention, Settings
from edge.uncertainty.uncertainty_check import Settings as DoubtSettings
from edge.uncertainty.uncertainty_check import UncertaintyCheck
from tests.support.classified_images import (
    CONFIDENCE,
    Told,
    a_line,
    judge,
    judged_bundle,
    picture,
    shown,
)
from tests.support.tiny_bundle import BLUE, RED

RANDOM = np.random.default_rng(4)
SURE, UNSURE = picture(RANDOM, 0, noise=0), picture(RANDOM, 1, strong=20, noise=0)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return judged_bundle(tmp_path_factory.mktemp("bundle") / "a", confidence=CONFIDENCE)


@contextlib.contextmanager
def keeping(
    judged: Path, folder: Path, **settings: Any
) -> Iterator[tuple[Pipeline, ImageRetention]]:
    """A line that keeps images; afterwards the disk has them."""
    keep = ImageRetention(Settings(path=str(folder), **settings))
    with contextlib.closing(keep):
        yield a_line(judged, Told(), UncertaintyCheck(DoubtSettings(novelty=0)), keep), keep


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".json")


def test_images_in_doubt_are_kept_with_their_verdicts(judged, tmp_path):
    with keeping(judged, tmp_path / "kept") as (line, _):
        sure, unsure = shown(line, [SURE, UNSURE])
    assert sure.kept is None
    assert kept(tmp_path / "kept") == [unsure.kept]
    told = json.loads((tmp_path / "kept" / str(unsure.kept)).with_suffix(".json").read_bytes())
    assert (told["id"], told["doubts"], told["kept"]) == (unsure.id, ["confidence"], unsure.kept)
    assert (np.asarray(Image.open(tmp_path / "kept" / str(unsure.kept))) == UNSURE).all()


@pytest.mark.parametrize("what", ["doubtful", "defects", "all"])
def test_what_is_kept_is_a_matter_of_settings(judged, tmp_path, what):
    with keeping(judged, tmp_path, what=what) as (line, _):
        line.view = View(no_defect="red")
        red, green = shown(line, [SURE, UNSURE])
    expected = {"doubtful": [green], "defects": [green], "all": [red, green]}[what]
    assert kept(tmp_path) == sorted(str(each.kept) for each in expected)
    assert (red.defect, green.defect) == (False, True)


def test_besides_a_share_of_all_images_is_kept_at_random(judged, tmp_path):
    with keeping(judged, tmp_path, sample=0.5) as (line, keep):
        for _ in range(60):
            [sure] = shown(line, [SURE])
            drained(keep)
            if sure.kept:
                assert json.loads((tmp_path / sure.kept).with_suffix(".json").read_bytes())[
                    "sampled"
                ]
    assert 10 < len(kept(tmp_path)) < 50


@pytest.mark.parametrize(
    ("format_", "suffix"), [("JPEG", "jpg"), ("PNG", "png"), ("BMP", "bmp"), ("WEBP", "webp")]
)
def test_an_image_file_is_kept_byte_for_byte(judged, tmp_path, format_, suffix):
    Image.fromarray(UNSURE).save(content := io.BytesIO(), format_)
    with keeping(judged, tmp_path, what="all") as (line, _):
        judge(line, Frame("posted", content.getvalue()))
    [name] = kept(tmp_path)
    assert name.endswith(f".{suffix}")
    assert (tmp_path / name).read_bytes() == content.getvalue()


def test_a_picture_of_what_was_seen_stands_beside_it_where_one_is_wanted_and_goes_with_it(
    judged, tmp_path
):
    with keeping(judged, tmp_path, annotate=True, images=1) as (line, _):
        _, last = shown(line, [UNSURE, UNSURE])
    stem = str(last.kept).removesuffix(".png")
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{stem}{end}" for end in (".png", ".json", ".annotated.jpg")
    }
    assert Image.open(tmp_path / f"{stem}.annotated.jpg").size > UNSURE.shape[:2]


def test_a_file_that_its_source_removes_at_once_is_kept_all_the_same(judged, tmp_path):
    (tmp_path / "part.png").write_bytes(RED)
    (tmp_path / "kept").mkdir()
    with keeping(judged, tmp_path / "kept", what="all") as (line, keep), hindered(keep):
        judge(line, Frame("part.png", tmp_path / "part.png"))
        (tmp_path / "part.png").unlink()
    [name] = kept(tmp_path / "kept")
    assert (tmp_path / "kept" / name).read_bytes() == RED


@contextlib.contextmanager
def hindered(keep: ImageRetention) -> Iterator[None]:
    """A disk that takes nothing until we are done."""
    go, write = threading.Event(), keep._write

    def slow(order: Any) -> None:
        assert go.wait(60)
        write(order)

    keep._write = slow  # type: ignore[method-assign]  # a real disk cannot be held still
    try:
        yield
    finally:
        go.set()


def test_the_oldest_make_room_by_number(judged, tmp_path):
    with keeping(judged, tmp_path, what="all", images=3) as (line, _):
        names = [verdict.kept for verdict in shown(line, [UNSURE] * 5)]
    assert kept(tmp_path) == sorted(map(str, names[2:]))
    assert len(list(tmp_path.iterdir())) == 6  # each with its verdict


def test_the_oldest_make_room_by_size(judged, tmp_path):
    # 327 kB each, whatever is done to it
    noise = RANDOM.integers(0, 256, (4, 330, 330, 3), dtype=np.uint8)
    with keeping(judged, tmp_path, what="all", megabytes=1) as (line, _):
        names = [verdict.kept for verdict in shown(line, list(noise))]
    assert kept(tmp_path) == sorted(map(str, names[1:]))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1_000_000


def test_what_was_kept_before_a_restart_counts_and_what_others_put_there_is_left_alone(
    judged, tmp_path
):
    (tmp_path / "labels.txt").write_text("mine")
    for _ in range(2):
        with keeping(judged, tmp_path, what="all", images=3) as (line, _):
            names = [verdict.kept for verdict in shown(line, [UNSURE] * 2)]
    assert len(kept(tmp_path)) == 1 + 3
    assert {*map(str, names), "labels.txt"} < set(kept(tmp_path))


def test_an_image_larger_than_all_that_may_be_kept_costs_no_other_its_place(judged, tmp_path):
    with keeping(judged, tmp_path, what="all", megabytes=1) as (line, keep):
        [first] = shown(line, [UNSURE])
        shown(line, [RANDOM.integers(0, 256, (700, 700, 3), dtype=np.uint8)])
    assert (kept(tmp_path), keep.lost) == ([first.kept], 1)


def test_a_slow_disk_costs_images_not_time_and_their_verdicts_do_not_say_that_they_are_kept(
    judged, tmp_path, caplog
):
    with keeping(judged, tmp_path, what="all") as (line, keep), hindered(keep):
        verdicts = shown(line, [UNSURE] * 20)
    assert sorted(each.kept for each in verdicts if each.kept) == kept(tmp_path)
    assert 8 <= len(kept(tmp_path)) <= 9
    assert keep.lost == 20 - len(kept(tmp_path))
    # no storm
    assert 1 <= len([record for record in caplog.records if "is not kept" in record.message]) <= 5


def test_a_full_disk_is_logged_and_the_line_goes_on(judged, tmp_path, caplog, monkeypatch):
    with keeping(judged, tmp_path, what="all") as (line, keep):
        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
            settle = disk.move_durably

            def full(scratch: Path, path: Path) -> None:
                if path.suffix == ".json":  # room for the image, not for its verdict
                    raise OSError(28, os.strerror(28))
                settle(scratch, path)

            patch.setattr(disk, "move_durably", full)
            shown(line, [UNSURE])
            drained(keep)
        assert list(tmp_path.iterdir()) == []
        [verdict] = shown(line, [UNSURE])
    assert kept(tmp_path) == [verdict.kept]
    assert keep.lost == 1
    assert "No space left" in caplog.text


def test_a_folder_that_disappears_is_logged_too(judged, tmp_path, caplog):
    with keeping(judged, tmp_path / "kept", what="all") as (line, keep):
        shutil.rmtree(tmp_path / "kept")
        assert len(shown(line, [UNSURE, UNSURE])) == 2
        drained(keep)
        assert keep.lost == 2


def drained(keep: ImageRetention) -> None:
    """Wait until the thread has seen to all that was put before."""
    keep._queue.join()


def test_a_frame_that_cannot_be_judged_is_not_kept(judged, tmp_path):
    with keeping(judged, tmp_path, what="all") as (line, _):
        [failure] = judge(line, Frame("bad", BLUE[:40]))
    assert isinstance(failure, Failure)
    assert kept(tmp_path) == []
