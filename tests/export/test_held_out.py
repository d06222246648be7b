"""Export calibrates a model on the images that judged it,
and the line measures with what came of that.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load as read

from edge.bundle import bundle_format
from edge.bundle.bundle_format import Manifest
from edge.bundle.reference import ClassAxes
from edge.inference.class_prior import Prior
from edge.inference.image_decoding import decode_image
from edge.inference.predictor import Predictor
from edge.inference.tiling import View
from edge.uncertainty.model_warnings import model_warnings
from edge.uncertainty.uncertainty_check import Settings, UncertaintyCheck
from export import held_out
from export.bundle_export import export
from export.model_images import ImageFinder
from tests.support.classified_images import Told, a_line, shown
from tests.support.personal_models import CLASSES, SMALL, made, pictures, torch_probabilities
from trainer import progress
from trainer.training import personal_model
from trainer.training.calibration import fit_temperature, softmax
from trainer.training.personal_model import HeldOutPrediction, PersonalModel

IMAGES = 30

pytestmark = pytest.mark.slow  # an export of its own


def judged(folder: Path, model: PersonalModel) -> PersonalModel:
    """The model with images that judged it; their labels are its own answers,
    but for every third.
    """
    verdicts = []
    for number, pixels in enumerate(pictures(32, IMAGES)):
        Image.fromarray(pixels).save(path := folder / f"{number}.png")
        [row] = torch_probabilities(model, pixels[None])
        label = int(row.argmax()) if number % 3 else number // 3 % 3
        verdicts.append(
            HeldOutPrediction(
                path=str(path),
                digest=hashlib.sha256(path.read_bytes()).hexdigest(),
                label=CLASSES[label],
                verdict=CLASSES[int(row.argmax())],
                confidence=float(row.max()),
            )
        )
    return model._replace(predictions=tuple(verdicts))


class Written(NamedTuple):
    model: PersonalModel
    source: Path
    folder: Path
    manifest: Manifest
    notes: list[str]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("export")
    model = judged(folder, made(SMALL, "plant-1", "afedcl", 1))
    personal_model.save(model, folder / "model")
    notes: list[str] = []

    def report(event: progress.AnyEvent) -> None:
        if isinstance(event, progress.Note):
            notes.append(event.text)

    [exported] = export([folder / "model"], folder / "bundles", report)
    return Written(
        model,
        folder / "model",
        exported.folder,
        bundle_format.read_bundle(exported.folder).manifest,
        notes,
    )


@pytest.mark.slow
def test_the_graph_divides_its_logits_by_the_temperature_that_the_images_gave(written):
    images = np.stack(
        [decode_image(Path(verdict.path), 32) for verdict in written.model.predictions]
    )
    labels = np.array([CLASSES.index(verdict.label) for verdict in written.model.predictions])
    logits = np.log(torch_probabilities(written.model, images))
    expected = fit_temperature(logits, labels)
    assert written.manifest.confidence is not None
    assert written.manifest.confidence.temperature == pytest.approx(expected, rel=1e-3)
    assert abs(expected - 1) > 0.1  # or this would show nothing
    found = Predictor(bundle_format.read_bundle(written.folder)).run(images).probabilities
    assert np.abs(found - softmax(logits / expected)).max() < 1e-4


def test_the_bundle_says_how_sure_a_verdict_must_be_and_what_that_is_worth(written):
    confidence = written.manifest.confidence
    assert confidence.images == IMAGES
    assert set(confidence.thresholds) == set(CLASSES)
    assert 0 < confidence.coverage <= 1
    told, *warned = written.notes
    assert told.startswith("plant-1: accuracy 80.0% (63 to 90; 24 of 30)")
    assert confidence.coverage >= 0.5, "at most two in five are in doubt, but for cross-fitting"
    assert "no class means no defect" in told
    expected = model_warnings(written.manifest, View(), Prior())
    assert warned == [f"warning: plant-1: {each.text}" for each in expected]


def test_the_bundle_holds_how_the_graph_saw_the_images_and_a_line_measures_with_it(written):
    reference = Predictor(bundle_format.read_bundle(written.folder)).reference
    assert reference is not None
    assert (
        len(reference.features) == len(reference.novelty) == len(reference.disagreement) == IMAGES
    )
    known = decode_image(Path(written.model.predictions[3].path), 32)
    strange = np.zeros((32, 32, 3), np.uint8)
    seen, unseen = shown(
        a_line(written.folder, Told(), UncertaintyCheck(Settings())), [known, strange]
    )
    assert seen.novelty == pytest.approx(0, abs=1e-4)
    assert unseen.novelty is not None
    assert unseen.novelty > 1e-3
    assert seen.disagreement is not None


def test_of_a_consensus_head_the_bundle_holds_its_class_axes_and_no_features_of_images(written):
    found = held_out.load(written.source, written.model.metadata, ImageFinder())
    assert not isinstance(found, str)
    content = (written.folder / "model.onnx").read_bytes()
    features = held_out.run_graph(content, found.images).features
    axes = ClassAxes(features.mean(0), np.eye(2, features.shape[1], dtype=np.float32), features[:1])
    tensors = {f"novelty.{name}": torch.from_numpy(value) for name, value in axes._asdict().items()}
    reference = read(held_out.build_reference(content, found, written.model.metadata, tensors, {}))
    assert len(reference["features"]) == 0
    assert reference["novelty"].tolist() == pytest.approx(sorted(axes.distance(features)))
    unseen = {digest: 0.5 + number / 100 for number, digest in enumerate(found.digests)}
    content_and_unseen = (content, found, written.model.metadata, tensors, unseen)
    reference = read(held_out.build_reference(*content_and_unseen))
    assert reference["novelty"].tolist() == pytest.approx(sorted(unseen.values()))


def test_images_that_are_gone_or_changed_do_not_calibrate_and_that_is_said(written, tmp_path):
    model = judged(tmp_path, written.model)
    personal_model.save(model, tmp_path / "model")
    for number in range(12):
        (tmp_path / f"{number}.png").unlink()
    Image.new("RGB", (32, 32)).save(tmp_path / "12.png")
    found = held_out.load(tmp_path / "model", model.metadata, ImageFinder())
    assert not isinstance(found, str)
    assert len(found.images) == len(found.labels) == IMAGES - 13
    for number in range(13, 29):
        (tmp_path / f"{number}.png").unlink()
    reason = held_out.load(tmp_path / "model", model.metadata, ImageFinder())
    assert isinstance(reason, str)
    assert "1 of the 30" in reason


def test_images_that_trained_the_model_say_nothing_of_it(written):
    crossed = msgspec.structs.replace(written.model.metadata, metrics={"cross_validated": 1.0})
    assert held_out.load(written.source, crossed, ImageFinder()) == "all of its images trained it"


def test_a_plant_without_labelled_images_has_none_that_were_held_out(written):
    unjudged = msgspec.structs.replace(written.model.metadata, metrics={})
    assert isinstance(held_out.load(written.source, unjudged, ImageFinder()), str)


def test_a_model_without_a_list_of_them_is_exported_uncalibrated(written, tmp_path):
    personal_model.save(written.model, tmp_path / "model")
    (tmp_path / "model" / "verdicts.json").unlink()
    reason = held_out.load(tmp_path / "model", written.model.metadata, ImageFinder())
    assert "verdicts.json" in str(reason)
