"""Good images alone become a bundle that the line serves: it tells what is strange, and where."""

import json
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from broker_config.protocol.errors import UsageError
from edge.bundle.bundle_format import read_bundle
from edge.inference.class_prior import Prior
from edge.inference.predictor import Predictor
from edge.inference.tiling import View
from edge.uncertainty.model_warnings import model_warnings
from edge_node.extensions.anomaly.anomaly_export import (
    ANOMALY,
    AnomalyReport,
    export_anomaly_detector,
)
from tests.support.daemon_process import daemon
from tests.support.plants import here
from trainer.models.weights_package import PACKAGE

SIZE = 96
FLAW = slice(30, 62), slice(48, 72)  # rows and columns of it


def surfaces(folder: Path, count: int, seed: int, *, flawed: bool = False) -> Path:
    """Brushed metal; with a dull spot if flawed."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for number in range(count):
        grain = (
            random.normal(0, 12, (SIZE, 1))
            + random.normal(0, 4, (SIZE, SIZE))
            + random.normal(130, 4)
        )
        if flawed:
            grain[FLAW] = 90 + random.normal(0, 12, (32, 24))
        Image.fromarray(grain.clip(0, 255).astype(np.uint8)).save(folder / f"{number:03d}.png")
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("surfaces")
    for name, count, seed, flawed in (
        ("good", 24, 1, False),
        ("new", 20, 2, False),
        ("flawed", 20, 3, True),
    ):
        surfaces(folder / name, count, seed, flawed=flawed)
    return folder


@pytest.fixture(scope="module")
def report(images: Path) -> AnomalyReport:
    return export_anomaly_detector(
        images / "good", images / "flawed", images / "bundles" / "line-7", SIZE
    )


@pytest.mark.slow
def test_there_is_no_warning_about_a_detector_whose_threshold_good_images_gave(
    report: AnomalyReport,
) -> None:
    assert model_warnings(read_bundle(Path(report.bundle)).manifest, View(), Prior()) == ()


def load(folder: Path) -> np.ndarray:
    return np.stack(
        [np.asarray(Image.open(path).convert("RGB")) for path in sorted(folder.iterdir())]
    )


@pytest.mark.slow
def test_it_tells_good_images_that_it_has_not_seen_from_flawed_ones(
    images: Path, report: AnomalyReport
) -> None:
    predictor = Predictor(read_bundle(Path(report.bundle)))
    predictor.self_test()
    strange = [
        (predictor.run(load(images / name)).probabilities[:, 1] > 0.5).mean()
        for name in ("new", "flawed")
    ]
    assert strange[0] <= 0.1
    assert strange[1] >= 0.9


@pytest.mark.slow
def test_its_map_shows_where(images: Path, report: AnomalyReport) -> None:
    maps = Predictor(read_bundle(Path(report.bundle))).run(load(images / "flawed"), ("maps",)).maps
    assert maps is not None
    assert maps.shape == (20, 1, 2, SIZE // 16, SIZE // 16)
    rows, columns = np.divmod(maps[:, 0, 1].reshape(20, -1).argmax(1), SIZE // 16)
    assert (abs(16 * rows + 8 - 46) <= 24).all()
    assert (abs(16 * columns + 8 - 60) <= 24).all()


@pytest.mark.slow
def test_what_it_says_of_itself_is_measured_on_images_that_it_was_not_made_of(
    report: AnomalyReport,
) -> None:
    assert report.images == report.false_rejects.images == 24
    assert report.found is not None
    assert report.auroc is not None
    assert report.found.images == 20
    assert report.auroc > 0.95
    assert read_bundle(Path(report.bundle)).manifest.metrics["auroc"] == report.auroc


@pytest.mark.slow
def test_the_line_serves_it_without_any_settings(images: Path, report: AnomalyReport) -> None:
    with daemon(Path(report.bundle)) as line:
        for name, defect in (("new", False), ("flawed", True)):
            verdict = line.client.post(
                "/classify", content=(images / name / "005.png").read_bytes()
            ).json()
            assert verdict["defect"] is defect
            assert verdict["label"] == (ANOMALY if defect else "no_defect")
        picture: httpx.Response = line.client.post(
            "/classify?annotate=heat", content=(images / "flawed" / "005.png").read_bytes()
        )
        assert picture.headers["content-type"] == "image/jpeg"


@pytest.mark.slow
def test_the_command_reports_and_says_what_to_do_next(images: Path, tmp_path: Path) -> None:
    told = here("anomaly", images / "good", "--out", tmp_path / "line-8", "--size", "96", "--json")
    assert told.returncode == 0
    found = json.loads(told.stdout)
    assert (found["images"], found["found"], found["auroc"]) == (24, None, None)


def test_too_few_good_images_and_copies_of_one_are_refused(images: Path, tmp_path: Path) -> None:
    few = surfaces(tmp_path / "few", 9, 4)
    with pytest.raises(UsageError, match=r"9 good images.*10"):
        export_anomaly_detector(few, None, tmp_path / "bundle", SIZE)
    for number in range(20):
        (few / f"copy-{number}.png").write_bytes((few / "000.png").read_bytes())
    with pytest.raises(UsageError, match=r"9 good images.*10"):
        export_anomaly_detector(few, None, tmp_path / "bundle", SIZE)
    assert not (tmp_path / "bundle").exists()
    (few / "000.png").write_bytes(b"no image")
    with pytest.raises(UsageError, match=r"000\.png"):
        export_anomaly_detector(few, None, tmp_path / "bundle", SIZE)


def test_a_name_that_no_node_can_have_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--out"):
        export_anomaly_detector(tmp_path, None, tmp_path / "line 7#", SIZE)


def test_without_the_package_of_weights_its_installation_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    refused = here("anomaly", surfaces(tmp_path / "good", 24, 0), "--out", tmp_path / "bundle")
    assert refused.returncode == 2
    assert "pip install edge-node-weights" in refused.stderr
