"""A model is tried in a process of its own: one that computes for ever, or takes too much memory,
is refused, and nothing else stops.
"""

import threading
from pathlib import Path

import numpy as np
import pytest

from edge.bundle.bundle_format import MANIFEST, BundleError
from edge.inference.model_trial import ModelTrial
from tests.support.tiny_bundle import greedy_onnx, looping_onnx, tiny_bundle
from tests.support.waiting import wait_until

DARK = np.zeros((16, 16, 3), np.uint8)
BRIGHT = DARK + 255


def test_a_model_that_computes_is_let_in(tmp_path: Path) -> None:
    bundle = tiny_bundle(tmp_path / "a", extras=True)
    trial = ModelTrial()
    for _ in range(2):
        trial.check(bundle, [DARK, BRIGHT])


def test_a_graph_that_never_ends_is_ended(tmp_path: Path) -> None:
    bundle = tiny_bundle(tmp_path / "a", graph=looping_onnx(16, -1))
    with pytest.raises(BundleError, match="limits") as told:
        ModelTrial(loading=2).check(bundle)
    assert str(bundle.folder) in told.value.what
    assert told.value.remedy


def test_a_graph_that_never_ends_on_the_line_s_images_is_ended(tmp_path: Path) -> None:
    bundle = tiny_bundle(tmp_path / "a", graph=looping_onnx(16, 254))
    trial = ModelTrial(computing=1)
    trial.check(bundle, [DARK])
    with pytest.raises(BundleError, match="limits"):
        trial.check(bundle, [DARK, BRIGHT])


def test_when_the_time_is_up_enough_images_are_tried_and_it_is_told_how_many(
    tmp_path: Path,
) -> None:
    bundle = tiny_bundle(tmp_path / "a")
    assert ModelTrial().check(bundle, [DARK] * 20) == 20
    assert ModelTrial(enough=0).check(bundle, [DARK] * 20) == 16


def test_a_graph_that_takes_too_much_memory_gets_none(tmp_path: Path) -> None:
    trial = ModelTrial()
    trial.check(tiny_bundle(tmp_path / "a", graph=greedy_onnx(16, 10**6)))
    with pytest.raises(BundleError):
        trial.check(tiny_bundle(tmp_path / "b", graph=greedy_onnx(16, 10**9)))


def test_a_trial_can_be_stopped(tmp_path: Path) -> None:
    bundle = tiny_bundle(tmp_path / "a", graph=looping_onnx(16, -1))
    trial = ModelTrial()
    told: list[BundleError] = []

    def check() -> None:
        try:
            trial.check(bundle)
        except BundleError as error:
            told.append(error)

    thread = threading.Thread(target=check)
    thread.start()
    trial.stop()
    wait_until(lambda: not thread.is_alive())
    assert "the line ends" in told[0].what
    with pytest.raises(BundleError, match="the line ends"):
        trial.check(bundle)


def test_a_bundle_that_is_exchanged_meanwhile_is_noticed(tmp_path: Path) -> None:
    bundle = tiny_bundle(tmp_path / "a")
    (bundle.folder / MANIFEST).write_bytes((bundle.folder / MANIFEST).read_bytes() + b" ")
    with pytest.raises(BundleError, match="meanwhile"):
        ModelTrial().check(bundle)
