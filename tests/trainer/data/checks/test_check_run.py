"""A look at a plant's images finds what training and judging would suffer from, names it,
and says what to do.
"""

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from broker_config.protocol.errors import UsageError
from edge_node.cli.main import app, command_tree
from edge_node.cli.node import host_name
from tests.support.paths import SHARED_DATA
from tests.support.plants import here
from trainer.data import class_folders
from trainer.data.checks import findings_output
from trainer.data.checks.check_run import (
    ImageReport,
    check_folders,
    format_brief,
    image_options,
    load_checked,
)
from trainer.data.checks.findings import Finding
from trainer.data.image_groups import read_keys

CLASSES = ("dent", "scratch", "stain")
SIZE = 64


def texture(seed: int, *, mean: float = 128, width: int = SIZE, height: int = SIZE) -> Image.Image:
    """Grain that is like no other seed's."""
    noise = (
        np.random.default_rng(seed).normal(mean, 30, (height // 4 + 1, width // 4 + 1)).clip(0, 255)
    )
    return Image.fromarray(noise.astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def plant(tmp_path: Path) -> Path:
    """A folder in which nothing is wrong: 10 images each of three classes."""
    for number, name in enumerate(CLASSES):
        (tmp_path / "plant" / name).mkdir(parents=True)
        for index in range(10):
            texture(100 * number + index).save(tmp_path / "plant" / name / f"{index}.png")
    return tmp_path / "plant"


def found(report: ImageReport, kind: str) -> Finding:
    """The only finding of this kind; every finding says what to do."""
    assert all(finding.remedy for finding in report.findings)
    (finding,) = [finding for finding in report.findings if finding.kind == kind]
    return finding


def check(plant: Path, test: Path | None = None, size: int = SIZE) -> ImageReport:
    return check_folders(plant, test, size)


def test_good_images_are_not_complained_of(plant: Path) -> None:
    report = check(plant)
    assert report.findings == ()
    assert report.can_join
    assert [(each.name, each.images) for each in findings_output.summarise(report).classes] == [
        (name, 10) for name in CLASSES
    ]


# Files


def test_all_unreadable_images_are_counted_and_named_and_stop_the_plant(plant: Path) -> None:
    for number in range(12):
        (plant / "dent" / f"broken-{number:02}.png").write_bytes(b"no image %d" % number)
    report = check(plant)
    finding = found(report, "unreadable")
    assert not report.can_join
    assert len(finding.files) == 12
    assert finding.text.startswith("12 image(s)")
    assert finding.text.endswith("and 2 more")
    assert len(report.facts) == 30


def test_every_error_is_found_at_once(plant: Path) -> None:
    (plant / "dent" / "broken.png").write_bytes(b"no image")
    (plant / "stain" / "same.png").write_bytes((plant / "dent" / "0.png").read_bytes())
    assert [finding.kind for finding in check(plant).findings] == ["two classes", "unreadable"]


def test_empty_files_are_told_as_such_and_not_as_copies(plant: Path) -> None:
    for name in ("dent", "stain"):
        (plant / name / "empty.png").write_bytes(b"")
    report = check(plant)
    assert [finding.kind for finding in report.findings] == ["unreadable"]
    assert len(found(report, "unreadable").files) == 2
    assert found(report, "unreadable").text.count("is empty") == 2


def test_a_class_folder_without_an_image_is_named(plant: Path) -> None:
    (plant / "crack").mkdir()
    (plant / ".git").mkdir()
    assert found(check(plant), "no images").files == (str(plant / "crack"),)


@pytest.mark.parametrize(("bits", "factor"), [(10, 64), (12, 16), (14, 4)])
def test_images_of_16_bits_that_use_fewer_are_warned_of(
    plant: Path, bits: int, factor: int
) -> None:
    for path in plant.rglob("*.png"):
        deep = np.asarray(Image.open(path)).astype(np.uint16) << (bits - 8)
        Image.fromarray(deep).save(path)
    finding = found(check(plant), "bits")
    assert len(finding.files) == 30
    assert f"multiply {factor} " in finding.remedy


def test_images_of_16_bits_whose_brightest_uses_all_are_not_complained_of(plant: Path) -> None:
    for path in plant.rglob("*.png"):
        Image.fromarray(np.asarray(Image.open(path)).astype(np.uint16) * 257).save(path)
    assert check(plant).findings == ()


# The same image twice


def test_pixels_that_are_saved_in_another_format_count_as_the_same_image(plant: Path) -> None:
    Image.open(plant / "dent" / "0.png").convert("RGB").save(plant / "dent" / "copy.bmp")
    finding = found(check(plant), "twice")
    assert finding.severity == "warning"
    assert set(finding.files) == {str(plant / "dent" / "0.png"), str(plant / "dent" / "copy.bmp")}


def test_the_same_pixels_in_two_classes_are_an_error(plant: Path) -> None:
    Image.open(plant / "dent" / "0.png").save(plant / "stain" / "copy.bmp")
    finding = found(check(plant), "two classes")
    assert finding.severity == "error"
    assert f"{plant / 'dent' / '0.png'}" in finding.text
    assert f"{plant / 'stain' / 'copy.bmp'}" in finding.text


@pytest.mark.parametrize("name", ["0.png", "0.bmp"], ids=["byte for byte", "pixel for pixel"])
def test_a_held_out_image_that_also_trains_is_an_error(plant: Path, name: str) -> None:
    (plant.parent / "test" / "dent").mkdir(parents=True)
    Image.open(plant / "dent" / "0.png").save(plant.parent / "test" / "dent" / name)
    finding = found(check(plant, plant.parent / "test"), "held out")
    assert finding.severity == "error"
    assert set(finding.files) == {
        str(plant / "dent" / "0.png"),
        str(plant.parent / "test" / "dent" / name),
    }


def darker(image: Image.Image) -> Image.Image:
    return image.point(lambda value: value * 0.9)


def noisier(image: Image.Image) -> Image.Image:
    noise = np.random.default_rng(0).normal(0, 5, (SIZE, SIZE))
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))


def coarser(image: Image.Image) -> Image.Image:
    return image.resize((SIZE // 2, SIZE // 2)).resize((SIZE, SIZE))


@pytest.mark.parametrize("change", [darker, noisier, coarser])
def test_an_image_that_was_changed_a_little_is_a_near_duplicate(
    plant: Path, change: Callable[[Image.Image], Image.Image]
) -> None:
    change(Image.open(plant / "dent" / "0.png")).save(plant / "dent" / "changed.png")
    finding = found(check(plant), "alike")
    assert finding.severity == "hint"
    assert set(finding.files) == {
        str(plant / "dent" / "0.png"),
        str(plant / "dent" / "changed.png"),
    }


def save_sisters(
    plant: Path, target: Path, classes: tuple[str, ...] = CLASSES, count: int = 10
) -> None:
    """A darker, turned picture of the first spots of each class."""
    for name in classes:
        (target / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            darker(Image.open(plant / name / f"{index}.png")).rotate(90).save(
                target / name / f"sister-{index}.png"
            )


def test_held_out_images_that_look_like_training_images_are_the_first_warning(plant: Path) -> None:
    test = plant.parent / "test"
    save_sisters(plant, test, ("dent",), 2)
    texture(999).save(test / "dent" / "other.png")
    resize(plant, "stain/3.png", 40, 40)
    report = check(plant, test)
    first = report.findings[0]
    assert (first.severity, first.kind) == ("warning", "held out")
    assert first.text.startswith("2 of 3 held-out images look like training images")
    assert f"{plant / 'dent' / '0.png'} ~ {test / 'dent' / 'sister-0.png'}" in first.text
    assert len(first.files) == 4
    assert report.can_join
    _, findings = load_checked(
        class_folders.scan(plant), class_folders.scan(test), CLASSES, SIZE, seed=0
    )
    assert findings[0] == first


def test_held_out_images_of_the_users_group_are_listed_too_and_other_ones_are_not(
    plant: Path,
) -> None:
    (plant.parent / "test" / "dent").mkdir(parents=True)
    texture(999).save(plant.parent / "test" / "dent" / "4.png")
    texture(998).save(plant.parent / "test" / "dent" / "12.png")
    report = check_folders(plant, plant.parent / "test", SIZE, group="^[0-9]+")
    assert found(report, "held out").text.startswith("1 of 2 held-out images")
    assert not [
        each for each in check(plant, plant.parent / "test").findings if each.kind == "held out"
    ]


def test_groups_within_the_folder_are_counted_and_listed_for_machines(plant: Path) -> None:
    save_sisters(plant, plant, ("dent", "stain"), 2)
    report = check(plant)
    finding = found(report, "alike")
    assert finding.severity == "hint"
    assert finding.text.startswith("8 of 34 images are in 4 group(s)")
    listed = findings_output.summarise(report).groups
    assert [str(plant / "dent" / "0.png"), str(plant / "dent" / "sister-0.png")] in [
        sorted(group) for group in listed
    ]
    assert len(listed) == 4


def test_no_held_out_image_has_a_sister_among_the_training_images(plant: Path) -> None:
    save_sisters(plant, plant)
    images, _ = load_checked(class_folders.scan(plant), None, CLASSES, SIZE, seed=0)
    assert images.test is not None
    sides = [
        {path.name.removeprefix("sister-") + path.parent.name for path in side.paths}
        for side in (images.train, images.test)
    ]
    assert not sides[0] & sides[1]
    assert len(sides[1]) == 6
    assert len(images.test.labels) == 12


def test_what_the_user_says_belongs_together_stays_together(plant: Path) -> None:
    catalogue = class_folders.scan(plant)
    keys = read_keys("^(.)", catalogue.entries)
    images, _ = load_checked(catalogue, None, CLASSES, SIZE, seed=0, keys=keys)
    assert images.test is not None
    assert not {path.name for path in images.train.paths} & {
        path.name for path in images.test.paths
    }


def test_many_pictures_of_few_spots_are_warned_of(plant: Path) -> None:
    for path in [*plant.glob("*/[4-9].png")]:
        path.unlink()
    for turn in (0.9, 0.8, 0.7):
        for path in [*plant.glob("*/?.png")]:
            Image.open(path).point(lambda value, turn=turn: value * turn).save(
                path.with_stem(f"{path.stem}-{turn}")
            )
    images, findings = load_checked(class_folders.scan(plant), None, CLASSES, SIZE, seed=0)
    assert images.test is None
    (few,) = [finding for finding in findings if finding.kind == "too few"]
    assert "48 images" in few.text
    assert "12 different spots" in few.text


# Size, brightness, format


def resize(plant: Path, pattern: str, width: int, height: int) -> None:
    for path in plant.glob(pattern):
        texture(int(path.stem) + len(path.parent.name) * 1000, width=width, height=height).save(
            path
        )


def test_images_far_smaller_than_the_networks_input_are_named(plant: Path) -> None:
    resize(plant, "dent/3.png", 40, 40)
    finding = found(check(plant), "too small")
    assert (finding.severity, finding.files) == ("warning", (str(plant / "dent" / "3.png"),))
    assert "40 x 40" in finding.text


def test_images_that_are_shrunk_so_far_that_defects_vanish_are_hinted_at(plant: Path) -> None:
    assert "8 times" in found(check(plant, size=8), "too large").text


@pytest.mark.parametrize(
    ("pattern", "size", "kind", "severity"),
    [
        ("dent/0.png", (70, 70), "sizes", "hint"),
        ("dent/0.png", (128, 64), "squashed", "warning"),
        ("*/*.png", (128, 64), "squashed", "hint"),
    ],
    ids=["another size", "another shape", "all of one shape"],
)
def test_what_squashes_images_differently_is_worse_than_what_squashes_all_alike(
    plant: Path, pattern: str, size: tuple[int, int], kind: str, severity: str
) -> None:
    resize(plant, pattern, *size)
    finding = found(check(plant), kind)
    assert finding.severity == severity
    assert f"{size[0]} x {size[1]}" in finding.text


@pytest.mark.parametrize("gray", [0, 128, 255])
def test_an_image_that_shows_nothing_is_named(plant: Path, gray: int) -> None:
    Image.new("L", (SIZE, SIZE), gray).save(plant / "dent" / "0.png")
    assert found(check(plant), "empty").files == (str(plant / "dent" / "0.png"),)


def test_an_image_that_is_much_brighter_than_its_class_is_hinted_at(plant: Path) -> None:
    texture(999, mean=210).save(plant / "dent" / "0.png")
    finding = found(check(plant), "brightness")
    assert (finding.severity, finding.files) == ("hint", (str(plant / "dent" / "0.png"),))


def as_png(image: Image.Image, path: Path) -> None:
    image.save(path.with_suffix(".png"))


def as_jpeg(image: Image.Image, path: Path) -> None:
    image.save(path.with_suffix(".jpg"), quality=95)


def as_colour(image: Image.Image, path: Path) -> None:
    as_png(image.convert("RGB"), path)


def as_larger(image: Image.Image, path: Path) -> None:
    as_png(image.resize((SIZE + 2, SIZE + 2)), path)


def with_camera(image: Image.Image, path: Path) -> None:
    exif = Image.Exif()
    exif[0x010F] = "Acme"
    image.save(path.with_suffix(".png"), exif=exif)


@pytest.mark.parametrize(
    ("save", "told"),
    [
        (as_jpeg, "file type.*JPEG"),
        (as_colour, "colour mode.*RGB"),
        (as_larger, "size.*66 x 66"),
        (with_camera, "camera.*Acme"),
    ],
)
def test_a_format_that_only_one_class_has_gives_it_away(
    plant: Path, save: Callable[[Image.Image, Path], None], told: str
) -> None:
    for path in plant.glob("stain/*.png"):
        image = Image.open(path)
        image.load()
        path.unlink()
        save(image, path)
    finding = found(check(plant), "giveaway")
    assert finding.severity == "warning"
    assert re.search(f"{told}.*stain", finding.text)
    assert len(finding.files) == 10


def test_a_format_that_occurs_a_few_times_in_one_class_may_be_chance(plant: Path) -> None:
    for index in range(4):
        as_jpeg(Image.open(plant / "stain" / f"{index}.png"), plant / "stain" / f"{index}")
        (plant / "stain" / f"{index}.png").unlink()
    assert [finding for finding in check(plant).findings if finding.kind == "giveaway"] == []


# Numbers and classes


def keep(plant: Path, **counts: int) -> Path:
    for name, count in counts.items():
        for path in sorted((plant / name).iterdir())[count:]:
            path.unlink()
    return plant


@pytest.mark.parametrize(
    "counts", [{"dent": 4}, {"dent": 5, "scratch": 5, "stain": 9}], ids=["4 of a class", "19"]
)
def test_too_few_images_to_hold_any_out_are_a_warning(plant: Path, counts: dict[str, int]) -> None:
    finding = found(check(keep(plant, **counts)), "too few")
    assert finding.severity == "warning"
    assert "left out" in finding.text


def test_held_out_images_of_the_plants_own_make_few_images_enough(plant: Path) -> None:
    for number, name in enumerate(CLASSES):
        (plant.parent / "test" / name).mkdir(parents=True)
        texture(1000 + number).save(plant.parent / "test" / name / "0.png")
    assert check(keep(plant, dent=4, scratch=4, stain=4), plant.parent / "test").findings == ()


def test_one_image_is_not_enough_to_join(plant: Path) -> None:
    assert found(check(keep(plant, dent=1, scratch=0, stain=0)), "too few").severity == "error"


def test_a_plant_with_one_class_is_warned(plant: Path) -> None:
    assert "dent" in found(check(keep(plant, scratch=0, stain=0)), "one class").text


def test_much_rarer_classes_are_hinted_at(plant: Path) -> None:
    finding = found(check(keep(plant, dent=2)), "imbalance")
    assert "scratch has 10 images, dent only 2" in finding.text


def test_classes_that_only_one_folder_has_are_named(plant: Path) -> None:
    for number, name in enumerate(("crack", "dent")):
        (plant.parent / "test" / name).mkdir(parents=True)
        texture(1000 + number).save(plant.parent / "test" / name / "0.png")
    findings = check(plant, plant.parent / "test").findings
    assert [(finding.severity, finding.kind) for finding in findings] == [
        ("warning", "classes"),
        ("hint", "classes"),
    ]
    assert "crack" in findings[0].text
    assert "scratch, stain" in findings[1].text


def test_held_out_images_of_other_classes_only_are_an_error(plant: Path) -> None:
    (plant.parent / "test" / "crack").mkdir(parents=True)
    texture(1000).save(plant.parent / "test" / "crack" / "0.png")
    finding = check(plant, plant.parent / "test").findings[0]
    assert (finding.severity, finding.kind) == ("error", "classes")
    assert "crack" in finding.text
    assert finding.remedy


# Joining


def test_joining_looks_at_the_images_that_it_loads_and_says_what_it_found_in_a_few_lines(
    plant: Path,
) -> None:
    for number in range(40):
        Image.open(plant / "dent" / "0.png").save(plant / "dent" / f"copy-{number}.bmp")
    resize(plant, "dent/3.png", 40, 40)
    Image.new("L", (SIZE, SIZE)).save(plant / "stain" / "3.png")
    (plant / "loose.png").write_bytes(b"ignored")
    images, findings = load_checked(class_folders.scan(plant), None, CLASSES, SIZE, seed=0)
    said = list(format_brief(findings, plant))
    assert images.test is not None
    assert len(images.train.labels) + len(images.test.labels) == 31
    assert [line.split(":")[0] for line in said[:-1]] == ["warning"] * 3
    assert max(map(len, said)) < 160 + len(str(plant))
    assert said[-1].startswith("5 warning(s) and 1 hint(s)")
    assert f"edge-node check {plant} shows all" in said[-1]


def test_the_command_that_shows_all_takes_the_images_as_joining_does(plant: Path) -> None:
    finding = Finding("warning", "twice", "...", "...")
    options = image_options(Path("held out"), "^(sheet[0-9]+)_", {"Kratzer": "scratch"})
    (*_, line) = format_brief([finding], plant, options)
    assert (
        f"edge-node check {plant} --test 'held out' --group '^(sheet[0-9]+)_' --alias "
        "Kratzer=scratch shows"
    ) in line


def test_joining_is_refused_with_what_the_look_finds(plant: Path) -> None:
    Image.open(plant / "dent" / "0.png").save(plant / "stain" / "copy.bmp")
    with pytest.raises(UsageError) as caught:
        load_checked(class_folders.scan(plant), None, CLASSES, SIZE, seed=0)
    assert str(plant / "stain" / "copy.bmp") in caught.value.what
    assert "remove" in caught.value.remedy


def test_looking_changes_nothing_in_what_is_loaded(plant: Path) -> None:
    looked: list[str] = []
    plain = class_folders.load(class_folders.scan(plant), CLASSES, SIZE)
    seen = class_folders.load(
        class_folders.scan(plant), CLASSES, SIZE, lambda entry, _: looked.append(entry.digest)
    )
    assert np.array_equal(plain.images, seen.images)
    assert tuple(looked) == seen.digests == plain.digests


# The command


def colors(sheet: Path) -> set[tuple[int, ...]]:
    """What is not gray in a picture, below its heading."""
    with Image.open(sheet) as image:
        counted = image.crop((0, 30, *image.size)).getcolors(1 << 24)
    return {color for _, color in counted or [] if len(set(color)) > 1}


def test_the_command_tells_findings_and_draws_a_picture(plant: Path, tmp_path: Path) -> None:
    (plant / "dent" / "broken.png").write_bytes(b"no image")
    result = here("check", plant, "--picture", tmp_path / "sheet.png")
    assert result.returncode == 1
    assert "1 image(s) cannot be read" in result.stdout
    assert "repair or remove" in result.stdout
    assert (0xC6, 0x28, 0x28) in colors(tmp_path / "sheet.png")


def test_a_picture_without_a_place_keeps_no_finding_back(plant: Path, tmp_path: Path) -> None:
    result = here("check", plant, "--picture", tmp_path / "none" / "sheet.png")
    assert result.returncode == 2
    assert result.stdout.endswith("1 warning\n")
    assert "sheet.png cannot" in result.stderr


def test_the_folder_of_one_class_is_answered_with_the_one_around_it(plant: Path) -> None:
    result = here("check", plant / "dent")
    assert result.returncode == 1
    assert f"if {plant}/dent is one of these, pass {plant}" in result.stdout


def test_the_picture_marks_nothing_where_nothing_is_wrong(plant: Path, tmp_path: Path) -> None:
    findings_output.draw_contact_sheet(check(plant), tmp_path / "sheet.png")
    assert colors(tmp_path / "sheet.png") == set()


def test_the_command_prints_one_json_object_and_draws_only_on_request(plant: Path) -> None:
    result = here("check", plant, "--size", SIZE, "--json")
    assert result.returncode == 0
    assert json.loads(result.stdout) == {
        "can_join": True,
        "classes": [
            {
                "name": name,
                "images": 10,
                "held_out": 0,
                "sizes": {"64 x 64": 10},
                "types": {"PNG L": 10},
                "brightness": pytest.approx(128, abs=10),
            }
            for name in CLASSES
        ],
        "findings": [],
        "groups": [],
        "proposed_pattern": "",
        "proposed_groups": {},
        "picture": None,
    }


def proposed(*words: object) -> list[str]:
    """The command that a check proposes, and join's own parser understands."""
    told = here("check", *words).stdout
    (command,) = re.findall(r"^next: (.*)$", told, re.MULTILINE) or [""]
    edge_node, name, *options = shlex.split(command) or ["", "", ""]
    if command:
        command_tree(app).commands["join"].make_context("join", list(options))
    return [edge_node, name, *options] if command else []


def test_a_check_ends_with_the_command_that_joins_with_what_was_checked(
    plant: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "held out").mkdir()
    for name in CLASSES:
        (tmp_path / "held out" / name).mkdir()
        texture(9000 + len(name)).save(tmp_path / "held out" / name / "1.png")
    taken = ["--test", "held out", "--group", "^([0-9])", "--alias", "dent=dents"]
    assert proposed("plant", *taken, "--classes", "dents,scratch,stain") == [
        *("edge-node", "join", "BROKER_URL", "--name", host_name(), "--data", "plant"),
        *taken,
    ]
    (tmp_path / "plant-a.kit").touch()
    assert proposed("plant")[2:] == ["--kit", "plant-a.kit", "--data", "plant"]
    (tmp_path / "coordinator.kit").touch()  # with two the choice is the user's
    assert proposed("plant")[2:] == ["BROKER_URL", "--name", host_name(), "--data", "plant"]
    (tmp_path / "plant-a.kit").unlink()
    assert "--kit" not in proposed("plant"), "that kit is the coordinator's"
    (tmp_path / "node.toml").touch()
    assert proposed("plant")[2:] == ["--config", "node.toml", "--data", "plant"]


def test_nothing_is_proposed_to_a_plant_that_cannot_join(
    plant: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(plant.parent)
    (plant / "dent" / "broken.png").write_bytes(b"no image")
    assert proposed(plant) == []


def test_held_out_images_that_nobody_has_mentioned_are_pointed_at(plant: Path) -> None:
    test = plant.parent / "Test"
    (test / "dent").mkdir(parents=True)
    texture(9007).save(test / "dent" / "1.png")
    finding = found(check(plant), "held out")
    assert (finding.severity, finding.remedy.endswith(f"--test {test}")) == ("hint", True)
    assert all(each.kind != "held out" for each in check(plant, test).findings)


def test_a_folder_that_holds_both_is_told_apart(plant: Path) -> None:
    (plant.parent / "both").mkdir()
    plant.rename(plant.parent / "both" / "train")
    (plant.parent / "both" / "test" / "dent").mkdir(parents=True)
    texture(9007).save(plant.parent / "both" / "test" / "dent" / "1.png")
    (finding,) = check(plant.parent / "both").findings
    assert finding.remedy.endswith(
        f"perhaps {plant.parent / 'both' / 'train'} with --test {plant.parent / 'both' / 'test'}"
    )


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_a_contact_sheet_among_the_images_is_none_of_them(
    plant: Path, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = check(plant)
    findings_output.draw_contact_sheet(before, plant / f"sheet.{suffix}")
    assert check(plant).findings == before.findings
    assert caplog.messages == [
        f"1 annotated picture(s) are left out, the first is {plant / f'sheet.{suffix}'}"
    ]


@pytest.mark.parametrize(
    "arguments", [("nowhere",), (".", "--picture", "no/such/folder/sheet.png")]
)
def test_what_cannot_be_done_is_a_usage_error(arguments: tuple[str, ...], plant: Path) -> None:
    result = here("check", *(str(plant) if word == "." else word for word in arguments))
    assert result.returncode == 2
    assert "What to do:" in result.stderr


# Real images


@pytest.mark.slow
@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="needs the shared data sets")
def test_what_is_known_of_neu_cls_and_x_sdd_is_found() -> None:
    neu, xsdd = check(SHARED_DATA / "neu_cls", size=128), check(SHARED_DATA / "xsdd", size=128)
    assert {Path(file).name for file in found(neu, "twice").files} == {
        "patches_101.jpg",
        "patches_105.jpg",
    }
    assert len(found(xsdd, "twice").files) == 18
    assert "PNG are of finishing_roll_printing" in found(xsdd, "giveaway").text
    assert "122 x 128 (1)" in found(xsdd, "sizes").text
    assert neu.can_join
    assert xsdd.can_join


# Names of classes


def test_folders_that_are_no_class_of_the_federation_stop_the_plant_before_it_joins(
    plant: Path,
) -> None:
    assert here("check", plant, "--classes", "dent,scratch,stain,rust", "--json").returncode == 0
    done = here("check", plant, "--classes", "dents, scratch, stain", "--json")
    assert done.returncode == 1
    (finding,) = [
        each for each in json.loads(done.stdout)["findings"] if each["severity"] == "error"
    ]
    assert "'dent' is none" in finding["text"]
    assert "perhaps dents" in finding["text"]
    assert (
        here(
            "check", plant, "--classes", "dents,scratch,stain", "--alias", "dent=dents", "--json"
        ).returncode
        == 0
    )


@pytest.mark.parametrize("name", [b"Kratzer_\xe4", b"a\nb", b"a\\b"])
def test_a_folder_that_no_class_can_be_called_like_is_an_error_and_json_all_the_same(
    plant: Path, name: bytes
) -> None:
    """As a zip from Windows leaves it: Latin-1."""
    odd = plant / os.fsdecode(name)
    odd.mkdir()
    for index in range(10):
        texture(1000 + index).save(odd / f"{index}.png")
    done = here("check", plant, "--size", SIZE, "--json")
    assert done.returncode == 1, done.stderr
    findings = json.loads(done.stdout)["findings"]
    [told] = [each for each in findings if each["severity"] == "error"]
    assert told["text"].isprintable()
    assert here("check", plant, "--size", SIZE, "--picture", plant / "a.png").returncode == 1


def test_a_file_s_name_in_any_encoding_is_no_error(plant: Path) -> None:
    (plant / CLASSES[0] / "0.png").rename(plant / CLASSES[0] / os.fsdecode(b"\xe4\x1b[2J.png"))
    done = here("check", plant, "--size", SIZE, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["can_join"]


def test_the_command_proposes_groups_that_join_takes_or_says_that_none_are_known(
    plant: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "--group" in here("check", plant, "--picture", tmp_path / "sheet.png").stdout
    for number, path in enumerate(sorted(plant.rglob("*.png"))):
        part, view = divmod(number, 3)
        path.rename(path.with_name(f"part-{part:02}_{view}.png"))
    told = here("check", plant, "--picture", tmp_path / "sheet.png").stdout
    (line,) = [line for line in told.splitlines() if "--group" in line]
    pattern = shlex.split(line[line.index("--group") :])[1]
    assert json.loads(here("check", plant, "--json").stdout)["proposed_pattern"] == pattern
    grouped = json.loads(here("check", plant, "--group", pattern, "--json").stdout)
    assert sorted(map(len, grouped["groups"])) == [3] * 10
    for number, path in enumerate(sorted(plant.rglob("*.png"))):
        path.rename(path.with_name(f"{number}.png"))
        os.utime(path.with_name(f"{number}.png"), (0.0, 1000.0 + 90 * (number // 3) + number % 3))
    told = here("check", plant, "--picture", tmp_path / "sheet.png").stdout
    assert "edge-node-groups.csv" in told
    grouped = json.loads(here("check", plant, "--group", "edge-node-groups.csv", "--json").stdout)
    assert sorted(map(len, grouped["groups"])) == [3] * 10
