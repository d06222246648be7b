"""Heads of statistics made anew: with other images they are what they would always have been."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from broker_config.protocol.errors import UsageError
from edge.bundle.comparison import Candidate, Comparison
from tests.support.method_cases import equal
from tests.support.plants import CLASSES, draw, here, load_images
from trainer.data import class_folders
from trainer.data.checks.check_run import load_checked
from trainer.data.class_folders import Images
from trainer.data.training_set import TrainingSet
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import SimulationResult, simulate
from trainer.methods import complete_options
from trainer.models.named_tensors import select
from trainer.models.network import Network, Tensors, to_arrays
from trainer.statistics import features
from trainer.training import conclusion, frozen_heads, personal_model
from trainer.training.calibration import Calibrated, calibrate
from trainer.training.conclusion import conclude
from trainer.training.engine import predict
from trainer.training.frozen_heads import Mixture
from trainer.training.participant import Participant, State
from trainer.training.personal_model import PersonalModel
from trainer.training.refit import refit

PLANT = "plant-1"
REQUEST = Request("gaussian", model="small", weights="none", size=32, seed=7)


def federated(
    plants: dict[str, Path], request: Request = REQUEST, *, hold_out: bool = False
) -> PersonalModel:
    """The plant's model of a federation that is simulated.

    With `hold_out` it is as older versions made it, which held some images out.
    """
    spec, broadcast = draft(request, federation="steel", classes=CLASSES, nodes=len(plants))
    size = spec.preprocessing.size
    images = {}
    for name, folder in plants.items():
        images[name] = load_checked(
            class_folders.scan(folder),
            None,
            spec.classes,
            size,
            spec.seed,
            hold_out="every class" if hold_out else "nothing",
        )[0]
    return simulate(spec, broadcast, images).models[PLANT]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PersonalModel]:
    """Two plants' images, and the first one's model.

    It has two classes of the three; four images of each.
    """
    folder = tmp_path_factory.mktemp("drawn")
    plants = {
        PLANT: draw(folder / PLANT, 4, 1, CLASSES[:2]),
        "plant-2": draw(folder / "plant-2", 3, 2),
    }
    personal_model.save(model := federated(plants), folder / "model")
    return folder, model


@pytest.fixture
def plants(drawn: tuple[Path, PersonalModel], tmp_path: Path) -> dict[str, Path]:
    """The plants, whose first may be changed."""
    return {
        PLANT: shutil.copytree(drawn[0] / PLANT, tmp_path / PLANT),
        "plant-2": drawn[0] / "plant-2",
    }


@pytest.fixture
def source(drawn: tuple[Path, PersonalModel], tmp_path: Path) -> Path:
    """The model's folder."""
    return shutil.copytree(drawn[0] / "model", tmp_path / "model")


def images(folder: Path, name: str) -> list[Path]:
    return sorted((folder / name).iterdir())


def remove(folder: Path) -> None:
    images(folder, "inclusion")[0].unlink()


def relabel(folder: Path) -> None:
    path = images(folder, "inclusion")[0]
    path.rename(folder / "patches" / "moved.png")


def add_a_class(folder: Path) -> None:
    draw(folder / "more", 2, 5)
    (folder / "more" / "scratches").rename(folder / "scratches")
    shutil.rmtree(folder / "more")


def remove_a_class(folder: Path) -> None:
    shutil.rmtree(folder / "patches")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (remove, "0 image(s) are new, 1 are gone, and 0 have"),
        (relabel, "0 image(s) are new, 0 are gone, and 1 have"),
        (add_a_class, "2 image(s) are new, 0 are gone, and 0 have"),
        (remove_a_class, "0 image(s) are new, 4 are gone, and 0 have"),
    ],
)
def test_a_model_with_other_images_is_what_it_would_always_have_been(
    change: Callable[[Path], None], told: str, plants: dict[str, Path], source: Path
) -> None:
    """To the bit: of the others' totals, and of the model that a federation with these images
    gives.
    """
    change(plants[PLANT])
    made, always = refit(source, plants[PLANT]), federated(plants)
    assert equal(to_arrays(made.model.tensors), to_arrays(always.tensors))
    assert equal(to_arrays(made.model.shared), to_arrays(always.shared))
    assert made.model.metadata.trained == always.metadata.trained
    assert made.model.metadata.metrics == always.metadata.metrics
    assert made.notes[0] == f"since the model was made, {told} another class"


def test_where_nothing_was_held_out_each_image_is_left_out_in_turn_again(tmp_path: Path) -> None:
    """However many images there are: the model is what a federation of now gives."""
    plants = {PLANT: draw(tmp_path / PLANT, 10, 1), "plant-2": draw(tmp_path / "plant-2", 3, 2)}
    personal_model.save(federated(plants), tmp_path / "model")
    images(plants[PLANT], CLASSES[0])[0].unlink()
    made, always = refit(tmp_path / "model", plants[PLANT]).model, federated(plants)
    assert made.metadata.metrics["images"] == 29
    assert made.metadata.metrics == always.metadata.metrics
    assert made.metadata.confidence == always.metadata.confidence
    assert equal(to_arrays(made.tensors), to_arrays(always.tensors))


def test_the_first_image_of_a_class_does_not_cost_the_model_what_was_held_out(
    tmp_path: Path,
) -> None:
    plants = {
        PLANT: draw(tmp_path / PLANT, 10, 1, CLASSES[:2]),
        "plant-2": draw(tmp_path / "plant-2", 3, 2),
    }
    personal_model.save(before := federated(plants, hold_out=True), tmp_path / "model")
    assert not before.metadata.metrics["cross_validated"]
    draw(tmp_path / "more", 1, 5)
    (tmp_path / "more" / CLASSES[2]).rename(plants[PLANT] / CLASSES[2])
    made = refit(tmp_path / "model", plants[PLANT]).model
    assert not made.metadata.metrics["cross_validated"]
    assert {each.digest for each in made.predictions} == {
        each.digest for each in before.predictions
    }
    assert made.metadata.trained[CLASSES[2]] == 1


def test_new_images_train_and_the_model_is_judged_on_those_that_were_held_out_before(
    tmp_path: Path,
) -> None:
    """A line keeps what it doubts: one such image among those held out would spoil the
    thresholds of all verdicts.
    """
    plants = {PLANT: draw(tmp_path / PLANT, 10, 1), "plant-2": draw(tmp_path / "plant-2", 3, 2)}
    personal_model.save(before := federated(plants, hold_out=True), tmp_path / "model")
    for path in draw(tmp_path / "more", 6, 5).glob("*/*"):
        path.rename(plants[PLANT] / path.parent.name / path.name)
    made = refit(tmp_path / "model", plants[PLANT]).model
    assert {each.digest for each in made.predictions} == {
        each.digest for each in before.predictions
    }
    assert sum(made.metadata.trained.values()) == sum(before.metadata.trained.values()) + 6 * len(
        CLASSES
    )


def test_features_of_an_image_are_computed_once(
    plants: dict[str, Path], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the plant's sums and for those of all folds, made anew as well as in a federation."""
    compute, counts = features.view_features, list[int]()

    def count(network: Network, tensors: Tensors, data: TrainingSet) -> np.ndarray:
        counts.append(len(data.labels))
        return compute(network, tensors, data)

    monkeypatch.setattr(features, "view_features", count)
    made = refit(source, plants[PLANT]).model
    assert made.metadata.metrics["cross_validated"] == 1
    assert counts == [8]
    federated(plants)
    assert counts == [8, 8, 9]


def test_an_image_is_judged_by_the_head_of_a_plant_that_has_never_had_it(
    plants: dict[str, Path], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the consensus head: the choice among heads is fixed."""
    told: list[np.ndarray] = []

    def record(logits: np.ndarray, *arguments: Any) -> Calibrated:
        told.append(logits)
        return calibrate(logits, *arguments)

    fixed = Mixture(strength=1.0, together_scale=1.0, alone_scale=1.0, share=1.0)
    monkeypatch.setattr(frozen_heads, "fit_mixture", lambda *_: fixed)
    monkeypatch.setattr(conclusion, "calibrate", record)
    model = refit(source, plants[PLANT]).model
    (found,) = told
    spec, _ = draft(REQUEST, federation="steel", classes=CLASSES, nodes=2)
    train, others = load_images(spec, plants[PLANT]).train, to_arrays(model.shared)
    assert [each.digest for each in model.predictions] == [*train.digests]
    for number in range(8):
        fold = train.take(np.setdiff1d(np.arange(8), [number]))
        never = conclude(
            Participant(spec, PLANT, Images(fold, None)),
            State({}, {}),
            1,
            others,
            others,
            (),
            None,
            counted=False,
        )
        judged = train.take(np.array([number]))
        logits = predict(
            Network("small", 3), never.tensors, TrainingSet.of(judged, spec.preprocessing)
        )
        np.testing.assert_allclose(found[number], logits[0], rtol=1e-3, atol=1e-3)


def test_what_other_encoders_were_compared_for_a_model_is_made_anew_without_them(
    plants: dict[str, Path], tmp_path: Path
) -> None:
    model = federated(plants, REQUEST._replace(options={"others": "efficientnet_lite0"}))
    assert not select(model.shared, ("candidate",))
    personal_model.save(model, tmp_path / "compared")
    assert equal(
        to_arrays(refit(tmp_path / "compared", plants[PLANT]).model.tensors),
        to_arrays(model.tensors),
    )


def test_a_model_made_anew_can_be_made_anew_again(
    plants: dict[str, Path], source: Path, tmp_path: Path
) -> None:
    remove(plants[PLANT])
    personal_model.save(refit(source, plants[PLANT]).model, tmp_path / "again")
    add_a_class(plants[PLANT])
    again = refit(tmp_path / "again", plants[PLANT]).model
    assert again.metadata.refits == 2
    assert equal(to_arrays(again.tensors), to_arrays(federated(plants).tensors))


def test_a_class_that_is_taken_out_is_never_named_and_the_others_are_told_apart_as_before(
    plants: dict[str, Path], source: Path, tmp_path: Path
) -> None:
    shutil.rmtree(plants[PLANT] / "patches")
    with_it = refit(source, plants[PLANT]).model
    made = refit(source, plants[PLANT], without=["patches"])
    metadata, weight = made.model.metadata, made.model.tensors["classifier.weight"]
    assert metadata.classes == ("inclusion", "scratches")
    assert weight.shape == (2, 64)
    before = with_it.tensors["classifier.weight"][[0, 2]]
    factor = float(weight.norm() / before.norm())
    np.testing.assert_allclose(weight, factor * before, rtol=1e-4, atol=1e-7)
    assert {each.verdict for each in made.model.predictions} <= {*metadata.classes}
    assert any(note.startswith("this model never names patches") for note in made.notes)
    personal_model.save(made.model, tmp_path / "less")
    back = refit(tmp_path / "less", plants[PLANT]).model
    assert equal(to_arrays(back.tensors), to_arrays(with_it.tensors)), (
        "what was left out comes back"
    )


def test_a_calibration_knows_nothing_of_a_class_that_is_taken_out(
    plants: dict[str, Path], source: Path
) -> None:
    """Else a bundle of the model contradicts itself, and its export fails."""
    add_a_class(plants[PLANT])
    shutil.rmtree(plants[PLANT] / "patches")
    with_it = refit(source, plants[PLANT]).model.metadata.confidence
    confidence = refit(source, plants[PLANT], without=["patches"]).model.metadata.confidence
    assert with_it
    assert with_it.held_out
    assert confidence
    assert confidence.held_out
    assert set(confidence.thresholds) == {"inclusion", "scratches"}
    labels, probabilities, _ = confidence.held_out.arrays(2)
    np.testing.assert_array_equal(labels, with_it.held_out.arrays(3)[0] // 2)
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-3)


def test_what_the_plant_calls_a_class_it_goes_on_to_call_so(
    plants: dict[str, Path], source: Path
) -> None:
    (plants[PLANT] / "patches").rename(plants[PLANT] / "Flecken")
    with pytest.raises(UsageError, match="Flecken"):
        refit(source, plants[PLANT])
    named = refit(source, plants[PLANT], aliases={"Flecken": "patches"}).model
    personal_model.save(named, source)
    assert equal(to_arrays(refit(source, plants[PLANT]).model.tensors), to_arrays(named.tensors))


def test_where_another_encoder_is_deployed_the_shared_one_is_kept_beside_it(
    drawn: tuple[Path, PersonalModel], source: Path, tmp_path: Path
) -> None:
    model = drawn[1]
    alone = {name: value + 1 for name, value in model.tensors.items()}
    personal_model.save(model._replace(tensors=alone), tmp_path / "alone")
    shared = [
        personal_model.load_shared(personal_model.load(each), each)
        for each in (source, tmp_path / "alone")
    ]
    assert all(equal(to_arrays(each), to_arrays(model.shared)) for each in shared)
    sizes = [
        (folder / "shared.safetensors").stat().st_size for folder in (source, tmp_path / "alone")
    ]
    assert sizes[0] < sizes[1]


def test_what_has_unlearned_nothing_is_said(
    drawn: tuple[Path, PersonalModel], tmp_path: Path
) -> None:
    """A trained encoder, and what was trained alone."""
    one = Candidate(accuracy=1, low=0, high=1)
    mixed = Comparison(images=8, guessing=0.5, alone=one, together=one, mixed=one, deployed="mixed")
    model = drawn[1]
    trained = msgspec.structs.replace(
        model.metadata,
        method="fedper",
        options=complete_options("fedper", {}),
        head="statistics",
        comparison=mixed,
    )
    personal_model.save(model._replace(metadata=trained), tmp_path / "model")
    made = refit(tmp_path / "model", drawn[0] / PLANT)
    told = "\n".join(made.notes)
    assert "the encoder was trained" in told
    assert "the model before was mixed" in told
    never = msgspec.structs.replace(trained, comparison=None)
    personal_model.save(model._replace(metadata=never), tmp_path / "never")
    without = refit(tmp_path / "never", drawn[0] / PLANT).model
    assert equal(to_arrays(made.model.tensors), to_arrays(without.tensors))
    encoder = select(to_arrays(model.tensors), ("encoder",))
    assert equal(select(to_arrays(made.model.tensors), ("encoder",)), encoder)


def test_a_model_without_such_a_head_is_refused(
    drawn: tuple[Path, PersonalModel], tmp_path: Path
) -> None:
    personal_model.save(drawn[1]._replace(shared={}), tmp_path / "model")
    with pytest.raises(UsageError, match="head of statistics"):
        refit(tmp_path / "model", drawn[0] / PLANT)


def test_a_plant_and_a_class_leave_and_come_with_the_next_sums_from_the_earlier_encoder(
    plants: dict[str, Path], tmp_path: Path
) -> None:
    """Totals without a plant are the old ones less its sums, to the bit;
    one plant's new class is in others' heads.
    """

    def collected(who: Sequence[str], weights: str, classes: Sequence[str]) -> SimulationResult:
        request = REQUEST._replace(weights=weights)
        spec, broadcast = draft(request, federation="steel", classes=classes, nodes=len(who))
        return simulate(spec, broadcast, {name: load_images(spec, plants[name]) for name in who})

    plants["plant-3"] = draw(tmp_path / "plant-3", 3, 3)
    first = collected([*plants], "none", CLASSES)
    save_file(first.broadcast, earlier := tmp_path / "global.safetensors")
    left = collected([PLANT, "plant-2"], str(earlier), CLASSES)
    own = first.models["plant-3"].shared  # the totals of all others
    names = [name for name in first.broadcast if name.startswith("statistics.")]
    assert names
    assert all(left.broadcast[name].tobytes() == own[name].numpy().tobytes() for name in names)
    assert equal(select(left.broadcast, ("encoder",)), select(first.broadcast, ("encoder",)))
    (plants["plant-3"] / "scratches").rename(plants["plant-3"] / "dents")
    more = collected([*plants], str(earlier), [*CLASSES, "dents"])
    for model in more.models.values():
        assert model.tensors["classifier.weight"][3].any()


@pytest.mark.parametrize(
    ("without", "why"),
    [
        (["rust"], "no class 'rust'"),
        ([*CLASSES[:2]], "scratches is left"),
        (["inclusion"], "of a class that stays"),
    ],
)
def test_what_cannot_be_taken_out_is_said(
    without: list[str], why: str, plants: dict[str, Path], source: Path
) -> None:
    remove_a_class(plants[PLANT])
    with pytest.raises(UsageError, match=why):
        refit(source, plants[PLANT], without=without)


def test_the_command_writes_a_model_beside_the_one_before(
    plants: dict[str, Path], source: Path
) -> None:
    before = (source / "personal.safetensors").read_bytes()
    remove(plants[PLANT])
    done = here("refit", source, plants[PLANT])
    assert done.returncode == 0, done.stderr
    assert "1 are gone" in done.stderr
    assert "edge-node export" in done.stdout
    assert personal_model.load(source.with_name("model-refitted")).metadata.trained == {
        "inclusion": 3,
        "patches": 4,
    }
    assert (source / "personal.safetensors").read_bytes() == before


def test_a_machine_reads_what_there_is_to_tell_and_where_the_model_is(
    plants: dict[str, Path], source: Path, tmp_path: Path
) -> None:
    done = here("refit", source, plants[PLANT], "--out", tmp_path / "made", "--json")
    assert done.stderr == ""
    *told, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert any("0 are gone" in each.get("text", "") for each in told)
    assert last == {"event": "Result", "result": {"model": str(tmp_path / "made")}}
