"""Drawn surfaces: the same for the same seed, different between plants,
told apart by their defects only.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from broker_config.protocol.errors import UsageError
from tests.support.counted_calls import count_calls
from trainer.data import class_folders, drawn_surfaces
from trainer.data.drawn_surfaces import CLASSES
from trainer.progress import ignore

SIZE = 32
EACH = np.tile(np.arange(len(CLASSES)), 2)


def test_images_are_gray_bytes_of_the_asked_size_with_contrast() -> None:
    images = drawn_surfaces.draw_images(EACH, SIZE, seed=0)
    assert images.shape == (14, SIZE, SIZE, 3)
    assert images.dtype == np.uint8
    assert (images == images[..., :1]).all()
    assert (images.std((1, 2, 3)) > 2).all()


def test_a_seed_and_a_plant_determine_every_pixel() -> None:
    one = drawn_surfaces.draw_images(EACH, SIZE, seed=3, plant=1)
    assert np.array_equal(one, drawn_surfaces.draw_images(EACH, SIZE, seed=3, plant=1))
    for seed, plant in ((4, 1), (3, 2)):
        assert not np.array_equal(
            one, drawn_surfaces.draw_images(EACH, SIZE, seed=seed, plant=plant)
        )


def test_another_seed_draws_other_defects_and_not_only_in_another_light() -> None:
    one, other = (
        drawn_surfaces.draw_images(EACH, SIZE, seed)[..., 0].reshape(len(EACH), -1)
        for seed in (3, 4)
    )
    likeness = [np.corrcoef(mine, theirs)[0, 1] for mine, theirs in zip(one, other, strict=True)]
    assert np.mean(likeness) < 0.3


def test_no_image_is_drawn_twice() -> None:
    images = drawn_surfaces.draw_images(np.zeros(20, int), SIZE, seed=0)
    assert len({image.tobytes() for image in images}) == 20


def test_plants_differ_in_camera_light_and_sheet() -> None:
    styles = [drawn_surfaces.draw_style(0, plant) for plant in range(5)]
    assert all(len(set(values)) == 5 for values in zip(*styles, strict=True))
    assert styles == [drawn_surfaces.draw_style(0, plant) for plant in range(5)]


def test_a_plants_style_shows_in_its_images() -> None:
    plants = sorted(range(5), key=lambda plant: drawn_surfaces.draw_style(0, plant).brightness)
    means = [
        drawn_surfaces.draw_images(np.repeat(EACH, 5), SIZE, 0, plant).mean() for plant in plants
    ]
    assert means[-1] - means[0] > 20
    assert means == sorted(means)


def nearest_centroid(features: np.ndarray, labels: np.ndarray) -> float:
    """Accuracy on every second row [n, f] of assigning it to the nearest class mean of the other
    rows.
    """
    scaled = (features - features.mean(0)) / features.std(0)
    centroids = np.stack([scaled[::2][labels[::2] == label].mean(0) for label in np.unique(labels)])
    distances = ((scaled[1::2, None] - centroids) ** 2).sum(2)
    return float(np.mean(distances.argmin(1) == labels[1::2]))


@pytest.fixture(scope="module", params=[0, 1], ids=["plant 0", "plant 1"])
def gray(request: pytest.FixtureRequest) -> tuple[np.ndarray, np.ndarray]:
    """One plant's images [n, S, S] and labels [n]."""
    labels = np.repeat(np.arange(len(CLASSES)), 50)
    return drawn_surfaces.draw_images(labels, SIZE, 0, request.param)[..., 0].astype(float), labels


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


def test_a_plant_s_folder_holds_as_many_images_of_every_class(tmp_path: Path) -> None:
    drawn_surfaces.write_plant(tmp_path, per_class=5, size=16, seed=0, plant=1)
    catalogue = class_folders.scan(tmp_path)
    assert catalogue.classes == sorted(CLASSES)
    assert Counter(entry.class_name for entry in catalogue.entries) == dict.fromkeys(CLASSES, 5)
    assert catalogue.findings == ()
    assert class_folders.load(catalogue, CLASSES, 16).images.std() > 5


def test_plants_can_share_a_folder(tmp_path: Path) -> None:
    for plant in range(3):
        drawn_surfaces.write_plant(tmp_path, per_class=2, size=16, seed=0, plant=plant)
    assert len(class_folders.scan(tmp_path).entries) == 3 * 2 * len(CLASSES)


def test_the_files_are_the_drawn_pixels(tmp_path: Path) -> None:
    drawn_surfaces.write_plant(tmp_path, per_class=2, size=16, seed=5, plant=2)
    written = class_folders.load(class_folders.scan(tmp_path), CLASSES, 16)
    drawn = drawn_surfaces.draw_images(np.repeat(np.arange(len(CLASSES)), 2), 16, seed=5, plant=2)
    assert {image.tobytes() for image in written.images} == {image.tobytes() for image in drawn}


# For a trial: a folder for each plant


def test_each_plant_gets_a_folder_that_join_can_take_and_a_sheet_shows_them(tmp_path: Path) -> None:
    count = drawn_surfaces.write_plants(
        tmp_path / "out", plants=3, per_class=2, size=32, seed=0, report=ignore
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "contact-sheet.png",
        "plant-1",
        "plant-2",
        "plant-3",
    ]
    assert (
        count
        == sum(len(class_folders.scan(tmp_path / "out" / f"plant-{n}").entries) for n in (1, 2, 3))
        == 3 * 2 * 7
    )
    with Image.open(tmp_path / "out" / "contact-sheet.png") as sheet:
        assert sheet.size == (3 * 2 * 32, 7 * 32)


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    with pytest.raises(UsageError, match="empty folder"):
        drawn_surfaces.write_plants(tmp_path, plants=1, per_class=1, size=16, seed=0, report=ignore)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_many_images_are_drawn_in_the_steps_of_a_few() -> None:
    def steps(per_class: int) -> int:
        labels = np.repeat(np.arange(len(CLASSES)), per_class)
        return count_calls(lambda: drawn_surfaces.draw_images(labels, 64, seed=0))

    steps(1)  # the first call also plans the Fourier transforms
    assert steps(30) == steps(3)
