"""A bundle's model says what the images of each folder look like."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from broker_config.protocol.errors import UsageError
from tests.support.tiny_bundle import CLASSES, tiny_bundle
from trainer.data.class_likeness import count_votes
from trainer.data.folder_scan import scan_folder

COLOURS = {"red": (200, 0, 0), "green": (0, 200, 0), "blue": (0, 0, 200)}


def paint(folder: Path, *colours: str) -> None:
    folder.mkdir(parents=True)
    random = np.random.default_rng(len(folder.name))
    for number, colour in enumerate(colours):
        pixels = COLOURS[colour] + random.integers(0, 50, (8, 8, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")


def test_each_image_of_a_folder_has_a_vote(tmp_path: Path) -> None:
    bundle = tiny_bundle(tmp_path / "bundle").folder
    paint(tmp_path / "images" / "Rot", "red", "red", "green")
    paint(tmp_path / "images" / "bleu", "blue", "blue")
    (tmp_path / "images" / "Rot" / "broken.png").write_bytes(b"no image")
    votes = count_votes(bundle, scan_folder(tmp_path / "images").entries, CLASSES)
    assert votes == {"Rot": Counter(red=2, green=1), "bleu": Counter(blue=2)}


def test_a_model_that_takes_everything_for_one_class_has_no_vote(tmp_path: Path) -> None:
    bundle = tiny_bundle(tmp_path / "bundle").folder
    for name in ("green", "Rot", "Blau"):  # under this camera's light all are reddish
        paint(tmp_path / "images" / name, "red", "red")
    votes = count_votes(bundle, scan_folder(tmp_path / "images").entries, CLASSES)
    assert votes["Rot"] == votes["Blau"] == Counter()
    paint(tmp_path / "two" / "red", "red", "red")
    paint(tmp_path / "two" / "Rot", "red", "red")
    paint(tmp_path / "two" / "green", "green")
    paint(tmp_path / "two" / "Blau", "blue")
    assert count_votes(bundle, scan_folder(tmp_path / "two").entries, CLASSES)["Rot"] == Counter(
        red=2
    )


def test_of_a_large_folder_fifty_images_are_looked_at(tmp_path: Path) -> None:
    paint(tmp_path / "images" / "Rot", *["red"] * 60)
    entries = scan_folder(tmp_path / "images").entries
    assert count_votes(tiny_bundle(tmp_path / "bundle").folder, entries, CLASSES) == {
        "Rot": Counter(red=50)
    }


def test_a_bundle_of_other_classes_is_refused(tmp_path: Path) -> None:
    bundle = tiny_bundle(tmp_path / "bundle").folder
    with pytest.raises(UsageError, match="red, green, blue"):
        count_votes(bundle, [], ("inclusion", "patches"))
