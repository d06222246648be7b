"""A model has one accuracy, from the end of a federation to the line that serves it."""

from pathlib import Path

import httpx
import msgspec
import pytest

from edge.bundle.bundle_format import read_bundle
from edge.inference.class_prior import Prior
from edge.inference.part_decision import View
from edge.uncertainty.performance import Performance, held_out_performance
from tests.support.daemon_process import daemon
from tests.support.gaussian_plant import gaussian_plant
from trainer.report import report_page
from trainer.report.run_files import load_run
from trainer.training import personal_model

PLANT = "plant-1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gaussian_plant(tmp_path_factory.mktemp("state"), PLANT)


@pytest.fixture(scope="module")
def told(folder: Path) -> tuple[float, float, float]:
    """The accuracy in the model's metadata, and its interval."""
    metrics = personal_model.load_metadata(folder / "model").metrics
    assert metrics["images"] == 18
    assert 0.5 < metrics["accuracy"] < 1, "neither end, so that a slip shows"
    return metrics["accuracy"], metrics["accuracy_low"], metrics["accuracy_high"]


def check(found: Performance | None, told: tuple[float, float, float]) -> None:
    assert found is not None
    assert (found.accuracy.share, found.accuracy.low, found.accuracy.high) == told


def test_the_bundle_says_what_its_plant_was_told(
    folder: Path, told: tuple[float, float, float]
) -> None:
    manifest = read_bundle(folder / "bundles" / PLANT).manifest
    check(held_out_performance(manifest, View(), Prior()), told)
    metrics = manifest.metrics
    assert told == (metrics["accuracy"], metrics["accuracy_low"], metrics["accuracy_high"])
    assert manifest.comparison is not None
    best = manifest.comparison.chosen
    assert told == (best.accuracy, best.low, best.high)


def test_a_person_reads_the_same_at_the_end_of_a_run(
    folder: Path, told: tuple[float, float, float]
) -> None:
    share, low, high = told
    said = "\n".join(personal_model.format_outcome(personal_model.load_metadata(folder / "model")))
    assert f"accuracy {share:.1%}" in said
    assert f"{low:.0%} to {high:.0%}" in said
    assert f" {100 * share:.0f} %" in said, "of the deployed candidate"


def test_the_report_shows_the_same(
    folder: Path, told: tuple[float, float, float], tmp_path: Path
) -> None:
    (node,) = load_run(folder).report.nodes
    assert (node.accuracy, node.accuracy_low, node.accuracy_high) == told
    page = report_page.write(folder, tmp_path / "report.html", lambda event: None).read_text()
    assert f"<b>{100 * told[0]:.1f} %</b>" in page


def test_verdicts_are_those_that_the_accuracy_counts(folder: Path) -> None:
    manifest = read_bundle(folder / "bundles" / PLANT).manifest
    found = held_out_performance(manifest, View(), Prior())
    assert found is not None
    verdicts = personal_model.load_predictions(folder / "model")
    right = sum(each.label == each.verdict for each in verdicts)
    assert (right, len(verdicts)) == (found.accuracy.count, found.accuracy.images)


def test_a_line_tells_the_same(folder: Path, told: tuple[float, float, float]) -> None:
    with daemon(folder / "bundles" / PLANT) as line:
        about = line.client.get("/").json()
        check(msgspec.convert(about["performance"], Performance), told)
        assert about["comparison"][about["comparison"]["deployed"]]["accuracy"] == told[0]
        metrics: httpx.Response = line.client.get("/metrics")
        (value,) = [
            text.split()[-1]
            for text in metrics.text.splitlines()
            if "model_accuracy_ratio" in text and not text.startswith("#")
        ]
        assert float(value) == pytest.approx(told[0])
        page = line.client.get("/line/state").json()
        assert page["model"]["accuracy"]["share"] == told[0]
