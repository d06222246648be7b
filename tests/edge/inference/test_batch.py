"""Whole folders are classified at once; results resume where they stopped, and are of one model."""

import csv
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from broker_config.protocol.errors import EdgeNodeError, UsageError
from edge.inference import batch
from edge.inference.class_prior import Prior
from edge.inference.served_model import Model, load_model
from edge.inference.tiling import View
from edge_node.cli.inference_output import classify_and_print
from tests.support.tiny_bundle import BLUE, GREEN, RED, tiny_bundle


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(tiny_bundle(tmp_path_factory.mktemp("batch") / "bundle", extras=True).folder)


@pytest.fixture
def tree(tmp_path) -> Path:
    """Five images in two levels of folders, one of them damaged, among other things."""
    for name, data in {
        "10.png": RED,
        "2.png": GREEN,
        "press/a.png": BLUE,
        "press/bad.png": b"no image",
        "press/deep/b.PNG": RED,
        "press/.hidden/c.png": RED,
        ".d.png": RED,
        "notes.txt": b"",
    }.items():
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "images"


NAMES = ["2.png", "10.png", "press/a.png", "press/bad.png", "press/deep/b.PNG"]


def run(
    model: Model,
    tree: Path,
    out: Path | None,
    pictures: Path | None = None,
    *,
    as_json: bool = False,
) -> bool:
    results = batch.ResultFile(out, model) if out else None
    return classify_and_print(
        model, batch.find_images([tree]), None, None, results, pictures, heat=True, as_json=as_json
    )


def rows(out: Path) -> list[dict[str, Any]]:
    if out.suffix == ".csv":
        return list(csv.DictReader(out.read_text().splitlines()))
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_folder_means_all_images_in_it_and_below_in_the_order_in_which_people_count(tree):
    assert [str(each.path.relative_to(tree)) for each in batch.find_images([tree])] == NAMES
    assert [each.path for each in batch.find_images([tree / "10.png", tree / "none.png"])] == [
        tree / "10.png",
        tree / "none.png",
    ]
    (tree.parent / "empty").mkdir()
    with pytest.raises(UsageError, match="no images"):
        batch.find_images([tree.parent / "empty"])


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_results_hold_every_image_and_say_which_could_not_be_read(
    model, tree, tmp_path, suffix, capsys
):
    out = tmp_path / f"results{suffix}"
    assert not run(model, tree, out)
    assert [row["image"] for row in rows(out)] == [str(tree / name) for name in NAMES]
    assert [row.get("label") or "" for row in rows(out)] == ["green", "red", "blue", "", "red"]
    assert "not a whole image" in rows(out)[3]["error"]
    said = capsys.readouterr()
    assert said.out == "4 classified: 2 red, 1 green, 1 blue; 1 could not be read\n"
    assert "bad.png is not" in said.err


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_an_interrupted_batch_goes_on_where_it_was_and_tries_unread_images_again(
    model, tree, tmp_path, suffix, capsys
):
    out = tmp_path / f"results{suffix}"
    run(model, tree, out)
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    first = 1 if suffix == ".jsonl" else 2
    # killed while it wrote the third
    out.write_bytes(b"".join(lines[: first + 1]) + lines[first + 1][:20])
    capsys.readouterr()
    run(model, tree, out)
    assert (
        capsys.readouterr().out
        == "2 were classified before; 2 classified: 1 blue, 1 red; 1 could not be read\n"
    )
    assert [row["image"] for row in rows(out)] == [str(tree / name) for name in NAMES]
    (tree / "press/bad.png").write_bytes(GREEN)
    assert run(model, tree, out)
    assert [row["image"] for row in rows(out)][5:] == [str(tree / "press/bad.png")]
    assert run(model, tree, out)
    assert len(rows(out)) == 6


@pytest.fixture
def labelled(tmp_path) -> Path:
    """Ten images in folders of three classes: one green is among the red, one cannot be read."""
    for name, data in {
        **{f"red/{number}.png": RED for number in range(3)},
        "red/3.png": GREEN,
        **{f"deep/green/{number}.png": GREEN for number in range(4)},
        "blue/0.png": BLUE,
        "blue/1.png": b"no image",
    }.items():
        path = tmp_path / "labelled" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "labelled"


def test_verdicts_on_class_folders_are_compared_with_their_names(model, labelled, capsys):
    run(model, labelled, None)
    *_, head, red, green, blue, accuracy, doubt, errors = capsys.readouterr().out.splitlines()
    assert head.split() == ["image", "of,", "called", "red", "green", "blue", "right"]
    assert [line.split() for line in (red, green, blue)] == [
        ["red", "3", "1", "75", "%"],
        ["green", "4", "100", "%"],
        ["blue", "1", "100", "%"],
    ]
    assert accuracy == "accuracy 88.9% (57 to 98; 8 of 9), with 95 % intervals"
    assert doubt == "in doubt 100%"  # images of one colour
    assert "red taken for green 1 of 4" in errors


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_an_interrupted_batch_is_compared_as_a_whole_with_the_class_that_means_no_defect(
    model, labelled, tmp_path, suffix, capsys
):
    out, view = tmp_path / f"results{suffix}", View(no_defect="green")
    images = batch.find_images([labelled])
    for some in (images[:5], images):
        results = batch.ResultFile(out, model, view)
        capsys.readouterr()
        classify_and_print(model, some, view, None, results, None, heat=False, as_json=True)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["type"] == "Performance"
    assert found["confusion"] == {
        "red": {"red": 3, "green": 1},
        "green": {"green": 4},
        "blue": {"blue": 1},
    }
    assert (found["missed"]["count"], found["missed"]["images"]) == (1, 5)
    assert (found["false_rejects"]["count"], found["false_rejects"]["images"]) == (0, 4)
    assert found["in_doubt"]["share"] == 1


def test_the_accuracy_on_the_plants_own_classes_stands_apart(tmp_path, labelled, capsys):
    taught = load_model(tiny_bundle(tmp_path / "taught", trained={"green": 9, "blue": 9}).folder)
    run(taught, labelled, None)
    assert capsys.readouterr().out.endswith(
        "accuracy on the plant's own classes 100.0% (57 to 100; 5 of 5)\n"
    )


def test_who_judges_a_model_by_images_that_trained_it_is_told_so(model, tmp_path, labelled, capsys):
    red = hashlib.sha256(RED).hexdigest()
    run(load_model(tiny_bundle(tmp_path / "taught", trained_on=(red[:16],)).folder), labelled, None)
    assert "3 of 10 images trained" in capsys.readouterr().err
    run(model, labelled, None)
    assert "trained this model" not in capsys.readouterr().err


def test_folders_of_no_class_are_named_if_others_are_of_one(model, labelled, tree, capsys):
    (labelled / "purple").mkdir()
    (labelled / "purple/0.png").write_bytes(RED)
    run(model, labelled, None)
    said = capsys.readouterr()
    assert "not evaluated: purple" in said.err
    assert "accuracy" not in said.out
    run(model, tree, None)
    said = capsys.readouterr()
    assert "accuracy" not in said.out
    assert "not evaluated" not in said.err


def test_results_of_another_model_are_not_mixed_in(model, tree, tmp_path):
    out = tmp_path / "results.csv"
    run(model, tree, out)
    other = load_model(tiny_bundle(tmp_path / "other", round_=2).folder)
    with pytest.raises(UsageError, match=f"{model.digest}.*{other.digest}"):
        run(other, tree, out)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_results_of_another_view_or_prior_are_not_mixed_in(model, tree, tmp_path, suffix):
    out, strict, prior = (
        tmp_path / f"results{suffix}",
        View(threshold=0.99),
        Prior(classes={"red": 2, "blue": 3}),
    )
    images = batch.find_images([tree])
    results = batch.ResultFile(out, model, strict, prior)
    classify_and_print(model, images[:2], strict, prior, results, None, heat=False, as_json=False)
    for other in ((None, prior), (strict, None)):
        with pytest.raises(UsageError, match="view or prior"):
            batch.ResultFile(out, model, *other)
    results = batch.ResultFile(
        out, model, View(threshold=0.99), Prior(classes={"blue": 3, "red": 2})
    )
    classify_and_print(model, images, strict, prior, results, None, heat=False, as_json=False)
    assert len(rows(out)) == len(NAMES)


def test_a_file_that_holds_something_else_is_left_as_it_is(model, tmp_path):
    for name, content in {
        "a.jsonl": b"[1]\n{",
        "b.csv": b"a;b\n1;2\nx",
        "c.csv": b"image,model\nx",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match="other than results"):
            batch.ResultFile(tmp_path / name, model)
        assert (tmp_path / name).read_bytes() == content
    with pytest.raises(UsageError, match=r"\.jsonl.*\.csv"):
        batch.ResultFile(tmp_path / "c.txt", model)
    with pytest.raises(EdgeNodeError, match=r"none/d\.csv"):
        batch.ResultFile(tmp_path / "none" / "d.csv", model)


def test_names_are_no_formulas_in_a_spreadsheet_and_read_again_as_they_were(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("=1.png").write_bytes(RED)
    model = load_model(tiny_bundle(tmp_path / "bundle", classes=("@red", "green", "blue")).folder)
    run(model, Path("=1.png"), Path("results.csv"))
    [row] = rows(Path("results.csv"))
    assert (row["image"], row["label"]) == ("'=1.png", "'@red")
    [(image, earlier)] = batch.ResultFile(Path("results.csv"), model).classified.items()
    assert (image, earlier.label) == ("=1.png", "@red")


def test_each_image_that_could_be_read_gets_its_annotated_picture(model, tree, tmp_path):
    run(model, tree, None, tmp_path / "seen")
    pictures = sorted((tmp_path / "seen").iterdir())
    assert len(pictures) == 4
    assert {Image.open(path).format for path in pictures} == {"JPEG"}
    assert re.search(r"images_10\.png\.[0-9a-f]{8}\.annotated\.jpg$", pictures[0].name)


def test_pictures_of_an_earlier_run_are_no_images_under_any_name(model, tree, tmp_path, caplog):
    run(model, tree, None, tree / "seen")
    first, *_ = pictures = sorted((tree / "seen").iterdir())
    first.rename(renamed := tree / "seen" / "0.jpg")
    assert [str(each.path.relative_to(tree)) for each in batch.find_images([tree])] == NAMES
    assert caplog.messages == [
        f"{len(pictures)} annotated picture(s) are left out, the first is {renamed}"
    ]
    # somebody asks for just this one
    assert [each.path for each in batch.find_images([renamed])] == [renamed]


def test_no_two_images_share_a_picture_and_long_names_are_shortened(tmp_path):
    names = [
        "a/b.png",
        "a_b.png",
        "x/1.png",
        "../x/1.png",
        "/x/1.png",
        *(f"{'ä' * 300}/{each}.png" for each in "yz"),
    ]
    for name in names:
        batch.annotated_path(name, tmp_path).touch()
    assert len(list(tmp_path.iterdir())) == len(names)


def test_for_machines_each_outcome_is_a_line_also_beside_results(model, tree, tmp_path, capsys):
    run(model, tree, tmp_path / "results.csv", as_json=True)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [outcome["type"] for outcome in found] == [
        "Verdict",
        "Verdict",
        "Verdict",
        "Failure",
        "Verdict",
    ]
