"""Images belong together by pixels, by likeness and by what the user says;
a rule that says nonsense is refused.
"""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from broker_config.protocol.errors import UsageError
from tests.support import plants
from trainer.data.folder_scan import Entry, scan_folder
from trainer.data.image_groups import group_entries, propose_groups, read_keys, unite

POSITIONS = st.integers(0, 9)


@given(st.lists(st.tuples(POSITIONS, POSITIONS)))
def test_linked_positions_share_a_number_directly_or_through_others_and_no_others_do(
    links: list[tuple[int, int]],
) -> None:
    reached = np.eye(10, dtype=bool)
    for one, other in links:
        reached[one, other] = reached[other, one] = True
    for _ in range(4):
        reached = reached @ reached
    numbers = unite(10, links)
    assert np.array_equal(numbers[:, None] == numbers, reached)
    assert sorted(set(numbers.tolist())) == list(range(numbers.max() + 1))
    assert list(dict.fromkeys(numbers.tolist())) == sorted(set(numbers.tolist()))


def entries(*names: str) -> list[Entry]:
    return [
        Entry(Path("images", name), name.split("/")[0], f"{number:064x}")
        for number, name in enumerate(names)
    ]


SPOTS = entries(
    "dent/s1_a.png", "dent/s1_b.png", "dent/s2_a.png", "rust/s2_b.png", "rust/other.png"
)


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        ("^s[0-9]+", ["s1", "s1", "s2", "s2", None]),
        ("^(s[0-9]+)_(?:a|b)", ["s1", "s1", "s2", "s2", None]),
    ],
    ids=["the whole match", "its parentheses"],
)
def test_a_pattern_names_the_group_of_each_file_that_it_matches(
    pattern: str, keys: list[str | None]
) -> None:
    found = read_keys(pattern, SPOTS)
    assert [found.get(entry.path) for entry in SPOTS] == keys


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("(", "is no regular expression"),
        ("batch", "matches none of 5 file names, such as s1_a.png"),
        ("png", "puts all 5 images into one group, 'png'"),
    ],
)
def test_a_pattern_that_cannot_be_meant_is_refused_with_one_that_could(
    pattern: str, complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint) as caught:
        read_keys(pattern, SPOTS)
    assert "--group" in caught.value.what
    assert "--group '^(.*)_[0-9]+[.]'" in caught.value.remedy


def write(folder: Path, text: str) -> str:
    (folder / "groups.csv").write_text(text)
    return str(folder / "groups.csv")


def test_a_table_names_the_group_of_each_image_in_it(tmp_path: Path) -> None:
    table = write(
        tmp_path, "group,file,note\none,dent/s1_a.png,\none,rust\\s2_b.png,x\ntwo,dent/s2_a.png,\n"
    )
    assert {path.name: key for path, key in read_keys(table, SPOTS).items()} == {
        "s1_a.png": "one",
        "s2_b.png": "one",
        "s2_a.png": "two",
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("file,kind\n", "lacks the column group"),
        ("", "lacks the column file"),
        (
            "file,group\ndent/s1_a.png,one\ndent/gone.png,one\n",
            "line 3: there is no image 'dent/gone.png' in images",
        ),
        ("file,group\ndent/s1_a.png,\n", "line 2: it has no group"),
        (
            "file,group\ndent/s1_a.png,1\ndent/s1_a.png,2\n",
            "puts dent/s1_a.png into two groups, '1' and '2'",
        ),
    ],
)
def test_a_table_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    table = write(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_keys(table, SPOTS)
    assert complaint in caught.value.what
    assert table in caught.value.what
    assert caught.value.remedy


def test_a_table_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone[.]csv.*No such file"):
        read_keys(str(tmp_path / "gone.csv"), SPOTS)
    (tmp_path / "groups.csv").write_bytes(b"file,group\n\xff,1\n")
    with pytest.raises(UsageError, match=r"groups[.]csv.*utf-8"):
        read_keys(str(tmp_path / "groups.csv"), SPOTS)


def test_a_row_may_name_a_copy_that_the_scan_counts_only_once(tmp_path: Path) -> None:
    folder = plants.draw(tmp_path / "images", 1, seed=0)
    (folder / "patches" / "copy.png").write_bytes((folder / "patches" / "0-0.png").read_bytes())
    found = scan_folder(folder).entries
    assert read_keys(write(tmp_path, "file,group\npatches/copy.png,a\npatches/0-0.png,a\n"), found)


def test_pixels_likeness_and_keys_each_make_groups_and_unreadable_files_have_none(
    tmp_path: Path,
) -> None:
    folder = plants.draw(tmp_path / "images", 4, seed=0, size=64) / "patches"
    first = Image.open(folder / "0-0.png")
    first.save(folder / "same.bmp")
    first.rotate(90).point(lambda value: value * 0.7).save(folder / "like.png")
    (folder / "broken.png").write_bytes(b"no image")
    found = scan_folder(tmp_path / "images").entries
    groups = group_entries(found, {folder / "0-1.png": "k", folder / "0-2.png": "k"})
    number = {
        entry.path.name: groups.get(entry.digest)
        for entry in found
        if entry.class_name == "patches"
    }
    assert number["0-0.png"] == number["same.bmp"] == number["like.png"]
    assert number["0-1.png"] == number["0-2.png"]
    assert number["broken.png"] is None
    assert len(set(groups.values())) == len(groups) - 3


# Proposals


def files(folder: Path, *names: str) -> list[Entry]:
    """Files that were all written at once."""
    found = entries(*names)
    for entry in found:
        (folder / entry.path).parent.mkdir(parents=True, exist_ok=True)
        (folder / entry.path).touch()
        os.utime(folder / entry.path, (1000.0, 1000.0))
    return [entry._replace(path=folder / entry.path) for entry in found]


@pytest.mark.parametrize(
    "name",
    ["part-{part:02}_{view}.png", "2024-06-01_10{part:02}05_{view}.jpg", "{part:04}{view}.png"],
)
def test_names_that_begin_with_a_part_propose_a_pattern_that_groups_them(
    name: str, tmp_path: Path
) -> None:
    names = [
        f"{kind}/{name.format(part=part + shift, view=view)}"
        for kind, shift in (("dent", 0), ("rust", 50))
        for part in range(8)
        for view in "abc"
    ]
    found = files(tmp_path, *names)
    proposal = propose_groups(found)
    assert proposal is not None
    assert proposal.groups == 16
    keys = read_keys(proposal.pattern, found)
    assert keys == proposal.keys
    assert [keys[found[0].path], keys[found[1].path]] == [keys[found[2].path]] * 2


@pytest.mark.parametrize(
    "name", ["{kind}_{number}.png", "IMG_2024_{number:04}.png", "{number}.png"]
)
def test_names_of_single_images_propose_nothing(name: str, tmp_path: Path) -> None:
    names = [
        f"{kind}/{name.format(kind=kind, number=number)}"
        for kind in ("dent", "rust")
        for number in range(30)
    ]
    assert propose_groups(files(tmp_path, *names)) is None


def test_times_that_come_in_bursts_propose_a_table_that_groups_them(tmp_path: Path) -> None:
    found = files(tmp_path, *(f"{kind}/{n}.png" for kind in ("dent", "rust") for n in range(24)))
    for number, entry in enumerate(found):
        part, view = divmod(number, 3)
        os.utime(entry.path, (1000.0, 1000.0 + 90 * part + view))
    proposal = propose_groups(found)
    assert proposal is not None
    assert not proposal.pattern
    assert proposal.groups == 16
    proposal.write(tmp_path / "groups.csv")
    keys = read_keys(str(tmp_path / "groups.csv"), found)
    assert keys == proposal.keys
    assert keys[found[0].path] == keys[found[2].path] != keys[found[3].path]


def test_look_alikes_a_few_numbers_apart_propose_what_lies_between_them(tmp_path: Path) -> None:
    found = files(tmp_path, *(f"{kind}/{n}.png" for kind in ("dent", "rust") for n in range(40)))
    alike = [(found[n].path, found[n + 3].path) for n in (0, 10, 20, 40, 50)]
    proposal = propose_groups(found, alike)
    assert proposal is not None
    assert proposal.groups == 5
    assert len({proposal.keys[found[number].path] for number in (10, 11, 12, 13)}) == 1
    assert found[14].path not in proposal.keys
    far = [(found[n].path, found[n + 19].path) for n in range(5)]
    assert propose_groups(found, far) is None
