"""Images that wait for a label: in which order, where they go,
and what a kill or a full disk leaves.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.storage import checked_log, disk
from edge.inference.image_decoding import ImageError
from edge.inference.outcomes import Verdict
from edge.inference.pipeline import Inspection
from edge.inference.tiling import View
from edge.labelling import label_queue
from edge.labelling.label_folder import LabelFolder
from edge.labelling.label_queue import UNDOABLE, DamagedHistoryError, LabelQueue
from edge.uncertainty.image_retention import ImageRetention, Settings
from edge.uncertainty.uncertainty_check import Settings as DoubtSettings
from edge.uncertainty.uncertainty_check import UncertaintyCheck
from tests.support.classified_images import Told, a_line, judged_bundle, picture, shown
from trainer.data.folder_scan import scan_folder

HISTORY = "labels-line-1.jsonl"
RANDOM = np.random.default_rng(7)
DOUBTFUL = [picture(RANDOM, number % 3, strong=20, noise=0) for number in range(3)]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return judged_bundle(tmp_path_factory.mktemp("bundle") / "a")


class Plant:
    """A line that keeps all images, and the folder of the plant's labelled ones."""

    def __init__(self, bundle: Path, folder: Path, **keep: Any) -> None:
        self.kept, self.images = folder / "kept", folder / "images"
        self.retention = ImageRetention(Settings(**{"path": str(self.kept), "what": "all"} | keep))
        self.line = a_line(
            bundle, Told(), UncertaintyCheck(DoubtSettings(novelty=0)), self.retention
        )
        self.queue = self.open()

    def open(self, line: str = "line-1") -> LabelQueue:
        return LabelQueue(label_queue.Settings(path=str(self.images)), line, lambda: self.retention)

    def restart(self) -> None:
        self.queue = self.open()

    def inspect(self, *images: Any) -> list[Verdict]:
        found = []
        for image in images:  # each is on the disk before the next: none is lost to a slow one
            found += shown(self.line, [image])
            self.retention._queue.join()
        return found

    @property
    def waiting(self) -> list[str]:
        return [each.kept for each in self.queue.waiting()]

    @property
    def labelled(self) -> dict[str, str]:
        """The class of each image that `join` would train with, by its file's name."""
        found = scan_folder(self.images)
        return {entry.path.name: entry.class_name for group in found.groups for entry in group}

    def history(self) -> list[dict[str, Any]]:
        if not (self.images / HISTORY).exists():
            return []
        return [
            json.loads(line)["value"] for line in (self.images / HISTORY).read_bytes().splitlines()
        ]

    def close(self) -> None:
        self.retention.close()
        self.line.close()


@contextlib.contextmanager
def a_plant(bundle: Path, folder: Path, **keep: Any) -> Iterator[Plant]:
    with contextlib.closing(Plant(bundle, folder, **keep)) as found:
        yield found


@pytest.fixture
def plant(judged: Path, tmp_path: Path) -> Iterator[Plant]:
    with a_plant(judged, tmp_path) as found:
        yield found


def test_a_labelled_image_is_in_its_class_folder_byte_for_byte_and_waits_no_more(
    plant: Plant,
) -> None:
    [verdict] = plant.inspect(DOUBTFUL[0])
    before = (plant.kept / str(verdict.kept)).read_bytes()
    plant.queue.label([str(verdict.kept)], "green", "anna")
    assert plant.labelled == {verdict.kept: "green"}
    assert (plant.images / "green" / str(verdict.kept)).read_bytes() == before
    found = scan_folder(plant.images)
    assert (found.loose, found.nested, found.hidden, found.others) == ([], [], [], []), (
        "nothing to complain of in `join`"
    )
    assert plant.waiting == []


def test_the_history_says_who_said_what_of_which_verdict(plant: Plant) -> None:
    first, second = plant.inspect(*DOUBTFUL[:2])
    plant.queue.label([str(first.kept), str(second.kept)], "green", "anna")
    [entry] = plant.history()
    assert (entry["action"], entry["person"], entry["label"]) == ("label", "anna", "green")
    assert [image["verdict"] for image in entry["images"]] == [first.label, second.label]
    assert entry["images"][0] == {
        "kept": first.kept,
        "file": first.kept,
        "image": first.image,
        "verdict": first.label,
        "confidence": first.confidence,
        "bundle": first.bundle,
        "model": first.model,
        "doubts": list(first.doubts),
        "sampled": False,
    }


def test_of_a_frame_in_tiles_the_tile_is_labelled_that_decided(plant: Plant) -> None:
    plant.line.view = View(tile=16)
    frame = np.concatenate([picture(RANDOM, 1), picture(RANDOM, 0)], axis=1)
    [verdict] = plant.inspect(frame)
    plant.queue.label([str(verdict.kept)], "red", "anna")
    [file] = plant.images.glob("red/*")
    seen = json.loads((plant.kept / str(verdict.kept)).with_suffix(".json").read_bytes())["seen"]
    assert np.asarray(Image.open(file)).shape == (16, 16, 3)
    assert (np.asarray(Image.open(file)) == frame[:, seen[0] : seen[0] + 16]).all()


def test_undo_takes_the_newest_back_and_so_on_through_a_restart(plant: Plant) -> None:
    names = [str(verdict.kept) for verdict in plant.inspect(*DOUBTFUL)]
    plant.queue.label(names[:1], "red", "anna")
    plant.queue.label(names[1:], "green", "anna")
    assert [image.kept for image in plant.queue.undo("anna").images] == names[1:]
    assert sorted(plant.waiting) == names[1:]
    plant.restart()
    assert plant.labelled == {names[0]: "red"}
    plant.queue.undo("anna")
    assert (plant.labelled, sorted(plant.waiting)) == ({}, names)
    assert [entry["action"] for entry in plant.history()] == ["label", "label", "undo", "undo"]
    with pytest.raises(UsageError, match="undone"):
        plant.queue.undo("anna")


def test_a_person_undoes_their_own_labels_alone_though_others_have_given_many_since(
    plant: Plant,
) -> None:
    mine, *others = [
        str(verdict.kept) for verdict in plant.inspect(*[DOUBTFUL[0]] * (UNDOABLE + 2))
    ]
    plant.queue.label([mine], "red", "anna")
    for name in others:
        plant.queue.label([name], "green", "ben")
    with pytest.raises(UsageError, match="cara"):
        plant.queue.undo("cara")
    assert [image.kept for image in plant.queue.undo("anna").images] == [mine]
    assert (plant.waiting, mine in plant.labelled) == ([mine], False)
    plant.restart()
    assert plant.queue.undo("ben").person == "ben"
    with pytest.raises(UsageError, match="anna"):
        plant.queue.undo("anna")


def test_a_label_that_is_given_again_since_its_answer_was_lost_is_saved_and_not_too_late(
    plant: Plant,
) -> None:
    first, second, third = [str(verdict.kept) for verdict in plant.inspect(*DOUBTFUL)]
    plant.queue.label([first, second], "red", "anna")
    assert plant.queue.label([first, second], "red", "anna") == (first, second)
    assert set(plant.queue.label([second, third], "red", "anna")) == {second, third}
    assert plant.queue.label([third], "green", "anna") == ()
    assert plant.queue.label([third], "red", "ben") == ()
    assert [len(entry["images"]) for entry in plant.history()] == [2, 1]


def test_a_label_that_can_be_undone_no_more_makes_room_for_other_images(plant: Plant) -> None:
    names = [str(verdict.kept) for verdict in plant.inspect(*[DOUBTFUL[0]] * (UNDOABLE + 2))]
    for name in names:
        plant.queue.label([name], "green", "anna")
    assert sorted(path.name for path in plant.kept.glob("*.png")) == names[2:]


def test_images_that_shall_teach_nothing_are_laid_aside_until_that_is_undone(plant: Plant) -> None:
    [verdict] = plant.inspect(DOUBTFUL[0])
    plant.queue.label([str(verdict.kept)], None, "anna")
    assert (plant.waiting, plant.labelled) == ([], {})
    plant.queue.undo("anna")
    assert plant.waiting == [verdict.kept]


def test_an_image_can_be_of_a_class_that_the_model_lacks_once_that_has_a_folder(
    plant: Plant,
) -> None:
    assert plant.queue.folders() == []
    for name in ("rust", "red", ".cache", os.fsdecode(b"Kratzer_\xe4"), "a\nb"):
        (plant.images / name).mkdir()
    assert plant.queue.folders() == ["red", "rust"]


def test_an_image_is_labelled_once_and_what_is_gone_is_left_out(plant: Plant) -> None:
    first, second = (str(verdict.kept) for verdict in plant.inspect(*DOUBTFUL[:2]))
    plant.queue.label([first, first], "red", "anna")
    (plant.kept / second).unlink()
    assert plant.queue.label([first, second, "../../etc/passwd", "no"], "green", "ben") == ()
    assert plant.labelled == {first: "red"}
    assert len(plant.history()) == 1


def test_the_most_instructive_come_first_and_what_was_overruled_before_them(plant: Plant) -> None:
    inspected: list[Inspection] = []
    plant.line.monitors = (
        lambda found: inspected.append(found) or found.verdict,
        *plant.line.monitors,
    )
    sure, unsure = plant.inspect(picture(RANDOM, 0, noise=0), DOUBTFUL[1])
    assert plant.waiting == [unsure.kept, sure.kept]
    kept = inspected[0]._replace(verdict=sure)
    assert plant.queue.overrule(kept) == sure.kept
    assert plant.waiting == [sure.kept, unsure.kept]
    assert "overruled" in plant.queue.waiting()[0].doubts


def test_an_overruled_image_that_was_not_kept_is_kept_now(judged: Path, tmp_path: Path) -> None:
    with a_plant(judged, tmp_path, what="doubtful") as plant:
        inspected: list[Inspection] = []
        plant.line.monitors = (
            *plant.line.monitors,
            lambda found: inspected.append(found) or found.verdict,
        )
        plant.inspect(image := picture(RANDOM, 0, noise=0))
        assert plant.waiting == []
        name = plant.queue.overrule(inspected[0])
        assert plant.waiting == [name]
        assert (np.asarray(Image.open(plant.kept / name)) == image).all()


def test_images_kept_at_random_come_first_as_they_came_and_tell_how_often_the_model_is_right(
    judged: Path, tmp_path: Path
) -> None:
    with a_plant(judged, tmp_path, what="doubtful", sample=1.0) as plant:
        verdicts = plant.inspect(*(picture(RANDOM, number % 3) for number in range(5)))
        names, model = [str(each.kept) for each in verdicts], verdicts[0].model
        assert plant.waiting == names
        assert all(each.sampled for each in plant.queue.waiting())
        assert plant.queue.sample(model) == ([], 5)
        plant.queue.label([names[0]], verdicts[0].label, "anna")
        plant.queue.label([names[1]], verdicts[0].label, "anna")  # it is another
        assert sorted(plant.queue.sample(model)[0]) == [False, True]
        plant.queue.label([names[3]], verdicts[3].label, "anna")
        assert plant.queue.sample(model) == ([False, True], 2), (
            "the one before it might have been the harder one"
        )
        plant.queue.label([names[2]], None, "anna")
        assert sorted(plant.queue.sample(model)[0]) == [False, False, True, True]
        plant.restart()
        assert sorted(plant.queue.sample(model)[0]) == [False, False, True, True]
        assert plant.queue.sample("another") == ([], 0)


def test_images_kept_for_another_reason_do_not_tell_how_often_the_model_is_right(
    plant: Plant,
) -> None:
    [verdict] = plant.inspect(DOUBTFUL[0])
    plant.queue.label([str(verdict.kept)], verdict.label, "anna")
    assert plant.queue.sample(verdict.model) == ([], 0)


def test_similar_images_are_of_one_group(plant: Plant) -> None:
    plant.inspect(*(picture(RANDOM, number % 2, noise=1) for number in range(6)))
    groups: dict[int, set[str]] = {}
    for each in plant.queue.waiting():
        groups.setdefault(each.group, set()).add(each.verdict)
    assert sorted(map(sorted, groups.values())) == [["green"], ["red"]]


def test_what_was_kept_by_an_earlier_version_or_torn_does_no_harm(plant: Plant) -> None:
    [verdict] = plant.inspect(DOUBTFUL[0])
    sidecar = (plant.kept / str(verdict.kept)).with_suffix(".json")
    told = json.loads(sidecar.read_bytes())
    del told["seen"], told["embedding"]
    sidecar.write_text(json.dumps(told))
    for number, content in enumerate(
        [b"{", b"", b"[]", json.dumps(told | {"probabilities": {}}).encode()]
    ):
        (plant.kept / f"20260102T03040567{number}-1a2b3c4d.json").write_bytes(content)
    assert plant.waiting == [verdict.kept]


def test_a_full_disk_changes_nothing(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [str(verdict.kept) for verdict in plant.inspect(*DOUBTFUL)]

    def full(_path: Path) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(disk, "sync", full)
        with pytest.raises(EdgeNodeError, match="No space left"):
            plant.queue.label(names, "red", "anna")
    assert (plant.labelled, sorted(plant.waiting), plant.history()) == ({}, names, [])
    plant.queue.label(names, "red", "anna")
    assert plant.labelled == dict.fromkeys(names, "red")


@pytest.mark.parametrize("other", ["north.line-1", "png.line-1", "line-1.line-1"])
def test_two_lines_with_one_images_folder_leave_each_other_s_images_alone(
    plant: Plant, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Line-1 labels between another line's preparing of a copy and its giving it a name."""
    first, second = (str(verdict.kept) for verdict in plant.inspect(*DOUBTFUL[:2]))
    queue = plant.open(other)
    settle = LabelFolder.settle

    def settle_late(self: LabelFolder, label: str) -> None:
        monkeypatch.setattr(LabelFolder, "settle", settle)
        plant.queue.label([second], "red", "anna")
        settle(self, label)

    monkeypatch.setattr(LabelFolder, "settle", settle_late)
    queue.label([first], "red", "ben")
    assert plant.labelled == {first: "red", second: "red"}


@pytest.mark.parametrize("name", ["../../outside", "/etc/x", "", ".", "..", ".hidden", "a\\b"])
def test_a_label_that_leads_out_of_the_folder_is_refused(plant: Plant, name: str) -> None:
    """A model's classes are the coordinator's words."""
    [verdict] = plant.inspect(DOUBTFUL[0])
    before = {*plant.images.parent.rglob("*")}
    with pytest.raises(UsageError, match="cannot be called"):
        LabelFolder(plant.images, "line-1").prepare(name, str(verdict.kept), b"")
    assert {*plant.images.parent.rglob("*")} == before


@pytest.mark.parametrize(
    "seen", [[0, 0, 10**6, 10**6], [10**6, 0, 8, 8], [-8, -8, 8, 8], [0, 0, 0, 0], [0, 0, 1, -1]]
)
def test_a_part_that_nobody_can_have_seen_has_no_picture_and_no_label(
    plant: Plant, seen: list[int]
) -> None:
    [verdict] = plant.inspect(DOUBTFUL[0])
    sidecar = (plant.kept / str(verdict.kept)).with_suffix(".json")
    sidecar.write_text(json.dumps(json.loads(sidecar.read_bytes()) | {"seen": seen}))
    plant.restart()
    assert plant.waiting == [verdict.kept]
    with pytest.raises(ImageError, match=str(verdict.kept)):
        plant.queue.picture(str(verdict.kept), 64)
    assert plant.queue.label([str(verdict.kept)], "red", "anna") == ()


@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_a_damaged_history_is_told_and_without_it_no_image_gets_into_a_second_class(
    plant: Plant, damage: str
) -> None:
    first, second, third = (str(verdict.kept) for verdict in plant.inspect(*DOUBTFUL))
    plant.queue.label([first], "red", "anna")
    plant.queue.label([second], "green", "anna")
    path = plant.images / HISTORY
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 3] ^= 4
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content.splitlines(keepends=True)[0])
    else:
        path.unlink()
    with pytest.raises(DamagedHistoryError, match=HISTORY) as told:
        plant.open()
    assert f"remove {path} and {path}.newest" in told.value.remedy
    path.unlink(missing_ok=True)
    path.with_name(f"{path.name}.newest").unlink()
    plant.restart()
    assert plant.waiting == [third]
    assert plant.queue.label([first], "green", "ben") == ()
    assert plant.labelled == {first: "red", second: "green"}


def test_a_pipe_among_the_kept_images_keeps_nobody_waiting(plant: Plant) -> None:
    [verdict] = plant.inspect(DOUBTFUL[0])
    sidecar = (plant.kept / str(verdict.kept)).with_suffix(".json")
    told = json.loads(sidecar.read_bytes())
    os.mkfifo(plant.kept / "20260102T030405670-1a2b3c4d.json")
    stem = "20260102T030405671-1a2b3c4d"
    os.mkfifo(plant.kept / f"{stem}.png")
    (plant.kept / f"{stem}.json").write_text(json.dumps(told | {"kept": f"{stem}.png"}))
    assert str(verdict.kept) in plant.waiting
    plant.queue.label([str(verdict.kept), f"{stem}.png"], "red", "anna")
    assert plant.labelled == {verdict.kept: "red"}


# Kills. A queue tidies nothing up on its way out: what an unexpected exception leaves is what a
# kill leaves.


class KilledError(BaseException):
    """The process is gone."""


@contextlib.contextmanager
def killed_after(steps: int) -> Iterator[None]:
    """Let so many calls that change the disk happen, of the next one at most half, and no more."""
    left = steps

    def last(
        function: Callable[..., Any], half: Callable[..., object] = lambda *_: None
    ) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                half(*arguments)
                raise KilledError
            return function(*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdir", "replace", "unlink"):
            patch.setattr(Path, name, last(getattr(Path, name)))
        write = Path.write_bytes
        patch.setattr(
            Path, "write_bytes", last(write, lambda path, data: write(path, data[: len(data) // 2]))
        )
        patch.setattr(os, "fsync", last(os.fsync))
        append = checked_log.write_line
        torn = last(append, lambda file, _, data: file.write(data[: len(data) // 2]))
        patch.setattr(checked_log, "write_line", torn)
        yield


def outcomes(
    plant: Plant, names: list[str], act: Callable[[], object], back: Callable[[], object]
) -> list[str]:
    """What a kill at each step of an act leaves, after the next start;
    in the end nobody kills it.
    """
    found = []
    for steps in itertools.count():
        try:
            with killed_after(steps):
                act()
        except KilledError:
            plant.restart()
            found.append(_state(plant, names))
            if found[-1] != found[0]:
                back()
        else:
            plant.restart()
            return [*found, _state(plant, names)]
    raise AssertionError


def test_a_kill_at_any_step_of_a_label_or_an_undo_neither_loses_nor_doubles_an_image(
    plant: Plant,
) -> None:
    names = [str(verdict.kept) for verdict in plant.inspect(*DOUBTFUL[:2])]

    def label() -> None:
        plant.queue.label(names, "red", "anna")

    def undo() -> None:
        plant.queue.undo("anna")

    labelled = outcomes(plant, names, label, undo)
    assert (labelled[0], labelled[-1], len(labelled) > 10) == ("waiting", "labelled", True)
    undone = outcomes(plant, names, undo, label)
    assert (undone[0], undone[-1], len(undone) > 3) == ("labelled", "waiting", True)


def _state(plant: Plant, names: list[str]) -> str:
    """Both images are labelled, or both wait; nothing else is in the class folder."""
    waiting, labelled = sorted(plant.waiting), plant.labelled
    assert (waiting, labelled) in ((names, {}), ([], dict.fromkeys(names, "red")))
    assert {path.name for path in plant.images.glob("*/*")} == {*labelled}
    return "labelled" if labelled else "waiting"


@pytest.mark.slow
def test_ten_thousand_images_are_listed_at_once(plant: Plant) -> None:
    """The first look reads what is kept; then a look takes the time of listing a folder."""
    [verdict] = plant.inspect(DOUBTFUL[0])
    image = plant.kept / str(verdict.kept)
    told = json.loads(image.with_suffix(".json").read_bytes())
    for number in range(9_999):
        stem = f"20260102T{number:09d}-1a2b3c4d"
        (plant.kept / f"{stem}.json").write_text(json.dumps(told | {"kept": f"{stem}.png"}))
        os.link(image, plant.kept / f"{stem}.png")
    assert len(plant.waiting) == 10_000
    looks = []
    for _ in range(5):
        start = os.times().user
        plant.queue.waiting()
        looks.append(os.times().user - start)
    assert min(looks) < 0.25
