"""Plants' models are as good as they were, and plants are told the truth about them."""

import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks import quality
from benchmarks.quality import Figures

BEFORE = Figures(own=80.0, all=60.0, served=78.0, told=79.0)


@pytest.mark.slow
@pytest.mark.parametrize("samples", quality.SAMPLES)
def test_plants_with_drawn_images_reach_what_is_stored(samples: int) -> None:
    assert quality.find_faults(quality.measure_drawn(samples), quality.read_stored()) == []


@pytest.mark.parametrize(
    "changed",
    [
        {"own": 78.9},
        {"all": 58.9},
        {"served": 76.9, "told": 77.0},
        {"told": 80.1},
        {"told": 75.9},
    ],
)
def test_more_than_a_point_is_a_fault(changed: dict[str, float]) -> None:
    after = msgspec.structs.replace(BEFORE, **changed)
    assert len(quality.find_faults({"drawn 5": after}, {"drawn 5": BEFORE})) == 1


def test_figures_without_stored_ones_are_a_fault() -> None:
    assert len(quality.find_faults({"drawn 5": BEFORE}, {})) == 1


def test_a_point_less_or_a_better_model_is_no_fault() -> None:
    for figures in (
        BEFORE,
        Figures(own=79.0, all=59.0, served=77.0, told=79.0),
        Figures(own=90.0, all=70.0, served=88.0, told=88.0),
    ):
        assert quality.find_faults({"drawn 5": figures}, {"drawn 5": BEFORE}) == []


def test_data_sets_that_are_not_here_are_skipped_with_a_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["quality", "--data", str(tmp_path)])
    quality.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(quality.REAL)
    for name, line in zip(quality.REAL, lines, strict=True):
        assert str(tmp_path / name) in line
