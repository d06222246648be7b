"""Drawn surfaces: the same for the same seed, different between plants, told apart by their defects only."""

from pathlib import Path

import numpy as np
import pytest

from trainer import data, surfaces
from trainer.surfaces import CLASSES

SIZE = 32
EACH = np.tile(np.arange(len(CLASSES)), 2)


def test_images_are_gray_bytes_of_the_asked_size_with_contrast() -> None:
    images = surfaces.draw(EACH, SIZE, seed=0)
    assert images.shape == (12, SIZE, SIZE, 3)
    assert images.dtype == np.uint8
    assert (images == images[..., :1]).all()
    assert (images.std((1, 2, 3)) > 5).all()


def test_a_seed_and_a_plant_determine_every_pixel() -> None:
    one = surfaces.draw(EACH, SIZE, seed=3, plant=1)
    assert np.array_equal(one, surfaces.draw(EACH, SIZE, seed=3, plant=1))
    for seed, plant in ((4, 1), (3, 2)):
        assert not np.array_equal(one, surfaces.draw(EACH, SIZE, seed=seed, plant=plant))


def test_another_seed_draws_other_defects_and_not_only_in_another_light() -> None:
    one, other = (surfaces.draw(EACH, SIZE, seed)[..., 0].reshape(len(EACH), -1) for seed in (3, 4))
    likeness = [np.corrcoef(mine, theirs)[0, 1] for mine, theirs in zip(one, other, strict=True)]
    assert np.mean(likeness) < 0.3


def test_no_image_is_drawn_twice() -> None:
    images = surfaces.draw(np.zeros(20, int), SIZE, seed=0)
    assert len({image.tobytes() for image in images}) == 20


def test_plants_differ_in_camera_light_and_sheet() -> None:
    styles = [surfaces.style(0, plant) for plant in range(5)]
    assert all(len(set(values)) == 5 for values in zip(*styles, strict=True))
    assert styles == [surfaces.style(0, plant) for plant in range(5)]


def test_a_plants_style_shows_in_its_images() -> None:
    plants = sorted(range(5), key=lambda plant: surfaces.style(0, plant).brightness)
    means = [surfaces.draw(np.repeat(EACH, 5), SIZE, 0, plant).mean() for plant in plants]
    assert means[-1] - means[0] > 20
    assert means == sorted(means)


def nearest_centroid(features: np.ndarray, labels: np.ndarray) -> float:
    """Accuracy on every second row [n, f] of assigning it to the nearest class mean of the other rows."""
    scaled = (features - features.mean(0)) / features.std(0)
    centroids = np.stack([scaled[::2][labels[::2] == label].mean(0) for label in np.unique(labels)])
    distances = ((scaled[1::2, None] - centroids) ** 2).sum(2)
    return float(np.mean(distances.argmin(1) == labels[1::2]))


@pytest.fixture(scope="module", params=[0, 1], ids=["plant 0", "plant 1"])
def gray(request: pytest.FixtureRequest) -> tuple[np.ndarray, np.ndarray]:
    """One plant's images [n, S, S] and labels [n]."""
    labels = np.repeat(np.arange(len(CLASSES)), 50)
    return surfaces.draw(labels, SIZE, 0, request.param)[..., 0].astype(float), labels


def test_a_class_is_not_given_away_by_mean_brightness(gray: tuple[np.ndarray, np.ndarray]) -> None:
    images, labels = gray
    assert nearest_centroid(images.mean((1, 2))[:, None], labels) < 0.4


def test_a_class_shows_in_what_a_defect_changes(gray: tuple[np.ndarray, np.ndarray]) -> None:
    images, labels = gray
    deviation = images - images.mean((1, 2), keepdims=True)
    spread = deviation.std((1, 2))
    features = [
        spread,
        (deviation**3).mean((1, 2)) / spread**3,
        np.abs(np.diff(images, axis=1)).mean((1, 2)),
        np.abs(np.diff(images, axis=2)).mean((1, 2)),
    ]
    assert nearest_centroid(np.stack(features, 1), labels) > 0.5


def test_a_written_folder_holds_every_class_evenly_from_all_plants(tmp_path: Path) -> None:
    surfaces.write(tmp_path, per_class=5, size=16, plants=2, seed=0)
    catalogue = data.scan(tmp_path)
    assert catalogue.classes == sorted(CLASSES)
    assert len(catalogue.entries) == 5 * len(CLASSES)
    assert catalogue.findings == ()
    of_each_plant = [entry.path.name[0] for entry in catalogue.entries if entry.class_name == "patches"]
    assert sorted(of_each_plant) == ["0", "0", "0", "1", "1"]
    assert data.load(catalogue, CLASSES, 16).images.std() > 5


def test_writing_again_draws_the_same_files(tmp_path: Path) -> None:
    for name in ("one", "other"):
        surfaces.write(tmp_path / name, per_class=2, size=16, plants=2, seed=5)
    one, other = (data.scan(tmp_path / name) for name in ("one", "other"))
    assert [entry.digest for entry in one.entries] == [entry.digest for entry in other.entries]


def test_more_plants_than_images_of_a_class_are_no_error(tmp_path: Path) -> None:
    surfaces.write(tmp_path, per_class=2, size=16, plants=4, seed=0)
    assert len(data.scan(tmp_path).entries) == 2 * len(CLASSES)
