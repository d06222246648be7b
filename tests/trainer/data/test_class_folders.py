"""A plant's folder becomes images in an order that depends on their content alone,
or an error that says what to do.
"""

import hashlib
import json
import os
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from broker_config.protocol.errors import UsageError
from edge.inference.image_decoding import ANNOTATED
from tests.support import plants
from tests.support.plants import CLASSES
from trainer.data import class_folders
from trainer.data.class_folders import LabelledImages
from trainer.data.folder_scan import scan_folder


def draw(folder: Path, per_class: int = 4, seed: int = 0) -> Path:
    return plants.draw(folder, per_class, seed, size=8)


def copy(source: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())
    return target


def labelled(*counts: int) -> LabelledImages:
    """As many images of each class as `counts` says."""
    labels = np.repeat(np.arange(len(counts)), counts)
    names = tuple(f"{number:064x}" for number in range(len(labels)))
    return LabelledImages(
        np.zeros((len(labels), 2, 2, 3), np.uint8), labels, names, tuple(map(Path, names))
    )


def refused(caught: pytest.ExceptionInfo[UsageError], *named: object) -> None:
    """The error names all of these and says what to do."""
    assert all(str(what) in caught.value.what + caught.value.remedy for what in named), str(
        caught.value
    )
    assert caught.value.remedy


# What is found


def test_every_image_is_found_in_the_class_of_its_folder(tmp_path: Path) -> None:
    catalogue = class_folders.scan(draw(tmp_path / "plant"))
    assert catalogue.classes == sorted(CLASSES)
    assert all(entry.path.parent.name == entry.class_name for entry in catalogue.entries)
    assert len(catalogue.entries) == 4 * len(CLASSES)
    assert catalogue.findings == ()


def test_images_are_ordered_by_content_whatever_their_names_suffixes_and_folders_are_called(
    tmp_path: Path,
) -> None:
    plant = draw(tmp_path / "plant")
    for number, entry in enumerate(class_folders.scan(plant).entries):
        renamed = f"{(7 * number) % 12:02}.{('png', 'jpg', 'BMP')[number % 3]}"
        copy(entry.path, tmp_path / "renamed" / f"{9 - CLASSES.index(entry.class_name)}" / renamed)
    one, other = class_folders.scan(plant), class_folders.scan(tmp_path / "renamed")
    digests = [entry.digest for entry in one.entries]
    assert digests == sorted(digests) == [entry.digest for entry in other.entries]
    first = class_folders.load(one, CLASSES, 8)
    second = class_folders.load(other, [f"{9 - number}" for number in range(len(CLASSES))], 8)
    assert first.digests == second.digests
    assert np.array_equal(first.images, second.images)
    assert np.array_equal(first.labels, second.labels)


def test_the_same_image_twice_in_a_class_counts_once_with_a_warning_that_names_both(
    tmp_path: Path,
) -> None:
    plant = draw(tmp_path / "plant")
    original = plant / "patches" / "0-1.png"
    twin = copy(original, plant / "patches" / "again.png")
    catalogue = class_folders.scan(plant)
    assert len(catalogue.entries) == 12
    (finding,) = catalogue.findings
    assert finding.severity == "warning"
    assert set(finding.files) == {str(original), str(twin)}
    assert f"{original} = {twin}" in finding.text


def test_the_same_image_in_two_classes_is_refused_and_both_files_are_named(tmp_path: Path) -> None:
    plant = draw(tmp_path / "plant")
    original = plant / "patches" / "0-1.png"
    twin = copy(original, plant / "scratches" / "again.png")
    with pytest.raises(UsageError) as caught:
        class_folders.scan(plant)
    refused(caught, original, twin, "remove")


def test_other_files_and_images_outside_class_folders_are_ignored_with_a_warning(
    tmp_path: Path,
) -> None:
    plant = draw(tmp_path / "plant")
    (plant / "patches" / "notes.txt").write_text("not an image")
    copy(plant / "patches" / "0-1.png", plant / "loose.png")
    copy(plant / "patches" / "0-1.png", plant / "patches" / "monday" / "deep.png")
    catalogue = class_folders.scan(plant)
    assert len(catalogue.entries) == 12
    assert [(finding.severity, finding.files) for finding in catalogue.findings] == [
        ("warning", (str(plant / "patches" / "monday" / "deep.png"),)),
        ("warning", (str(plant / "loose.png"),)),
        ("hint", (str(plant / "patches" / "notes.txt"),)),
    ]


def test_hidden_files_and_folders_are_no_images_and_no_class(tmp_path: Path) -> None:
    plant = draw(tmp_path / "plant")
    before = class_folders.scan(plant)
    copy(plant / "patches" / "0-1.png", plant / ".thumbnails" / "0-1.png")
    (plant / "patches" / "._0-1.png").write_bytes(b"left by another system")
    catalogue = class_folders.scan(plant)
    assert catalogue.entries == before.entries
    assert [finding.severity for finding in catalogue.findings] == ["hint"]


def test_annotated_pictures_are_no_images_by_their_content_or_else_by_their_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plant = draw(tmp_path / "plant")
    before = class_folders.scan(plant)
    drawn = Image.new("RGB", (400, 300))
    drawn.info["comment"] = ANNOTATED.encode()
    drawn.save(plant / "patches" / "by-content.jpg", quality=90)
    copy(plant / "scratches" / "0-1.png", plant / "patches" / "by-name.annotated.png")
    assert class_folders.scan(plant) == before
    assert caplog.messages == [
        f"2 annotated picture(s) are left out, the first is {plant / 'patches' / 'by-content.jpg'}"
    ]


def test_folders_of_one_class_are_merged_and_the_same_image_in_both_counts_once_with_a_warning(
    tmp_path: Path,
) -> None:
    plant = plants.draw(tmp_path / "plant", 4, 0, ("patches", "Kratzer", "scratches"), size=8)
    original = plant / "Kratzer" / "0-1.png"
    twin = copy(original, plant / "scratches" / "again.png")
    found = scan_folder(plant)
    assert found.names == {"patches", "Kratzer", "scratches"}
    merged = class_folders.make_catalogue(found.with_aliases({"Kratzer": "scratches"}))
    assert Counter(entry.class_name for entry in merged.entries) == {"patches": 4, "scratches": 8}
    (finding,) = merged.findings
    assert (finding.severity, set(finding.files)) == ("warning", {str(original), str(twin)})
    images = class_folders.load(merged, CLASSES, 8)
    assert {"Kratzer/0-0.png", "scratches/0-0.png"} < set(images.names), (
        "messages name the files where they lie"
    )


# What is refused


@pytest.mark.parametrize(
    "layout", ["missing", "file", "empty", "loose", "deep", "deep with a contact sheet"]
)
def test_a_folder_without_class_folders_is_refused_by_name(tmp_path: Path, layout: str) -> None:
    folder = tmp_path / layout
    if layout == "file":
        folder.write_text("not a folder")
    elif layout != "missing":
        folder.mkdir()
    if layout in ("loose", "deep with a contact sheet"):
        Image.new("RGB", (8, 8)).save(folder / "image.png")
    if "deep" in layout:
        draw(folder / "train")
    with pytest.raises(UsageError) as caught:
        class_folders.scan(folder)
    expected = {
        "missing": "does not exist",
        "file": "is not a folder",
        "empty": "no class folders",
        "loose": "its own",
    }
    refused(caught, folder, "folder", expected.get(layout, str(folder / "train")))


def test_an_image_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    plant = draw(tmp_path / "plant")
    gone = plant / "patches" / "gone.png"
    gone.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError) as caught:
        class_folders.scan(plant)
    refused(caught, gone, "No such file", "remove")


def test_a_folder_that_is_no_class_of_the_federation_is_named_with_the_nearest_class(
    tmp_path: Path,
) -> None:
    plant = draw(tmp_path / "plant")
    (plant / "scratches").rename(plant / "scrathces")
    with pytest.raises(UsageError) as caught:
        class_folders.load(class_folders.scan(plant), CLASSES, 8)
    refused(
        caught,
        "'scrathces' is none",
        "perhaps scratches (spelled alike)",
        "--alias scrathces=scratches",
        *CLASSES,
    )


def test_all_broken_images_are_counted_and_the_first_ten_named(tmp_path: Path) -> None:
    plant = draw(tmp_path / "plant")
    for number in range(12):
        (plant / "patches" / f"broken-{number}.png").write_bytes(b"not an image %d" % number)
    catalogue = class_folders.scan(plant)
    with pytest.raises(UsageError) as caught:
        class_folders.load(catalogue, CLASSES, 8)
    broken = [entry.path for entry in catalogue.entries if "broken" in entry.path.name]
    refused(caught, "12 image(s) cannot be read", *broken[:10], "and 2 more", "repair or remove")
    assert str(broken[10]) not in caught.value.what


# What is loaded


def test_images_have_the_asked_size_and_labels_are_positions_in_the_federations_classes(
    tmp_path: Path,
) -> None:
    catalogue = class_folders.scan(draw(tmp_path / "plant"))
    classes = ("another", *reversed(CLASSES))
    images = class_folders.load(catalogue, classes, 5)
    assert images.images.shape == (12, 5, 5, 3)
    assert images.images.dtype == np.uint8
    assert images.labels.dtype == np.int64
    assert [classes[label] for label in images.labels] == [
        entry.class_name for entry in catalogue.entries
    ]
    assert images.names == tuple(
        f"{entry.class_name}/{entry.path.name}" for entry in catalogue.entries
    )


def test_taking_positions_keeps_images_labels_digests_and_names_together(tmp_path: Path) -> None:
    images = class_folders.load(class_folders.scan(draw(tmp_path / "plant")), CLASSES, 8)
    taken = images.take(np.array([7, 2]))
    for position, original in enumerate((7, 2)):
        assert np.array_equal(taken.images[position], images.images[original])
        assert taken.labels[position] == images.labels[original]
        assert (taken.digests[position], taken.names[position]) == (
            images.digests[original],
            images.names[original],
        )


# What is held out


def split(
    images: LabelledImages, share: float = 0.2, seed: int = 1
) -> tuple[LabelledImages, LabelledImages]:
    found = class_folders.split_holdout(images, share, seed)
    assert found.test is not None
    return found.train, found.test


def test_a_share_of_every_class_is_held_out_and_nothing_is_lost_or_on_both_sides() -> None:
    images = labelled(10, 20, 5)
    train, test = split(images, seed=1)
    assert np.bincount(test.labels).tolist() == [2, 4, 1]
    assert sorted(train.digests + test.digests) == list(images.digests)
    assert list(train.digests) == sorted(train.digests)
    assert list(test.digests) == sorted(test.digests)


def test_at_least_one_image_of_each_class_is_held_out() -> None:
    _, test = split(labelled(50, 5), share=0.01)
    assert np.bincount(test.labels).tolist() == [1, 1]


def test_the_seed_decides_what_is_held_out() -> None:
    held_out = [split(labelled(20, 20), seed=seed)[1].digests for seed in (1, 1, 2)]
    assert held_out[0] == held_out[1] != held_out[2]


@pytest.mark.parametrize("counts", [(9, 10), (30, 4)], ids=["19 images", "4 of a class"])
def test_nothing_is_held_out_of_too_few_images(counts: tuple[int, ...]) -> None:
    assert class_folders.split_holdout(labelled(*counts), 0.2, seed=1).test is None


def test_what_can_be_spared_grows_by_one_group_in_five_of_a_class() -> None:
    for count in range(2, 40):
        images = class_folders.split_holdout(labelled(count, 4), 0.2, 1, "what can be spared")
        held_out = [] if images.test is None else images.test.labels.tolist()
        assert held_out == [0] * (count // 5), count
        assert images.were_split == bool(held_out)


def test_images_that_were_split_are_whole_again() -> None:
    images = labelled(10, 20, 5)
    for wanted in ("nothing", "what can be spared", "every class"):
        again = class_folders.split_holdout(images, 0.2, 1, wanted).whole
        assert again.test is None
        assert again.train.digests == images.digests
        assert np.array_equal(again.train.labels, images.labels)


def test_every_image_is_in_one_fold_and_every_fold_has_its_share_of_each_class() -> None:
    images = labelled(10, 20, 5)
    folds = class_folders.split_folds(images, 5, seed=1)
    assert sorted(np.concatenate(folds)) == list(range(35))
    assert [np.bincount(images.labels[fold]).tolist() for fold in folds] == [[2, 4, 1]] * 5
    assert all(
        np.array_equal(one, other)
        for one, other in zip(folds, class_folders.split_folds(images, 5, seed=1), strict=True)
    )
    assert not np.array_equal(folds[0], class_folders.split_folds(images, 5, seed=2)[0])


# Groups of images that belong on one side

# label, group
grouped = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 24)), min_size=1, max_size=80)


def with_groups(pairs: list[tuple[int, int]]) -> LabelledImages:
    labels, groups = np.array(pairs).T
    names = tuple(f"{number:064x}" for number in range(len(pairs)))
    images = np.zeros((len(pairs), 2, 2, 3), np.uint8)
    return LabelledImages(images, labels, names, tuple(map(Path, names)), groups=groups)


def groups_of_classes(images: LabelledImages) -> dict[int, set[int]]:
    assert images.groups is not None
    found = defaultdict(set)
    for label, group in zip(images.labels.tolist(), images.groups.tolist(), strict=True):
        found[label].add(group)
    return found


@given(grouped, st.integers(0, 3))
def test_a_group_is_held_out_whole_or_not_at_all_and_every_class_is_on_both_sides(
    pairs: list[tuple[int, int]], seed: int
) -> None:
    images = with_groups(pairs)
    found = class_folders.split_holdout(images, 0.2, seed)
    classes = groups_of_classes(images)
    assert (
        found.test is not None
        or min(map(len, classes.values())) < 5
        or sum(map(len, classes.values())) < 20
        or (
            # a group of several classes
            len(set().union(*classes.values())) < sum(map(len, classes.values()))
        )
    )
    if found.test is not None:
        train, test = map(groups_of_classes, (found.train, found.test))
        assert not set().union(*train.values()) & set().union(*test.values())
        assert train.keys() == test.keys() == classes.keys()
        assert sorted(found.train.digests + found.test.digests) == sorted(images.digests)
        assert split(images, seed=seed)[1].digests == found.test.digests


def test_about_a_fifth_is_held_out_of_groups_of_unequal_sizes() -> None:
    pairs = [
        (label, 30 * label + group)
        for label in (0, 1)
        for group in range(20)
        for _ in range(1 + group % 4)
    ]
    _, test = split(with_groups(pairs), seed=0)
    assert np.bincount(test.labels).tolist() == [10, 10]


@pytest.mark.parametrize(("pictures", "is_enough"), [(10, False), (5, True)])
def test_many_pictures_of_few_spots_are_too_few_to_hold_any_out(
    pictures: int, is_enough: bool
) -> None:
    images = with_groups([(n // 90, n // pictures) for n in range(180)])
    assert (class_folders.split_holdout(images, 0.2, seed=0).test is not None) == is_enough


@given(grouped, st.integers(0, 3))
def test_what_is_spared_is_of_whole_groups_and_every_class_keeps_some(
    pairs: list[tuple[int, int]], seed: int
) -> None:
    images = with_groups(pairs)
    found = class_folders.split_holdout(images, 0.2, seed, "what can be spared")
    if found.test is not None:
        train, test = map(groups_of_classes, (found.train, found.test))
        assert not set().union(*train.values()) & set().union(*test.values())
        assert train.keys() == groups_of_classes(images).keys()


@given(grouped, st.integers(1, 6))
def test_every_group_is_in_one_fold_and_no_fold_is_empty(
    pairs: list[tuple[int, int]], count: int
) -> None:
    images = with_groups(pairs)
    assert images.groups is not None
    folds = class_folders.split_folds(images, count, seed=0)
    assert sorted(np.concatenate(folds)) == list(range(len(pairs)))
    assert all(len(fold) for fold in folds)
    if len(groups := set(images.groups.tolist())) > 1:
        assert sum(len(set(images.groups[fold].tolist())) for fold in folds) == len(groups)
    else:
        assert len(folds) == min(count, len(pairs))  # nothing else could be judged by other images


def test_images_without_look_alikes_are_split_as_ever() -> None:
    """What was held out before images had groups still is."""
    random = np.random.default_rng(3)
    labels = random.permutation(np.repeat(np.arange(4), (10, 20, 7, 33)))
    images = labelled(len(labels))._replace(labels=labels)
    splits = []
    for seed in range(5):
        alone, groups = images, images._replace(groups=random.permutation(len(labels)))
        for each in (alone, groups):
            sides = split(each, seed=seed)
            splits.append([[int(digest, 16) for digest in side.digests] for side in sides])
            splits.append([fold.tolist() for fold in class_folders.split_folds(each, 5, seed)])
        assert splits[-4:-2] == splits[-2:]
    digest = hashlib.sha256(json.dumps(splits[0::4] + splits[1::4]).encode()).hexdigest()
    assert digest.startswith("e5c38a81")


def test_a_pipe_among_the_images_keeps_nobody_waiting_and_is_named(tmp_path):
    folder = draw(tmp_path)
    pipe = next(folder.glob("*/*")).with_name("pipe.png")
    os.mkfifo(pipe)
    assert scan_folder(folder).unreadable == {
        pipe: f"{pipe} cannot be read: it is a pipe or a device"
    }
