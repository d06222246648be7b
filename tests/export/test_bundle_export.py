"""Personal models become bundles that compute what torch computes; otherwise nothing is written."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import RecordHead
from edge.bundle import bundle_format
from edge.bundle.verification import Verifier
from edge.inference.class_prior import Prior
from edge.inference.predictor import Outputs, Predictor
from edge.inference.served_model import load_model
from edge.inference.tiling import View
from edge.uncertainty.model_warnings import model_warnings
from export import bundle_export as exporting
from export.bundle_export import Exported, export
from export.bundle_signing import Signer
from export.graph import (
    OUTPUTS,
    Architecture,
    ParityError,
    build_module,
    fill_values,
    set_temperature,
    trace,
)
from export.parity import open_session
from export.quantisation import quantise
from tests.support import stem_encoder
from tests.support.federation_keys import FederationKeys
from tests.support.method_cases import ON_ANY_MODEL
from tests.support.personal_models import (
    METRICS,
    SMALL,
    made,
    normalised,
    pictures,
    signed_fields,
    torch_probabilities,
)
from trainer import progress
from trainer.federation.server.spec import Request
from trainer.models.fusion import LENGTH, infer_fusion, mix
from trainer.models.network import Network
from trainer.training import personal_model
from trainer.training.personal_model import HeldOutPrediction, PersonalModel


class Run(NamedTuple):
    """An export of several models, and what it left and said."""

    models: dict[str, PersonalModel]
    sources: dict[str, Path]
    exported: list[Exported]
    said: list[str]
    notes: list[str]


def export_all(models: list[PersonalModel], folder: Path) -> Run:
    sources = {model.metadata.node: folder / model.metadata.node / "model" for model in models}
    for model in models:
        personal_model.save(model, sources[model.metadata.node])
    said: list[str] = []
    notes: list[str] = []

    def report(event: progress.AnyEvent) -> None:
        if isinstance(event, progress.Note):
            notes.append(event.text)
        else:
            said.append(progress.format_event(event))

    exported = export(list(sources.values()), folder / "bundles", report)
    return Run({model.metadata.node: model for model in models}, sources, exported, said, notes)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two fused models and two plain ones, the last of which was made anew."""
    models = [
        made(SMALL, f"plant-{seed}", "fedavg" if seed > 2 else "afedcl", seed)
        for seed in (1, 2, 3, 4)
    ]
    *others, last = models
    anew = last._replace(metadata=msgspec.structs.replace(last.metadata, refits=1))
    return export_all([*others, anew], tmp_path_factory.mktemp("export"))


NODES = pytest.mark.parametrize("node", ["plant-1", "plant-2", "plant-3", "plant-4"])


@pytest.mark.slow
def test_two_encoders_have_one_stem_and_look_through_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stem_encoder.register_stem_encoder(monkeypatch.setitem)
    model = made(Request(model=stem_encoder.NAME, weights="none"), "plant-a", "fenda", 3)
    architecture = Architecture(
        stem_encoder.NAME, 3, infer_fusion(model.tensors), model.metadata.preprocessing
    )
    served: Any = build_module(architecture, model.tensors, Path("model"))
    assert not [name for name in served.state_dict() if name.startswith("received.stem")]
    looks: list[int] = []
    served.encoder.stem.register_forward_hook(lambda *_: looks.append(1))
    images = pictures(stem_encoder.SIZE, 4)
    with torch.no_grad():
        probabilities, _, features, maps = served(torch.from_numpy(images))
    assert looks == [1]
    assert np.abs(probabilities.numpy() - torch_probabilities(model, images)).max() < 1e-5
    logits = features @ model.tensors["classifier.weight"].T
    torch.testing.assert_close(maps.mean((3, 4)).sum(1), logits, rtol=1e-3, atol=1e-4)


def test_models_of_one_architecture_share_one_trace(run: Run) -> None:
    assert ["fusion" in model.tensors for model in run.models.values()] == [
        True,
        True,
        False,
        False,
    ]
    kinds = [line.split()[0] for line in run.said]
    assert kinds == [
        "tracing",
        "checking",
        "wrote",
        "wrote",
        "tracing",
        "checking",
        "wrote",
        "wrote",
    ]
    assert "small for 3 classes" in run.said[0]


@NODES
def test_a_bundle_is_read_back_with_where_its_model_comes_from(run: Run, node: str) -> None:
    (written,) = [written for written in run.exported if written.node == node]
    manifest = bundle_format.read_bundle(written.folder).manifest
    metadata = run.models[node].metadata
    assert written.folder.name == node
    for name in (
        "federation",
        "run",
        "node",
        "method",
        "model",
        "round",
        "refits",
        "classes",
        "trained",
        "metrics",
    ):
        assert getattr(manifest, name) == getattr(metadata, name)
    assert manifest.input.size == 32
    assert manifest.id == {"plant-4": "plant-4@4+1"}.get(node, f"{node}@4")


@NODES
def test_export_warns_of_a_model_that_is_not_calibrated(run: Run, node: str) -> None:
    manifest = bundle_format.read_bundle(run.exported[0].folder.with_name(node)).manifest
    [warning] = model_warnings(manifest, View(), Prior())
    assert warning.id == "not_calibrated"
    assert run.notes.count(f"warning: {node}: {warning.text}") == 1


@NODES
def test_a_bundle_passes_its_own_self_test(run: Run, node: str) -> None:
    Predictor(bundle_format.read_bundle(run.exported[0].folder.with_name(node))).self_test()


@pytest.mark.parametrize("count", [1, 2, 5])
@NODES
def test_a_bundles_probabilities_are_torchs_for_every_batch_size(
    run: Run, node: str, count: int
) -> None:
    images = pictures(32, count)
    found = (
        Predictor(bundle_format.read_bundle(run.exported[0].folder.with_name(node)))
        .run(images)
        .probabilities
    )
    assert np.abs(found - torch_probabilities(run.models[node], images)).max() < 1e-5


def test_each_bundle_holds_its_own_nodes_values(run: Run) -> None:
    images = pictures(32, 5)
    answers = [
        Predictor(bundle_format.read_bundle(written.folder)).run(images).probabilities
        for written in run.exported
    ]
    for number, one in enumerate(answers):
        assert all(np.abs(one - other).max() > 0.05 for other in answers[number + 1 :])


def test_the_difference_that_is_reported_is_small_and_said(run: Run) -> None:
    for written, line in zip(
        run.exported, [line for line in run.said if line.startswith("wrote")], strict=True
    ):
        assert 0 <= written.difference < 1e-5
        assert str(written.folder) in line
        assert f"{written.difference:.1e}" in line


@pytest.fixture(scope="module")
def of_all_methods(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A model of each method, at a node of the same name."""
    return export_all(
        [made(SMALL, name, name, 4) for name in ON_ANY_MODEL], tmp_path_factory.mktemp("methods")
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ON_ANY_MODEL)
def test_a_model_of_every_method_answers_as_torch_does(of_all_methods: Run, method: str) -> None:
    images = pictures(32, 5)
    predictor = Predictor(
        bundle_format.read_bundle(of_all_methods.exported[0].folder.with_name(method))
    )
    predictor.self_test()
    found = predictor.run(images).probabilities
    assert np.abs(found - torch_probabilities(of_all_methods.models[method], images)).max() < 1e-5
    assert np.ptp(found, axis=0).max() > 0.05  # it does not answer all images alike


@pytest.mark.slow
def test_there_is_one_trace_for_each_way_of_using_encoders(of_all_methods: Run) -> None:
    """One encoder, one whose features are normalised (gaussian), two fused (AFedCL),
    two joined (FENDA).
    """
    assert sum(line.startswith("tracing") for line in of_all_methods.said) == 4


# What the line sees besides


def asked(
    predictor: Predictor, model: PersonalModel, images: np.ndarray
) -> tuple[Outputs, dict[str, np.ndarray]]:
    """All outputs, and what torch says: features and logits of the whole,
    and of each encoder with its own weights.
    """
    metadata, tensors = model.metadata, model.tensors
    mean, std = torch.tensor(metadata.preprocessing.mean), torch.tensor(metadata.preprocessing.std)
    pixels = ((torch.from_numpy(images).float() / 255 - mean) / std).permute(0, 3, 1, 2)
    network = Network(metadata.model, len(metadata.classes))
    with torch.no_grad():
        told = {
            "features": network.features(tensors, pixels),
            "logits": network.predict(tensors, pixels),
        }
        for name in predictor.manifest.encoders:
            told[name] = network.encode(tensors, pixels, prefix={"own": "encoder"}.get(name, name))
    return predictor.run(images, ("opinions", "features", "maps")), {
        name: each.numpy() for name, each in told.items()
    }


def served(run: Run, node: str) -> Predictor:
    return Predictor(bundle_format.read_bundle(run.exported[0].folder.with_name(node)))


@pytest.mark.slow
@pytest.mark.parametrize("method", ON_ANY_MODEL)
def test_the_maps_of_all_encoders_averaged_over_space_and_the_bias_are_the_logits(
    of_all_methods: Run, method: str
) -> None:
    model, images = of_all_methods.models[method], pictures(32, 5)
    found, told = asked(served(of_all_methods, method), model, images)
    assert found.maps is not None
    assert found.maps.shape == (5, len(served(of_all_methods, method).manifest.encoders), 3, 2, 2)
    logits = found.maps.mean((3, 4)).sum(1) + model.tensors["classifier.bias"].numpy()
    assert np.abs(logits - told["logits"]).max() < 1e-4
    assert np.ptp(found.maps, axis=(3, 4)).min() > 1e-3  # it does matter where one looks


@pytest.mark.slow
@pytest.mark.parametrize("method", ON_ANY_MODEL)
def test_features_and_each_encoders_opinion_are_torchs(of_all_methods: Run, method: str) -> None:
    model, images = of_all_methods.models[method], pictures(32, 5)
    predictor = served(of_all_methods, method)
    found, told = asked(predictor, model, images)
    assert found.features is not None
    assert found.opinions is not None
    assert np.abs(found.features - told["features"]).max() < 1e-4
    encoders = predictor.manifest.encoders
    heads = dict.fromkeys(encoders, model.tensors["classifier.weight"])
    if method == "fenda":
        heads = dict(zip(encoders, model.tensors["classifier.weight"].chunk(2, 1), strict=True))
    for place, name in enumerate(encoders):
        taken = told[name] if len(encoders) > 1 else told["features"]  # these may be normalised
        logits = torch.from_numpy(taken) @ heads[name].T + model.tensors["classifier.bias"]
        assert np.abs(found.opinions[:, place] - torch.softmax(logits, 1).numpy()).max() < 1e-5
    if encoders == ("own",):
        assert np.allclose(found.opinions[:, 0], found.probabilities, atol=1e-6)


@pytest.mark.slow
def test_encoders_are_named_in_the_order_of_their_opinions(of_all_methods: Run) -> None:
    encoders = {method: served(of_all_methods, method).manifest.encoders for method in ON_ANY_MODEL}
    assert {method for method in ON_ANY_MODEL if len(encoders[method]) == 2} == {"afedcl", "fenda"}
    assert encoders["afedcl"] == encoders["fenda"] == ("received", "own")
    assert encoders["fedavg"] == ("own",)


# Mixed with what the node has trained alone


MIXED = {
    "fedavg": ("own", "alone"),
    "afedcl": ("received", "own", "alone"),
    "normalised": ("own", "alone"),
}


def mixed(method: str, request: Request = SMALL) -> PersonalModel:
    """The mean of a method's model and one that was trained alone,
    for a node that was taught two of three classes.

    `normalised`: the features of the one that was trained with others are.
    """
    if method == "normalised":
        together = normalised(made(request, method, "fedavg", 4), 7.5)
    else:
        together = made(request, method, method, 4)
    alone = made(request, method, "local", 5)
    return together._replace(tensors=mix(together.tensors, alone.tensors, [0, 2], 0.5))


@pytest.fixture(scope="module")
def of_mixed_models(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return export_all([mixed(method) for method in MIXED], tmp_path_factory.mktemp("mixed"))


@pytest.mark.slow
@pytest.mark.parametrize("method", MIXED)
def test_a_mix_with_training_alone_is_served_as_one_model_whose_maps_are_its_logits(
    of_mixed_models: Run, method: str
) -> None:
    model, images, predictor = (
        of_mixed_models.models[method],
        pictures(32, 5),
        served(of_mixed_models, method),
    )
    predictor.self_test()
    assert predictor.manifest.encoders == MIXED[method]
    found, told = asked(predictor, model, images)
    assert np.abs(found.probabilities - torch_probabilities(model, images)).max() < 1e-5
    assert found.maps is not None
    logits = found.maps.mean((3, 4)).sum(1) + model.tensors["classifier.bias"].numpy()
    assert np.abs(logits - told["logits"]).max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoder", "weights"), [("mobilenet_v2", "surface"), ("efficientnet_lite0_mid", "imagenet")]
)
@pytest.mark.parametrize("method", MIXED)
def test_batch_normalisation_is_folded_into_the_encoders_of_a_mixed_model(
    method: str, encoder: str, weights: str
) -> None:
    model = mixed(method, Request(model=encoder, weights=weights, size=64, rounds=4))
    metadata = model.metadata
    architecture = Architecture(encoder, 3, infer_fusion(model.tensors), metadata.preprocessing)
    images = pictures(64, 3)
    with torch.no_grad():
        found, _, features, maps = build_module(architecture, model.tensors, Path("model"))(
            torch.from_numpy(images)
        )
    assert np.abs(found.numpy() - torch_probabilities(model, images)).max() < 1e-4
    logits = features @ model.tensors["classifier.weight"].T
    assert torch.allclose(
        maps.mean((3, 4)).sum(1), logits, rtol=1e-4, atol=1e-4 * float(logits.abs().max())
    )


@pytest.mark.slow
def test_where_features_are_normalised_an_encoders_opinion_is_the_classifiers_on_them(
    of_mixed_models: Run,
) -> None:
    model, images, predictor = (
        of_mixed_models.models["normalised"],
        pictures(32, 5),
        served(of_mixed_models, "normalised"),
    )
    found, told = asked(predictor, model, images)
    assert found.features is not None
    assert found.opinions is not None
    own, alone = (torch.from_numpy(told[name]) for name in ("own", "alone"))
    taken = [7.5 * torch.nn.functional.normalize(own), alone]
    assert np.abs(found.features - torch.cat(taken, 1).numpy()).max() < 1e-4
    for place, head in enumerate(model.tensors["classifier.weight"].chunk(2, 1)):
        logits = taken[place] @ head.T + model.tensors["classifier.bias"]
        assert np.abs(found.opinions[:, place] - torch.softmax(logits, 1).numpy()).max() < 1e-5


@pytest.mark.slow
def test_in_int8_normalisation_stays_exact_and_maps_still_add_up_to_the_logits(
    of_mixed_models: Run,
) -> None:
    model, images = of_mixed_models.models["normalised"], pictures(32, 24)
    exact = (of_mixed_models.exported[0].folder.with_name("normalised") / "model.onnx").read_bytes()
    faster = quantise(exact, images[:16])
    before, after = (
        dict(zip(OUTPUTS, open_session(graph).run(OUTPUTS, {"image": images[16:]}), strict=True))
        for graph in (exact, faster)
    )
    for name in OUTPUTS:
        assert 0 < np.abs(before[name] - after[name]).mean() < 0.02 * np.ptp(before[name])
    lengths = np.linalg.norm(after["features"][:, : after["features"].shape[1] // 2], axis=1)
    assert np.abs(lengths - 7.5).max() < 1e-4
    logits = after["features"] @ model.tensors["classifier.weight"].numpy().T
    assert np.abs(after["maps"].mean((3, 4)).sum(1) - logits).max() < 1e-4


def test_a_temperature_divides_the_logits_and_changes_nothing_else(tmp_path: Path) -> None:
    # A head of sums takes features of length 1, which equals the temperature before calibration.
    model = made(SMALL, "plant-1", "gaussian", 1)
    assert float(model.tensors[LENGTH]) == 1
    written = export_all([model], tmp_path).exported[0].folder
    exact = (written / "model.onnx").read_bytes()
    images = pictures(32, 5)
    before, after = (
        dict(zip(OUTPUTS, open_session(graph).run(OUTPUTS, {"image": images}), strict=True))
        for graph in (exact, set_temperature(exact, 0.5))
    )
    for name in ("features", "maps"):
        np.testing.assert_array_equal(before[name], after[name])
    for name in ("probabilities", "opinions"):
        sharper = before[name] ** 2
        sharper /= sharper.sum(-1, keepdims=True)
        np.testing.assert_allclose(after[name], sharper, atol=1e-5)


# What is refused


def says_nothing(event: progress.AnyEvent) -> None:
    raise AssertionError(f"nothing may be traced or written: {event}")


def corrupted(folder: Path) -> bytes:
    """The bundle's graph with one value of the classifier changed."""
    graph = onnx.load(folder / "model.onnx")
    (bias,) = [tensor for tensor in graph.graph.initializer if tensor.name == "classifier.bias"]
    values = numpy_helper.to_array(bias).copy()
    values[0] += 0.01
    bias.CopyFrom(numpy_helper.from_array(values, bias.name))
    content: bytes = graph.SerializeToString()
    return content


def test_a_graph_with_one_wrong_value_is_not_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = corrupted(run.exported[0].folder)
    # would take seconds, and is not needed
    monkeypatch.setattr(exporting, "trace", lambda module, size: None)
    monkeypatch.setattr(exporting, "fill_values", lambda graph, module: wrong)
    source = run.sources["plant-1"]
    with pytest.raises(ParityError, match="torch") as caught:
        export([source], tmp_path / "bundles", progress.ignore)
    assert str(source) in caught.value.what
    assert caught.value.remedy
    assert not (tmp_path / "bundles").exists()


def test_a_folder_without_a_personal_model_is_named_before_anything_is_traced(
    run: Run, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="personal model") as caught:
        export([run.sources["plant-1"], tmp_path / "elsewhere"], tmp_path / "bundles", says_nothing)
    assert str(tmp_path / "elsewhere") in caught.value.what
    assert "edge-node join" in caught.value.remedy


def test_two_models_of_one_node_are_refused_before_anything_is_traced(
    run: Run, tmp_path: Path
) -> None:
    source = run.sources["plant-1"]
    with pytest.raises(UsageError, match=r"2 .*plant-1") as caught:
        export([source, run.sources["plant-2"], source], tmp_path / "bundles", says_nothing)
    assert "different folders" in caught.value.remedy


@pytest.mark.parametrize("damage", ["a tensor missing", "another shape"])
def test_tensors_that_are_not_the_models_are_refused_before_anything_is_traced(
    run: Run, tmp_path: Path, damage: str
) -> None:
    metadata, tensors, *_ = run.models["plant-3"]
    tensors = {name: value for name, value in tensors.items() if name != "classifier.bias"}
    if damage == "another shape":
        tensors["classifier.bias"] = torch.zeros(4)
    personal_model.save(PersonalModel(metadata, tensors), tmp_path / "model")
    with pytest.raises(UsageError, match="tensors of small") as caught:
        export([tmp_path / "model"], tmp_path / "bundles", says_nothing)
    assert str(tmp_path / "model") in caught.value.what


def test_a_model_whose_training_diverged_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata, tensors, *_ = run.models["plant-3"]
    personal_model.save(
        PersonalModel(metadata, {**tensors, "classifier.bias": torch.full((3,), torch.nan)}),
        tmp_path / "model",
    )
    # would take seconds, and is not needed
    monkeypatch.setattr(exporting, "trace", lambda module, size: None)
    monkeypatch.setattr(exporting, "fill_values", lambda graph, module: b"")
    with pytest.raises(UsageError, match="has diverged") as caught:
        export([tmp_path / "model"], tmp_path / "bundles", progress.ignore)
    assert "learning_rate" in caught.value.remedy
    assert not (tmp_path / "bundles").exists()


# Signed


def test_a_model_that_was_exported_with_a_kit_is_served_where_its_node_is_trusted(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signers = FederationKeys("steel")
    model = signed_fields(
        signers, run.models["plant-1"], record=RecordHead(entries=3, digest="e" * 64)
    )
    judged = [
        HeldOutPrediction(
            path="/gone/secret.png", digest="0" * 64, label=label, verdict="crazing", confidence=0.9
        )
        for label in ("crazing", "crazing", "patches")
    ]
    personal_model.save(model._replace(predictions=tuple(judged)), tmp_path / "model")
    graph = (run.exported[0].folder / "model.onnx").read_bytes()
    # takes seconds, and was done for `run`
    monkeypatch.setattr(exporting, "trace", lambda module, size: None)
    monkeypatch.setattr(exporting, "fill_values", lambda _, module: graph)
    said: list[progress.AnyEvent] = []
    export(
        [tmp_path / "model"], tmp_path / "bundles", said.append, Signer(signers.kit("plant-a"), 9)
    )
    verifier = Verifier(signers.trust(), tmp_path / "memory")
    predictor, ends, _ = load_model(tmp_path / "bundles" / "plant-a", verifier)
    assert predictor.manifest.broadcast == model.metadata.broadcast
    assert predictor.manifest.metrics == METRICS
    made = predictor.manifest.provenance
    assert made is not None
    assert made.record == RecordHead(entries=3, digest="e" * 64)
    assert made.tested == {"crazing": (2, 2), "patches": (0, 1)}
    for name in (
        "rounds",
        "options",
        "training",
        "preprocessing",
        "nodes",
        "quorum",
        "aggregation",
        "software",
    ):
        assert getattr(made, name) == getattr(model.metadata, name) != 0
    assert b"secret" not in (tmp_path / "bundles" / "plant-a" / bundle_format.MANIFEST).read_bytes()
    assert round((ends["bundle"] - datetime.now(UTC)).total_seconds() / 3600) == 9 * 24

    assert not any(isinstance(event, progress.Note) and "signed" in event.text for event in said)
    export([tmp_path / "model"], tmp_path / "unsigned", said.append)
    [note] = [
        event for event in said if isinstance(event, progress.Note) and "signed" in event.text
    ]
    assert "plant-a will not be signed" in note.text


def test_only_a_nodes_own_kit_signs_its_model_and_only_from_what_its_coordinator_signed() -> None:
    signers, others = FederationKeys("steel"), FederationKeys("steel")
    fused, plain = (made(SMALL, "plant-a", method, 1) for method in ("afedcl", "fedavg"))
    own = Signer(signers.kit("plant-a"), 9)
    for good in (
        signed_fields(signers, fused),
        signed_fields(signers, plain),
        signed_fields(signers, plain, round=9),
        signed_fields(signers, mixed("afedcl")),
        # which its node has trained further
        signed_fields(signers, mixed("fenda"), digest="e" * 64),
    ):
        own.check(good.metadata, good.tensors, Path("model"))
    unsigned = plain._replace(
        metadata=msgspec.structs.replace(signed_fields(signers, plain).metadata, broadcast=None)
    )
    for signer, model, reason in (
        (
            Signer(signers.kit("plant-b"), 9),
            signed_fields(signers, plain),
            "the kit of plant-b in 'steel'",
        ),
        (
            Signer(signers.kit("coordinator"), 9),
            signed_fields(signers, plain),
            "the kit of coordinator in 'steel'",
        ),
        (
            Signer(FederationKeys("copper").kit("plant-a"), 9),
            signed_fields(signers, plain),
            "the kit of plant-a in 'copper'",
        ),
        (own, unsigned, "its coordinator has signed none"),
        (own, signed_fields(others, plain), "its signature does not fit"),
        (own, signed_fields(signers, plain, run="cd" * 8), "that is of another run"),
        (own, signed_fields(signers, plain, round=3), "that is of round 3, the model of round 4"),
        (
            own,
            signed_fields(signers, fused, digest="e" * 64),
            "its received encoder is another one",
        ),
        (
            own,
            signed_fields(signers, mixed("afedcl"), digest="e" * 64),
            "its received encoder is another one",
        ),
    ):
        with pytest.raises(UsageError, match=reason) as caught:
            signer.check(model.metadata, model.tensors, Path("model"))
        assert caught.value.remedy


# The model that plants use


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["efficientnet_lite0", "efficientnet_lite0_mid"])
def test_efficientnets_uneven_padding_is_part_of_its_convolutions_in_fp32_and_in_int8(
    encoder: str,
) -> None:
    """At 40 pixels strides meet even and odd maps: 40, 20, 10, 5, 3."""
    size = 40
    model = made(
        Request(model=encoder, weights="imagenet", size=size, rounds=4), "plant-1", "fedavg", 1
    )
    architecture = Architecture(
        encoder, 3, infer_fusion(model.tensors), model.metadata.preprocessing
    )
    module, images = build_module(architecture, model.tensors, Path("model")), pictures(size, 32)
    graph = fill_values(trace(module, size), module)
    exact, faster = (
        dict(zip(OUTPUTS, open_session(each).run(OUTPUTS, {"image": images}), strict=True))
        for each in (graph, quantise(graph, pictures(size, 8)))
    )
    assert "Pad" not in {node.op_type for node in onnx.load_from_string(graph).graph.node}
    assert np.abs(exact["probabilities"] - torch_probabilities(model, images)).max() < 1e-5
    logits = exact["maps"].mean((3, 4)).sum(1) + model.tensors["classifier.bias"].numpy()
    assert (
        np.abs(torch.softmax(torch.from_numpy(logits), 1).numpy() - exact["probabilities"]).max()
        < 1e-4
    )
    for name in OUTPUTS:
        assert 0 < np.abs(exact[name] - faster[name]).mean() < 0.05 * np.ptp(exact[name])


@pytest.mark.slow
def test_two_fused_mobilenets_share_one_trace_and_compute_what_torch_computes(
    tmp_path: Path,
) -> None:
    # Drawn weights would give features that hardly depend on the image: rounding would decide.
    request = Request(model="mobilenet_v2", weights="surface", size=64, rounds=4)
    run = export_all([made(request, f"plant-{seed}", "afedcl", seed) for seed in (1, 2)], tmp_path)
    assert [line.split()[0] for line in run.said] == ["tracing", "checking", "wrote", "wrote"]
    images = pictures(64, 3)
    answers = []
    for node, model in run.models.items():
        predictor = Predictor(bundle_format.read_bundle(tmp_path / "bundles" / node))
        predictor.self_test()
        answers.append(predictor.run(images).probabilities)
        assert np.abs(answers[-1] - torch_probabilities(model, images)).max() < 1e-5
    assert np.abs(answers[0] - answers[1]).max() > 0.05
