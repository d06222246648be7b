"""A plant's folders come under the federation's classes: by aliases,
or as a person confirms; never by a guess.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from broker_config.protocol.errors import EdgeNodeError, UsageError
from tests.support.tiny_bundle import tiny_bundle
from trainer.data.folder_scan import FolderScan, scan_folder
from trainer.federation.client import checkpoint
from trainer.federation.client.class_aliases import assign_classes
from trainer.federation.server.spec import Request, draft

CLASSES = ("inclusion", "patches", "scratches")
CONFIRMED = {"Kratzer": "scratches", "Riss": "patches"}


def plant(folder: Path, *names: str) -> FolderScan:
    for number, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (8, 8), (10 * number, 0, 0)).save(folder / name / "1.png")
    return scan_folder(folder)


class Join:
    """What `join` knows when it asks for the classes, and what it then told and asked."""

    def __init__(self, folder: Path, aliases: dict[str, str], *names: str):
        self.spec, _ = draft(
            Request(model="small", weights="none"),
            federation="steel",
            classes=CLASSES,
            nodes=2,
            aliases=aliases,
        )
        self.found, self.state = plant(folder / "images", *names), folder / "state"
        self.told: list[str] = []
        self.asked: list[str] = []

    def answer(self, answer: bool) -> Callable[[str], bool]:
        def confirm(question: str) -> bool:
            self.asked.append(question)
            return answer

        return confirm

    def assign(
        self, *, confirm: Callable[[str], bool] | None = None, like: Path | None = None, **own: str
    ) -> dict[str, str]:
        self.told, self.asked = [], []
        aliases = assign_classes(
            [self.found], self.spec, own, self.state, like, confirm, self.told.append
        )
        return {name: aliases.get(name, name) for name in sorted(self.found.names)}


def test_an_alias_of_the_federation_holds_and_is_told(tmp_path: Path) -> None:
    join = Join(tmp_path, {"Kratzer": "scratches", "rayures": "scratches"}, "Kratzer", "patches")
    assert join.assign() == {"Kratzer": "scratches", "patches": "patches"}
    assert join.told == ["Kratzer is taught as scratches (an alias of the federation)"]


def test_the_plants_own_alias_comes_before_the_federations_also_for_the_name_of_a_class(
    tmp_path: Path,
) -> None:
    join = Join(tmp_path, {"Kratzer": "scratches"}, "Kratzer", "scratches")
    assert join.assign(Kratzer="patches", scratches="inclusion") == {
        "Kratzer": "patches",
        "scratches": "inclusion",
    }
    assert join.told[0] == "Kratzer is taught as patches (--alias)"


def test_what_a_person_confirms_holds_and_is_not_asked_again(tmp_path: Path) -> None:
    join = Join(tmp_path, {}, "Kratzer", "patches")
    assert join.assign(confirm=join.answer(True)) == {"Kratzer": "scratches", "patches": "patches"}
    assert join.asked == ["Shall the images in Kratzer be taught as scratches?"]
    assert join.told == [
        "'Kratzer' is none of the federation's classes; perhaps scratches (German for it)"
    ]
    assert join.assign(confirm=join.answer(False)) == {"Kratzer": "scratches", "patches": "patches"}
    assert join.asked == []
    assert join.told == [
        f"Kratzer is taught as scratches (confirmed: {join.state / 'aliases.json'})"
    ]
    assert join.assign(Kratzer="patches")["Kratzer"] == "patches", "--alias overrules it"


def test_what_was_confirmed_for_a_class_that_this_federation_has_not_is_asked_anew(
    tmp_path: Path,
) -> None:
    join = Join(tmp_path, {}, "Kratzer")
    join.state.mkdir()
    (join.state / "aliases.json").write_text('{"Kratzer": "scratch"}')
    assert join.assign(confirm=join.answer(True)) == {"Kratzer": "scratches"}
    assert len(join.asked) == 1


def test_no_damage_of_what_was_confirmed_teaches_a_folder_as_another_class(
    tmp_path: Path,
) -> None:
    for name, class_name in CONFIRMED.items():
        checkpoint.confirm_alias(tmp_path, name, class_name)
    path = tmp_path / "aliases.json"
    whole = path.read_bytes()
    assert checkpoint.load_aliases(tmp_path) == CONFIRMED
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(EdgeNodeError, match="aliases"):
            checkpoint.load_aliases(tmp_path)


def test_what_an_earlier_version_has_confirmed_holds_and_gets_a_checksum_with_the_next(
    tmp_path: Path,
) -> None:
    (tmp_path / "aliases.json").write_text('{"Kratzer": "scratches"}')
    assert checkpoint.load_aliases(tmp_path) == {"Kratzer": "scratches"}
    checkpoint.confirm_alias(tmp_path, "Riss", "patches")
    assert checkpoint.load_aliases(tmp_path) == CONFIRMED
    assert b"sha256" in (tmp_path / "aliases.json").read_bytes()


def test_a_no_ends_it_and_is_not_remembered(tmp_path: Path) -> None:
    join = Join(tmp_path, {}, "Kratzer")
    for _ in range(2):
        with pytest.raises(UsageError, match="--alias Kratzer=scratches"):
            join.assign(confirm=join.answer(False))
        assert len(join.asked) == 1
    assert not join.state.exists()


def test_where_nobody_can_be_asked_no_guess_is_taken(tmp_path: Path) -> None:
    join = Join(tmp_path, {}, "Scratch")
    with pytest.raises(UsageError, match="perhaps scratches"):
        join.assign()
    assert not join.state.exists()


def test_nothing_is_asked_about_a_folder_for_which_there_is_no_proposal(tmp_path: Path) -> None:
    join = Join(tmp_path, {}, "xyz")
    with pytest.raises(UsageError, match="--alias xyz=CLASS"):
        join.assign(confirm=join.answer(True))
    assert join.asked == []


def test_with_a_bundle_the_images_speak_too(tmp_path: Path) -> None:
    join = Join(tmp_path, {}, "patches", "xyz", "Kratzer", "inclusion")
    colours = {
        "Kratzer": (200, 0, 0),
        "xyz": (210, 0, 0),
        "patches": (0, 200, 0),
        "inclusion": (0, 0, 200),
    }
    for folder, colour in colours.items():  # the bundle's classes are red, green and blue
        for number in range(10):
            Image.new("RGB", (8, 8), (colour[0], colour[1], colour[2] + number)).save(
                tmp_path / "images" / folder / f"{number + 1}.png"
            )
    join.found = scan_folder(tmp_path / "images")
    bundle = tiny_bundle(tmp_path / "bundle", classes=("scratches", "patches", "inclusion")).folder
    assert join.assign(confirm=join.answer(True), like=bundle)["xyz"] == "scratches"
    assert join.told == [
        f"'Kratzer' is none of the federation's classes; perhaps scratches "
        f"(German for it; 10 of 10 of its images look like it to {bundle})",
        f"'xyz' is none of the federation's classes; perhaps scratches "
        f"(10 of 10 of its images look like it to {bundle})",
    ]
