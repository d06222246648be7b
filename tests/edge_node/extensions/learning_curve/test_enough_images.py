"""Whether a plant has enough images: told of its folder before it joins,
and of what is behind its model.
"""

import shutil
import sys
from pathlib import Path

import msgspec
import pytest

from broker_config.storage.checksums import SUMS
from edge_node.extensions.learning_curve.enough_images import trace_folder, trace_model
from edge_node.extensions.learning_curve.learning_curve import LearningCurve
from tests.support.plants import CLASSES, draw, here, load_images
from trainer.data.class_folders import Images
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate
from trainer.methods import complete_options
from trainer.models.weights_package import PACKAGE
from trainer.training import personal_model


def curve_of(folder: Path, test: Path | None = None, group: str | None = None) -> LearningCurve:
    return trace_folder(folder, test, 32, group, {}, iter)


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven images of each of three classes, and one of the first in the folder of the second."""
    folder = draw(tmp_path_factory.mktemp("plant") / "images", 7, 1)
    shutil.move(folder / CLASSES[0] / "1-3.png", folder / CLASSES[1] / "moved.png")
    return folder


@pytest.mark.slow
def test_the_command_tells_of_a_folder_alone_and_names_the_image_in_the_wrong_one_first(
    plant: Path,
) -> None:
    told = here("learning-curve", plant, "--size", 32, "--json")
    assert told.returncode == 0, told.stderr
    curve = msgspec.json.decode(told.stdout, type=LearningCurve)
    assert (curve.judged, curve.cross_validated, curve.others) == (21, True, 0)
    assert [(each.name, each.images) for each in curve.classes] == list(
        zip(CLASSES, (6, 8, 7), strict=True)
    )
    assert curve.points[-1].accuracy.value > curve.points[0].accuracy.value
    first = curve.doubts[0]
    assert Path(first.path).name == "moved.png"
    assert first.label == CLASSES[1]


def test_a_person_reads_the_same(plant: Path) -> None:
    told = here("learning-curve", plant, "--size", 32)
    assert told.returncode == 0
    assert "images of each class" in told.stdout
    assert "of 21 images that it has not seen" in told.stdout
    assert "moved.png: labelled patches" in told.stdout


def test_there_is_no_curve_of_images_that_cannot_join(tmp_path: Path) -> None:
    plant = draw(tmp_path / "images", 3, 1)
    (plant / CLASSES[0] / "broken.png").write_bytes(b"no image")
    told = here("learning-curve", plant, "--size", 32, "--json")
    assert told.returncode == 2
    assert told.stdout == ""
    assert "broken.png" in told.stderr


def test_the_option_that_a_check_once_had_names_the_command(plant: Path) -> None:
    told = here("check", plant, "--learning-curve")
    assert told.returncode == 2
    assert "edge-node learning-curve" in told.stderr


def test_without_the_package_of_weights_its_installation_is_named(
    plant: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    told = here("learning-curve", plant)
    assert told.returncode == 2
    assert "pip install edge-node-weights" in told.stderr


def test_held_out_images_judge_where_there_are_some(plant: Path, tmp_path: Path) -> None:
    curve = curve_of(plant, draw(tmp_path / "test", 4, 9))
    assert (curve.judged, curve.cross_validated) == (12, False)
    assert curve.points[-1].images == 8, "no image is left out"


@pytest.mark.slow
def test_look_alikes_never_judge_each_other(tmp_path: Path) -> None:
    """All images of a class are of one group: whichever is left out,
    nothing is left of its class.
    """
    plant = draw(tmp_path / "images", 4, 1)
    for file in sorted((plant / CLASSES[2]).iterdir()):
        file.rename(file.with_name(f"sheet1-{file.name}"))
    assert curve_of(plant).judged == 12
    assert curve_of(plant, group="^(sheet1)-").judged == 8


@pytest.mark.parametrize(("classes", "each"), [(CLASSES[:1], 4), (CLASSES, 1)])
def test_too_few_images_for_a_curve_are_a_usage_error(
    classes: tuple[str, ...], each: int, tmp_path: Path
) -> None:
    plant = draw(tmp_path / "images", each, 1, classes)
    told = here("learning-curve", plant, "--size", 32)
    assert told.returncode == 2
    assert "no learning curve" in told.stderr
    assert "each of two classes" in told.stderr


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of two plants' personal models, `a` with held-out images and `b` without,
    and their images.
    """
    folder = tmp_path_factory.mktemp("models")
    plants = {"a": draw(folder / "images-a", 8, 1), "b": draw(folder / "images-b", 4, 2)}
    test = draw(folder / "test-a", 2, 3)
    request = Request("gaussian", model="small", weights="none", size=32, seed=7)
    spec, broadcast = draft(request, federation="steel", classes=CLASSES, nodes=2)
    images: dict[str, Images] = {name: load_images(spec, each) for name, each in plants.items()}
    images["a"] = Images(images["a"].train, load_images(spec, test).train)
    for name, model in simulate(spec, broadcast, images).models.items():
        personal_model.save(model, folder / name)
    return folder


def test_a_models_curve_is_of_its_encoder_and_the_others_sums_and_ends_where_the_model_does(
    models: Path,
) -> None:
    curve = trace_model(models / "a")
    assert curve is not None
    assert (curve.judged, curve.cross_validated, curve.others) == (6, False, 12)
    assert [each.images for each in curve.classes] == [8, 8, 8]
    comparison = personal_model.load_metadata(models / "a").comparison
    assert comparison is not None
    assert curve.points[-1].accuracy.value == pytest.approx(comparison.together.accuracy)
    told = here("learning-curve", models / "a", "--json")
    assert msgspec.json.decode(told.stdout, type=LearningCurve) == curve


def test_a_model_is_taken_as_it_is(models: Path) -> None:
    told = here("learning-curve", models / "a", "--size", 32)
    assert told.returncode == 2
    assert "--size" in told.stderr


def test_where_nothing_was_trained_or_held_out_each_image_is_left_out_in_its_turn(
    models: Path,
) -> None:
    curve = trace_model(models / "b")
    assert curve is not None
    assert (curve.judged, curve.cross_validated, curve.others) == (12, True, 24)
    assert [each.images for each in curve.classes] == [4, 4, 4]


def test_there_is_no_curve_of_images_that_trained_the_encoder_or_without_a_head_of_statistics(
    models: Path, tmp_path: Path
) -> None:
    model = personal_model.load(models / "b")
    trained = msgspec.structs.replace(
        model.metadata, method="fedper", options=complete_options("fedper", {}), head="statistics"
    )
    shared = personal_model.load_shared(model, models / "b")
    images = personal_model.load_training_images(models / "b")
    model = model._replace(metadata=trained, shared=shared, training_images=images)
    personal_model.save(model, tmp_path / "trained")
    assert trace_model(tmp_path / "trained") is None
    other = shutil.copytree(models / "a", tmp_path / "other")
    (other / SUMS).unlink()
    (other / "shared.safetensors").unlink()
    assert trace_model(other) is None
    told = here("learning-curve", other)
    assert told.returncode == 2
    assert "no learning curve" in told.stderr


def test_images_that_are_gone_or_have_changed_are_left_out(models: Path, tmp_path: Path) -> None:
    state = shutil.copytree(models, tmp_path / "state")
    listed = personal_model.load_training_images(state / "a")
    (gone, changed), kept = listed[:2], [Path(each.path).read_bytes() for each in listed[:2]]
    try:
        Path(gone.path).unlink()
        Path(changed.path).write_bytes(b"another image")
        curve = trace_model(state / "a")
    finally:
        for each, content in zip(listed, kept, strict=False):
            Path(each.path).write_bytes(content)
    assert curve is not None
    assert sum(each.images for each in curve.classes) == 22
