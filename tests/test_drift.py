"""Drift: an ordinary line raises no alarm, a changed one does once, and the alarm ends when the line is as it was."""

from pathlib import Path

import numpy as np
import pytest

from edge.doubt.doubts import Doubts, Settings
from edge.doubt.drift import Drift
from edge.doubt.drift import Settings as DriftSettings
from edge.line import Line
from edge.line import load as load_model
from tests.held_out import Told, a_line, judged_bundle, picture, pictures, shown
from tests.tiny_bundle import tiny_bundle

WINDOW = 60


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return judged_bundle(tmp_path_factory.mktemp("bundle") / "a")


def watched(folder: Path, **settings: float) -> tuple[Line, Drift, Told]:
    told = Told()
    drift = Drift(DriftSettings(**{"window": WINDOW, **settings}), 0.05, told)  # type: ignore[arg-type]
    return a_line(folder, told, Doubts(Settings()), drift), drift, told


def darker(images: np.ndarray) -> np.ndarray:
    return (images * 0.8).astype(np.uint8)


def states(told: Told) -> list[object]:
    assert all(notice.kind == "drift" for notice in told.notices)
    return [notice.details["state"] for notice in told.notices]


@pytest.mark.parametrize("seed", [1, 2])
def test_an_ordinary_line_raises_no_alarm(judged, seed):
    line, drift, told = watched(judged)
    shown(line, pictures(1200, 100 + seed))
    assert told.notices == []
    assert 0 < drift.level < 1
    assert drift.doubtful < 0.3


def test_classes_in_other_shares_are_no_drift_and_told(judged):
    line, drift, told = watched(judged)
    random = np.random.default_rng(5)
    shown(line, [picture(random, 2) for _ in range(600)])
    assert told.notices == []
    assert drift.shares["blue"] == pytest.approx(1, abs=1e-3)


def test_a_changed_line_raises_one_alarm_within_a_window_and_ends_it_when_it_is_as_it_was(judged):
    line, drift, told = watched(judged)
    shown(line, pictures(200, 6))
    shown(line, darker(pictures(WINDOW, 7)))
    assert drift.drifted
    shown(line, darker(pictures(600, 8)))
    assert states(told) == ["drifted"]
    shown(line, pictures(400, 9))
    assert states(told) == ["drifted", "ordinary"]
    assert not drift.drifted


def test_a_line_that_changes_to_and_fro_raises_no_storm_of_alarms(judged):
    line, _, told = watched(judged)
    for number in range(40):
        images = pictures(20, 10 + number)
        shown(line, darker(images) if number % 2 else images)
    assert len(told.notices) <= 40 * 20 / WINDOW / 2


def test_doubts_that_become_frequent_raise_an_alarm_where_the_features_have_not_moved_so_far(judged):
    line, drift, told = watched(judged, tolerance=1.0)
    drift._settings = DriftSettings(window=WINDOW)
    random = np.random.default_rng(11)
    shown(line, [picture(random, n % 3, strong=60 if n % 2 else 80, noise=16) for n in range(300)])
    assert drift.excess > 1
    assert states(told)[:1] == ["drifted"]


def test_tolerance_stretches_the_limits(judged):
    line, strict, _ = watched(judged)
    tolerant_line, tolerant, _ = watched(judged, tolerance=4)
    for each in (line, tolerant_line):
        shown(each, darker(pictures(100, 12)))
    assert tolerant.level == pytest.approx(strict.level / 4)


def test_another_model_is_measured_anew_and_an_alarm_about_the_last_one_ends(judged, tmp_path):
    line, drift, told = watched(judged)
    shown(line, darker(pictures(300, 13)))
    assert drift.drifted
    line.model = load_model(judged_bundle(tmp_path / "b", node="b"))
    shown(line, pictures(3, 14))
    assert states(told) == ["drifted", "ordinary"]
    assert drift.level < 1


def test_few_held_out_images_make_the_limit_wide_not_the_alarm_frequent(tmp_path):
    for seed in range(5):
        line, _, told = watched(judged_bundle(tmp_path / str(seed), images=18))
        shown(line, pictures(300, 20 + seed))
        assert told.notices == []


def test_a_bundle_without_a_reference_is_not_watched(tmp_path):
    tiny_bundle(tmp_path / "old")
    line, drift, told = watched(tmp_path / "old")
    shown(line, darker(pictures(200, 15)))
    assert (drift.level, drift.shares, told.notices) == (0.0, {}, [])
