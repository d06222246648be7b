"""Pretraining on drawn images: learning, and equal bytes however often it is interrupted."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from research.pretraining.pretrain import Drawn, Plan, pretrain
from trainer.data.drawn_surfaces import CLASSES

PLAN = Plan(steps=12, batch=4, textures=3, size=32, late_size=40, checkpoint=2)
FILE = "surface_mobilenet_v2.safetensors"


def start(folder: Path) -> "subprocess.Popen[str]":
    flags = [
        text
        for name, value in PLAN._asdict().items()
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    command = [sys.executable, "-m", "research.pretraining.pretrain", str(folder), *flags]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def test_a_step_follows_from_the_seed_and_its_number_alone() -> None:
    images, labels = Drawn(PLAN)[3]
    again, same = Drawn(PLAN)[3]
    assert images.shape == (4, 32, 32, 3)
    assert np.array_equal(images, again)
    assert np.array_equal(labels, same)
    assert not np.array_equal(images, Drawn(PLAN)[4][0])
    assert not np.array_equal(images, Drawn(PLAN._replace(seed=1))[3][0])


def test_the_last_steps_show_larger_images_and_the_first_no_faint_ones() -> None:
    assert [Drawn(PLAN)[step][0].shape[1] for step in (0, 10, 11)] == [32, 32, 40]
    assert PLAN.contrast_at(0) == 1
    assert PLAN.contrast_at(11) == 0


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_share_of_defects_is_as_planned(share: float) -> None:
    drawn = Drawn(PLAN._replace(defects=share, textures=50))
    labels = np.concatenate([drawn[step][1] for step in range(10)])
    assert np.mean(labels < len(CLASSES)) == share
    assert len(np.unique(labels)) >= 5


@pytest.mark.slow
def test_killed_and_started_again_it_ends_with_the_bytes_of_an_uninterrupted_one(
    tmp_path: Path,
) -> None:
    whole = start(tmp_path / "whole")
    cut = start(tmp_path / "cut")
    assert cut.stdout is not None
    assert whole.stdout is not None
    for line in cut.stdout:
        if line.startswith("step 4/12"):
            break
    os.killpg(cut.pid, signal.SIGKILL)
    cut.wait()
    resumed = start(tmp_path / "cut")
    told, _ = resumed.communicate(timeout=120)
    whole.communicate(timeout=120)
    assert resumed.returncode == whole.returncode == 0
    assert "step 2/12" not in told
    assert (tmp_path / "cut" / FILE).read_bytes() == (tmp_path / "whole" / FILE).read_bytes()

    arrays = load_file(tmp_path / "whole" / FILE)
    assert {array.dtype for array in arrays.values() if array.ndim == 4} == {np.dtype(np.float16)}
    assert (tmp_path / "whole" / FILE).stat().st_size < 5_000_000

    with pytest.raises(SystemExit, match="another plan"):
        pretrain(PLAN._replace(seed=1), tmp_path / "whole")
