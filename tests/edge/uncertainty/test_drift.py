"""Drift: an ordinary line raises no alarm, a changed one does once,
and the alarm ends when the line is as it was.
"""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge.bundle.reference import Reference
from edge.inference.outcomes import Verdict
from edge.inference.pipeline import Inspection, Pipeline
from edge.inference.predictor import Outputs
from edge.inference.served_model import load_model
from edge.inference.tiling import View
from edge.uncertainty.drift import Drift
from edge.uncertainty.drift import Settings as DriftSettings
from edge.uncertainty.uncertainty_check import Settings, UncertaintyCheck
from tests.support.classified_images import (
    SIZE,
    Told,
    a_line,
    judged_bundle,
    picture,
    pictures,
    shown,
)
from tests.support.tiny_bundle import CLASSES, tiny_bundle

WINDOW = 60


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return judged_bundle(tmp_path_factory.mktemp("bundle") / "a")


def watched(folder: Path, **settings: float) -> tuple[Pipeline, Drift, Told]:
    told = Told()
    doubts = UncertaintyCheck(Settings())
    drift = Drift(DriftSettings(**{"window": WINDOW, **settings}), doubts, told)  # type: ignore[arg-type]
    return a_line(folder, told, doubts, drift), drift, told


def darker(images: np.ndarray) -> np.ndarray:
    return (images * 0.8).astype(np.uint8)


def states(told: Told) -> list[object]:
    assert all(notice.kind == "drift" for notice in told.notices)
    return [notice.details["state"] for notice in told.notices]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_an_ordinary_line_raises_no_alarm(judged, seed):
    line, drift, told = watched(judged)
    shown(line, pictures(1200, 100 + seed))
    assert told.notices == []
    assert 0 < drift.level < 1
    assert drift.doubtful < 0.3


@pytest.mark.slow
def test_ordinary_images_that_are_the_tiles_of_one_frame_raise_no_alarm_and_changed_ones_do(judged):
    line, drift, told = watched(judged)
    line.view = View(tile=SIZE, overlap=0)
    numbers = np.random.default_rng(1)

    def frames(count: int) -> list[np.ndarray]:
        rows = [
            np.concatenate([picture(numbers, numbers.integers(3)) for _ in range(4)], 1)
            for _ in range(4 * count)
        ]
        return [np.concatenate(rows[4 * each : 4 * each + 4]) for each in range(count)]

    verdicts = shown(line, frames(300))
    assert sum(bool(each.doubts) for each in verdicts) > 60  # the deciding tile is the oddest of 16
    assert told.notices == []
    assert drift.excess < 0.5
    shown(line, darker(np.stack(frames(WINDOW))))
    assert drift.drifted


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


class Watch:
    """A watcher of drift, and images that are nothing but features: 40, of three classes,
    one of them more varied.
    """

    def __init__(self, seed: int, window: int, held_out: int = 60) -> None:
        self.random, self.told = np.random.default_rng(seed), Told()
        self.means = self.random.normal(0, 3, (3, 40))
        self.drift = Drift(DriftSettings(window=window), UncertaintyCheck(Settings()), self.told)
        taken = np.arange(held_out) % 3
        reference = Reference.from_features(
            np.stack([self.features(each) for each in taken]), taken, 3
        )
        manifest = SimpleNamespace(classes=CLASSES, confidence=None)
        self.model: Any = SimpleNamespace(
            manifest=manifest, predictor=SimpleNamespace(reference=reference)
        )

    def features(self, taken: int) -> np.ndarray:
        return np.asarray(self.random.normal(self.means[taken], (1, 1, 3)[taken]), np.float32)

    def show(
        self, count: int, shift: float = 0.0, doubted: float = 0.05, only: int | None = None
    ) -> None:
        for _ in range(count):
            taken = int(self.random.integers(3)) if only is None else only
            outputs = Outputs(
                np.eye(3, dtype=np.float32)[[taken]], None, (self.features(taken) + shift)[None]
            )
            doubts = ("novelty",) if self.random.random() < doubted else ()
            nothing: Any = None
            verdict = VERDICT(doubts=doubts)
            inspection = Inspection(
                self.model, nothing, nothing, outputs, outputs.probabilities, verdict, 0, 0, 0, 0
            )
            self.drift(inspection)


VERDICT = partial(
    Verdict,
    image="",
    label="red",
    confidence=1,
    probabilities={},
    bundle="",
    milliseconds=0,
    time="",
)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("held_out", [18, 60])
def test_few_held_out_images_make_the_limit_wide_not_the_alarm_frequent(seed, held_out):
    watch = Watch(seed, 200, held_out)
    watch.show(600)
    assert watch.told.notices == []


def test_a_class_that_is_more_varied_than_the_others_is_no_drift_when_it_comes_alone():
    for seed in range(6):
        watch = Watch(seed, 50)
        watch.show(600, only=2)
        assert watch.told.notices == []


def test_many_held_out_images_and_a_long_window_find_a_small_shift():
    for held_out, found in ((15, False), (600, True)):
        watch = Watch(1, 400, held_out)
        watch.show(1200, shift=0.5)
        assert watch.drift.drifted == found


def test_a_line_that_changes_to_and_fro_raises_no_storm_of_alarms():
    watch = Watch(2, 60)
    for _ in range(20):
        watch.show(6, shift=5)
        watch.show(54)
    assert 2 < len(watch.told.notices) <= 20


def test_doubts_that_become_frequent_raise_an_alarm_though_the_features_are_as_they_were():
    watch = Watch(3, 60)
    watch.show(200)
    assert watch.told.notices == []
    watch.show(60, doubted=0.9)
    [notice] = watch.told.notices
    assert "more verdicts are in doubt" in notice.text
    assert watch.drift.level < 1


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


def test_a_bundle_without_a_reference_is_not_watched(tmp_path):
    tiny_bundle(tmp_path / "old")
    line, drift, told = watched(tmp_path / "old")
    shown(line, darker(pictures(200, 15)))
    assert (drift.level, drift.shares, told.notices) == (0.0, {}, [])
