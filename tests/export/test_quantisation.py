"""A faster model takes the place of an exact one only where held-out images and a clock allow
it.
"""

import hashlib
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from PIL import Image

from broker_config.protocol.errors import UsageError
from broker_config.storage.checksums import SUMS
from edge.bundle import bundle_format
from edge.inference.predictor import Predictor
from export import bundle_export as exporting
from export.bundle_export import Optimisations, export
from export.encoder_selection import drop_encoder
from export.graph import OUTPUTS, set_temperature
from export.model_images import ImageFinder
from export.parity import open_session
from export.quantisation import quantise
from export.replacement_check import Comparison, compare_bundles
from export.weight_rounding import round_to_steps, round_weights
from tests.support.int8_kernels import answers
from tests.support.personal_models import CLASSES, SMALL, graph_of, made, pictures
from trainer import progress
from trainer.data.class_folders import LabelledImages
from trainer.data.training_set import TrainingSet
from trainer.models.network import Network
from trainer.training import personal_model
from trainer.training.personal_model import HeldOutPrediction, PersonalModel, TrainingImage


def saved(model: PersonalModel, folder: Path) -> Path:
    """The folder of the model, which was trained on 12 images and judged by 12 others in
    `folder`/images.
    """
    photos = []
    for place, pixels in enumerate(pictures(32, 24)):
        path = folder / "images" / CLASSES[place % 3] / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        photos.append({"path": str(path), "digest": digest, "label": path.parent.name})
    metadata = msgspec.structs.replace(
        model.metadata, metrics={"accuracy": 0.5, "cross_validated": 0.0}
    )
    training = tuple(TrainingImage(**photo) for photo in photos[:12])
    verdicts = tuple(
        HeldOutPrediction(**photo, verdict="patches", confidence=0.9) for photo in photos[12:]
    )
    personal_model.save(
        PersonalModel(metadata, model.tensors, verdicts, training), folder / "model"
    )
    return folder / "model"


def collect(said: list[str]) -> progress.Report:
    return lambda event: said.append(progress.format_event(event))


def with_fusion(model: PersonalModel, weight: float) -> PersonalModel:
    return model._replace(tensors={**model.tensors, "fusion": torch.tensor(weight)})


PASSES = Comparison(images=12, same=1.0, accuracy=(0.5, 0.5), milliseconds=(2.0, 1.0))
FAILS = PASSES._replace(same=0.9)


class Run(NamedTuple):
    """An export in int8 of a fused model whose images are on disk,
    and both graphs that were compared.
    """

    source: Path
    folder: Path
    said: list[str]
    exact: bytes
    faster: bytes
    held_out: LabelledImages


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("int8")
    source = saved(made(SMALL, "plant-1", "afedcl", 3), folder)
    said: list[str] = []
    graphs: list[tuple[bytes, bytes, LabelledImages]] = []

    def comparing(exact: Path, faster: Path, held_out: LabelledImages) -> Comparison:
        graphs.append((graph_of(exact), graph_of(faster), held_out))
        return PASSES  # what a tiny model gains depends on the machine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "compare_bundles", comparing)
        export(
            [source],
            folder / "bundles",
            collect(said),
            optimisations=Optimisations(int8=True),
        )
    return Run(source, folder, said, *graphs[0])


@pytest.mark.slow
def test_a_bundle_in_int8_says_so_and_passes_its_self_test_with_more_tolerance(run: Run) -> None:
    found = bundle_format.read_bundle(run.folder / "bundles" / "plant-1")
    assert found.manifest.precision == "int8"
    assert found.manifest.golden.tolerance == 0.1
    assert found.manifest.confidence is not None
    served = (found.folder / "model.onnx").read_bytes()
    assert served == set_temperature(run.faster, found.manifest.confidence.temperature)
    Predictor(found).self_test()
    assert any("is int8: 100.0% of 12" in line for line in run.said)


@pytest.mark.slow
def test_int8_answers_nearly_as_fp32_does_with_all_extras(run: Run) -> None:
    images = pictures(32, 5)
    for name in OUTPUTS:
        exact, faster = (
            open_session(graph).run([name], {"image": images})[0]
            for graph in (run.exact, run.faster)
        )
        assert exact.shape == faster.shape
        assert 0 < np.abs(exact - faster).mean() < 0.02 * np.ptp(exact)


@pytest.mark.slow
def test_int8_loads_on_processors_with_and_without_instructions_for_it(run: Run) -> None:
    with_vnni, without = answers(run.faster, pictures(32, 5))
    assert with_vnni.shape == without.shape == (5, 3)


def test_encoders_compute_in_integers_and_take_the_image_as_it_is(run: Run) -> None:
    graph = onnx.load_from_string(run.faster).graph
    kinds = Counter(node.op_type for node in graph.node)
    assert kinds["Cast"] == kinds["Sub"] == 0
    first = [
        node
        for node in graph.node
        if node.op_type == "DequantizeLinear" and "permute" in node.input[0]
    ]
    scale = {value.name: numpy_helper.to_array(value) for value in graph.initializer}[
        first[0].input[1]
    ]
    assert scale == 1
    assert (
        sum(value.data_type == onnx.TensorProto.INT8 for value in graph.initializer if value.dims)
        >= 8
    )


def test_int8_is_calibrated_on_training_images_and_measured_on_held_out_ones(run: Run) -> None:
    training = ImageFinder().training(run.source, personal_model.load_metadata(run.source))
    assert not set(training.digests) & set(run.held_out.digests)
    assert len(training.digests) == len(run.held_out.digests) == 12
    assert run.faster == quantise(run.exact, training.images)
    assert run.faster != quantise(run.exact, run.held_out.images)


def test_weights_are_rounded_so_that_outputs_err_less() -> None:
    random = np.random.default_rng()
    # bright and dark: they go together
    inputs = random.uniform(2, 4, (1, 1000)) + random.normal(0, 1, (9, 1000))
    weight, step = random.uniform(-2.9, 2.9, (1, 40, 9)), np.full((1, 40), 3 / 127)
    well = round_to_steps(weight, step, (inputs @ inputs.T / 1000)[None]) * step[:, :, None]
    nearest = np.round(weight / step[:, :, None]) * step[:, :, None]
    assert (
        np.square((well - weight) @ inputs).mean()
        < 0.5 * np.square((nearest - weight) @ inputs).mean()
    )


def test_what_rounding_shifts_on_average_is_put_right_in_the_bias() -> None:
    image = onnx.helper.make_tensor_value_info("image", onnx.TensorProto.UINT8, None)
    out = onnx.helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, None)
    nodes = [
        onnx.helper.make_node("Cast", ["image"], ["pixels"], to=onnx.TensorProto.FLOAT),
        onnx.helper.make_node(
            "Conv", ["pixels", "w", "b"], ["out"], pads=[0] * 4, strides=[1, 1], group=1
        ),
    ]
    exact = {"w": np.full((1, 1, 1, 1), 5.4), "b": np.zeros(1)}
    whole = {"w_quantized": np.zeros((1, 1, 1, 1), np.int8), "b_quantized": np.array([7], np.int32)}
    scales = {"w_scale": np.ones(1), "b_quantized_scale": np.full(1, 0.1)}
    models = [
        onnx.helper.make_model(
            onnx.helper.make_graph(
                nodes,
                "one",
                [image],
                [out],
                [numpy_helper.from_array(array, name) for name, array in values.items()],
            ),
            opset_imports=[onnx.helper.make_opsetid("", 20)],
            ir_version=10,
        )
        for values in (
            {name: array.astype(np.float32) for name, array in exact.items()},
            {**whole, **scales},
        )
    ]
    round_weights(models[1], models[0], np.full((3, 1, 4, 4), 20, np.uint8))
    found = {
        value.name: int(numpy_helper.to_array(value).item())
        for value in models[1].graph.initializer
    }
    assert found["w_quantized"] == 5
    assert found["b_quantized"] == 7 + 80  # 20 times 0.4, in tenths


def test_bundles_are_compared_by_the_lines_verdicts_accuracy_and_time(run: Run) -> None:
    bundle = run.folder / "bundles" / "plant-1"
    same = compare_bundles(bundle, bundle, run.held_out)
    assert (same.images, same.same) == (12, 1.0)
    assert same.accuracy[0] == same.accuracy[1]
    assert min(same.milliseconds) > 0
    session = open_session((bundle / "model.onnx").read_bytes())
    labels = session.run(["probabilities"], {"image": run.held_out.images})[0].argmax(1)
    assert compare_bundles(bundle, bundle, run.held_out._replace(labels=labels)).accuracy == (
        1.0,
        1.0,
    )


@pytest.mark.parametrize(
    ("changes", "passed"),
    [
        ({}, True),
        ({"same": 0.99}, True),
        ({"same": 0.989}, False),
        ({"accuracy": (0.9, 0.896)}, True),
        ({"accuracy": (0.9, 0.894)}, False),
        ({"milliseconds": (1.0, 1.0)}, False),
    ],
)
def test_what_is_less_right_or_not_faster_does_not_pass(
    changes: dict[str, Any], passed: bool
) -> None:
    assert PASSES._replace(**changes).passed is passed


@pytest.fixture
def traced(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """No trace, which takes seconds: the graph is the one that was exported."""
    monkeypatch.setattr(exporting, "trace", lambda module, size: None)
    monkeypatch.setattr(exporting, "fill_values", lambda graph, module: run.exact)


@pytest.mark.usefixtures("traced")
def test_fp32_stays_where_int8_does_not_pass_and_the_figures_say_why(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "compare_bundles", lambda *_: FAILS)
    said: list[str] = []
    export(
        [run.source],
        tmp_path,
        collect(said),
        optimisations=Optimisations(int8=True),
    )
    assert bundle_format.read_bundle(tmp_path / "plant-1").manifest.precision == "fp32"
    graph = onnx.load(tmp_path / "plant-1" / "model.onnx").graph
    assert not any(value.data_type == onnx.TensorProto.INT8 for value in graph.initializer)
    assert any("stays fp32; in int8: 90.0% of 12" in line for line in said)


@pytest.mark.usefixtures("traced")
def test_without_held_out_images_nothing_is_exchanged(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(run.source, source)
    metadata = personal_model.load_metadata(source)
    metrics = {**metadata.metrics, "cross_validated": 1.0}
    (source / SUMS).unlink(missing_ok=True)
    (source / "personal.json").write_bytes(
        msgspec.json.encode(msgspec.structs.replace(metadata, metrics=metrics))
    )
    said: list[str] = []
    export([source], tmp_path / "bundles", collect(said), optimisations=Optimisations(int8=True))
    manifest = bundle_format.read_bundle(tmp_path / "bundles" / "plant-1").manifest
    assert (manifest.precision, manifest.encoders) == ("fp32", ("received", "own"))
    assert sum("be measured: all of its images" in line for line in said) == 1


def test_images_that_have_moved_are_found_by_their_content(run: Run, tmp_path: Path) -> None:
    metadata = personal_model.load_metadata(run.source)
    before = ImageFinder().training(run.source, metadata)
    source = tmp_path / "model"
    shutil.copytree(run.source, source)
    shutil.copytree(run.folder / "images", tmp_path / "moved")
    listed = [
        msgspec.structs.replace(sample, path=sample.path + ".gone")
        for sample in personal_model.load_training_images(source)
    ]
    (source / SUMS).unlink(missing_ok=True)
    (source / "training.json").write_bytes(msgspec.json.encode(listed))
    with pytest.raises(UsageError, match=r"none .*trained") as caught:
        ImageFinder().training(source, metadata)
    assert "--data" in caught.value.remedy
    found = ImageFinder(tmp_path / "moved").training(source, metadata)
    assert np.array_equal(found.images, before.images)
    assert all(tmp_path in path.parents for path in found.paths)


# One encoder


@pytest.mark.parametrize(("weight", "kept"), [(0.01, "own"), (0.99, "received")])
def test_an_encoder_with_hardly_a_share_that_changes_no_verdict_is_left_out(
    run: Run, weight: float, kept: str
) -> None:
    model = with_fusion(personal_model.load(run.source), weight)
    found = drop_encoder(model.metadata, model.tensors, run.held_out)
    assert found is not None
    assert found.kept == kept
    assert not any(name.startswith(("received.", "fusion")) for name in found.tensors)
    prefix = {"own": "encoder.", "received": "received."}[kept]
    name = "features.0.weight"
    assert torch.equal(found.tensors[f"encoder.{name}"], model.tensors[prefix + name])
    assert found.share == pytest.approx(0.01)


def test_an_encoder_with_a_share_or_one_that_changes_a_verdict_stays(run: Run) -> None:
    model = personal_model.load(run.source)
    assert drop_encoder(model.metadata, with_fusion(model, 0.06).tensors, run.held_out) is None
    near = with_fusion(model, 0.04)
    own = {
        name: value
        for name, value in near.tensors.items()
        if not name.startswith(("received.", "fusion"))
    }
    network = Network("small", 3)
    pixels = TrainingSet.of(run.held_out, model.metadata.preprocessing).network_input(slice(None))
    with torch.no_grad():  # a bias with which the first image's verdict hangs on the other encoder
        both, one = (network.predict(tensors, pixels)[0] for tensors in (near.tensors, own))
    shift = both - one
    first, second = int(shift.argmax()), int(shift.argmin())
    bias = model.tensors["classifier.bias"].clone()
    bias += 100 * (torch.nn.functional.one_hot(torch.tensor([first, second]), 3).sum(0) - 1)
    gap = (both[first] - both[second] + one[first] - one[second]) / 2
    bias[second] += gap
    assert (
        drop_encoder(model.metadata, {**near.tensors, "classifier.bias": bias}, run.held_out)
        is None
    )
