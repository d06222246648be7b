"""Texture networks go to the line: one graph, a stem once, no bank,
and maps that add up to what the model says.
"""

import io
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
import torch
from PIL import Image

from broker_config.protocol.errors import UsageError
from edge.bundle import bundle_format as bundle
from edge.bundle.verification import Verifier
from edge.inference.predictor import Predictor
from edge.inference.served_model import load_model
from export import bundle_export as exporting
from export.bundle_export import Optimisations, export
from export.bundle_signing import Signer
from export.encoder_selection import drop_encoder
from export.graph import OUTPUTS, Architecture, build_module
from export.parity import open_session
from export.replacement_check import Comparison, compare_bundles
from research.pretraining.texture_patterns import texture
from tests.support.daemon_process import BLOCK_TORCH, daemon
from tests.support.federation_keys import FederationKeys
from tests.support.int8_kernels import answers
from tests.support.personal_models import graph_of, made, signed_fields, torch_probabilities
from trainer import progress
from trainer.data import class_folders
from trainer.data.class_folders import Images, LabelledImages
from trainer.data.drawn_surfaces import draw_photographs, draw_style
from trainer.data.partition import Scheme
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate
from trainer.models import backbones
from trainer.models.catalogue import FEATURES
from trainer.models.fusion import LENGTH, NORMALISED, infer_fusion
from trainer.models.network import Network
from trainer.seeding import generator
from trainer.training import personal_model
from trainer.training.personal_model import PersonalModel

pytestmark = pytest.mark.slow

KINDS, SIZE = ("linen", "satin", "twill"), 64
TRAINING = {"augment": False, "local_epochs": 1}
SMALL = [name for name in FEATURES if name.endswith("_small")]
WITH_MAPS = ["fedtfi_small", "tel_small", "musten_small", "maps_small", "resnet_small"]


def weave(count: int, key: int) -> np.ndarray:
    """Images uint8 [3 * count, 64, 64] of three drawn textures, one after another."""
    look, random = draw_style(0, key), generator(key, "textures")
    return np.concatenate(
        [
            draw_photographs(random, look, count, SIZE, texture(9, kind))
            for kind in range(len(KINDS))
        ]
    )


class Run(NamedTuple):
    """A federation's model, its signed bundle, and what decided between floating point and int8."""

    model: PersonalModel
    bundle: Path
    signers: FederationKeys
    compared: list[tuple[bytes, bytes, LabelledImages, Comparison]]
    said: list[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two plants train `fedtfi_small` with FedTFI; the first one's model becomes a bundle."""
    folder = tmp_path_factory.mktemp("textures")
    for number, pixels in enumerate(weave(20, 1)):
        path = folder / "images" / KINDS[number // 20] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    request = Request(
        method="fedtfi", model="fedtfi_small", weights="none", rounds=2, training=TRAINING
    )
    scheme = Scheme("iid", 2, 15, seed=1, pool="all", test_samples=15)
    catalogue = class_folders.scan(folder / "images")
    spec, broadcast = draft(request, federation="simulation", classes=catalogue.classes, nodes=2)
    images = {
        share.node: Images(
            *(class_folders.load(part, spec.classes, SIZE) for part in (share.train, share.test))
        )
        for share in scheme.shares(catalogue)
    }
    signers = FederationKeys("simulation")
    model = signed_fields(signers, simulate(spec, broadcast, images).models["plant-1"])
    personal_model.save(model, folder / "model")
    compared, said = [], []

    def comparing(exact: Path, faster: Path, held_out: LabelledImages) -> Comparison:
        found = compare_bundles(exact, faster, held_out)
        compared.append((graph_of(exact), graph_of(faster), held_out, found))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "compare_bundles", comparing)
        signer = Signer(signers.kit("plant-a"), 9)
        export(
            [folder / "model"],
            folder,
            lambda event: said.append(progress.format_event(event)),
            signer,
            Optimisations(int8=True),
        )
    return Run(model, folder / "plant-a", signers, compared, said)


def test_the_graph_computes_what_torch_does_for_any_batch(run: Run) -> None:
    exact = open_session(run.compared[0][0])
    for count in (1, 2, 5):
        images = np.repeat(weave(2, count)[:count, ..., None], 3, 3)
        probabilities, opinions, features, maps = exact.run(OUTPUTS, {"image": images})
        assert np.abs(probabilities - torch_probabilities(run.model, images)).max() < 1e-5
        assert np.allclose(opinions[:, 0], probabilities, atol=1e-6)
        weight, bias = (
            run.model.tensors[f"classifier.{name}"].numpy() for name in ("weight", "bias")
        )
        logits = features @ weight.T + bias
        assert maps.shape == (count, 1, len(KINDS), 8, 8)
        assert np.allclose(maps[:, 0].mean((2, 3)) + bias, logits, atol=1e-4)
        assert maps.std((3, 4)).min() > 0


def test_a_bundle_holds_the_stem_once_and_nothing_of_the_bank(run: Run) -> None:
    graph = onnx.load_from_string(run.compared[0][0]).graph
    values = {value.name: onnx.numpy_helper.to_array(value) for value in graph.initializer}
    stem = run.model.tensors["encoder.stem.conv2_2.weight"].numpy()
    assert sum(np.array_equal(value, stem) for value in values.values()) == 1
    assert sum(value.size for value in values.values()) < 1.1 * sum(
        value.numel() for value in run.model.tensors.values()
    )
    assert not [name for name in (*values, *run.model.tensors) if "bank" in name]
    manifest = bundle.read_bundle(run.bundle).manifest
    assert (manifest.method, manifest.model, manifest.input.size) == (
        "fedtfi",
        "fedtfi_small",
        SIZE,
    )
    assert manifest.extras == OUTPUTS[1:]


def test_the_gate_decides_between_int8_and_floating_point(run: Run) -> None:
    [(exact, faster, held_out, found)] = run.compared
    served = bundle.read_bundle(run.bundle).manifest
    assert served.precision == ("int8" if found.passed else "fp32")
    assert found.images == len(held_out.labels) == 15
    assert served.confidence
    assert any(
        f"the bundle of plant-a {'is int8' if found.passed else 'stays fp32'}" in line
        for line in run.said
    )
    for name in OUTPUTS:
        one, other = (
            open_session(graph).run([name], {"image": held_out.images})[0]
            for graph in (exact, faster)
        )
        assert 0 < np.abs(one - other).mean() < 0.02 * np.ptp(one)


def test_int8_takes_large_products_of_weights_and_leaves_norms_softmax_and_codebooks(
    run: Run,
) -> None:
    graph = onnx.load_from_string(run.compared[0][1]).graph
    rounded = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    of_integers = Counter(node.op_type for node in graph.node if rounded.issuperset(node.input[:2]))
    exact = {node.op_type for node in graph.node if not rounded.intersection(node.input)}
    assert of_integers["Conv"] == 6
    assert of_integers["MatMul"] == 9  # the embedding, and four in each of two blocks
    # the hidden layer, whose weights the maps of evidence read, too
    assert of_integers["Gemm"] == 1
    assert {
        "MatMul",
        "Gemm",
        "Add",
        "LayerNormalization",
        "Softmax",
        "Gelu",
        "Sqrt",
        "Tanh",
    } <= exact
    assert not {"Add", "LayerNormalization", "Softmax", "Gelu", "Sqrt", "Tanh"} & set(of_integers)


def test_int8_loads_on_processors_with_and_without_instructions_for_it(run: Run) -> None:
    [(_, faster, held_out, _)] = run.compared
    with_vnni, without = answers(faster, held_out.images)
    assert with_vnni.shape == without.shape == (len(held_out.labels), len(KINDS))


def test_the_daemon_serves_it_without_torch_signed_as_any_other(run: Run) -> None:
    verifier = Verifier(run.signers.trust(), run.bundle.parent / "memory")
    assert load_model(run.bundle, verifier).manifest.id == f"plant-a@{run.model.metadata.round}"
    pixels = weave(1, 4)[1]
    photo = io.BytesIO()
    Image.fromarray(pixels).save(photo, "PNG")
    image = np.repeat(pixels[None, ..., None], 3, 3)
    [probabilities] = Predictor(bundle.read_bundle(run.bundle)).run(image).probabilities
    with daemon(run.bundle, BLOCK_TORCH) as line:
        answer = line.classify(photo.getvalue()).json()
        assert answer["label"] == sorted(KINDS)[probabilities.argmax()]
        assert answer["confidence"] == pytest.approx(probabilities.max(), abs=1e-4)
        seen = line.client.post("/classify", params={"annotate": "heat"}, content=photo.getvalue())
        assert Image.open(io.BytesIO(seen.content)).format == "JPEG"


# Every texture network, before it is traced


@pytest.mark.parametrize("model", SMALL)
def test_what_places_add_is_what_the_head_makes_of_the_features(model: str) -> None:
    torch.manual_seed(len(model))
    encoder = backbones.build(model).eval()
    for parameter in encoder.parameters():  # norms and biases such as training leaves
        parameter.data += 0.1 * torch.randn_like(parameter)
    seen = encoder.get_submodule("stem")(torch.randn(3, 3, SIZE, SIZE))
    head = torch.randn(4, FEATURES[model])
    with torch.no_grad():
        features, adds = encoder.explain(seen)
        expected = encoder.without_stem()(seen)
        assert torch.allclose(
            features, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())
        )
        assert (adds is not None) == (model in WITH_MAPS)
        if adds:
            logits = features @ head.T
            assert torch.allclose(
                adds(head).mean((2, 3)), logits, rtol=1e-3, atol=1e-4 * float(logits.abs().max())
            )
            fusion, length = NORMALISED, {LENGTH: torch.tensor(5.0)}
            [each] = fusion.heads(head, [features], length)  # another head for each image
            logits = fusion.fuse([features], length) @ head.T
            assert torch.allclose(
                adds(each).mean((2, 3)), logits, rtol=1e-3, atol=1e-4 * float(logits.abs().max())
            )


@pytest.mark.parametrize("method", ["afedcl", "fenda"])
def test_two_encoders_have_one_stem_and_look_through_it_once(method: str) -> None:
    model = made(Request(model="tel_small", weights="none"), "plant-a", method, 3)
    preprocessing = model.metadata.preprocessing
    architecture = Architecture("tel_small", 3, infer_fusion(model.tensors), preprocessing)
    served: Any = build_module(architecture, model.tensors, Path("model"))
    assert not [name for name in served.state_dict() if name.startswith("received.stem")]
    looks: list[int] = []
    served.encoder.stem.register_forward_hook(lambda *_: looks.append(1))
    images = np.repeat(weave(1, 5)[..., None], 3, 3)
    with torch.no_grad():
        probabilities, _, features, maps = served(torch.from_numpy(images))
    assert looks == [1]
    assert np.abs(probabilities.numpy() - torch_probabilities(model, images)).max() < 1e-5
    logits = features @ model.tensors["classifier.weight"].T
    assert torch.allclose(maps.mean((3, 4)).sum(1), logits, rtol=1e-3, atol=1e-4)


def test_one_encoder_that_stands_for_two_keeps_their_stem() -> None:
    model = made(Request(model="tel_small", weights="none"), "plant-a", "afedcl", 3)
    tensors = {**model.tensors, "fusion": torch.tensor(0.99)}
    images = np.repeat(weave(2, 6)[..., None], 3, 3)
    held_out = LabelledImages(images, np.zeros(6, np.int64), ("",) * 6, (Path(),) * 6)
    leaner = drop_encoder(model.metadata, tensors, held_out)
    assert leaner
    assert leaner.kept == "received"
    assert {name for name in leaner.tensors if name.startswith("encoder.")} == Network(
        "tel_small", 3
    ).shapes.keys()
    assert torch.equal(
        leaner.tensors["encoder.stem.conv1_1.weight"], tensors["encoder.stem.conv1_1.weight"]
    )
    assert torch.equal(
        leaner.tensors["encoder.tel.embed.weight"], tensors["received.tel.embed.weight"]
    )


@pytest.mark.parametrize("method", ["afedcl", "fenda"])
def test_two_encoders_are_signed_if_the_received_one_came_so_or_was_trained_further(
    method: str,
) -> None:
    signers = FederationKeys("steel")
    model = signed_fields(
        signers, made(Request(model="tel_small", weights="none"), "plant-a", method, 3)
    )
    sign = Signer(signers.kit("plant-a"), 9).check
    sign(model.metadata, model.tensors, Path("model"))
    moved = {**model.tensors, "received.tel.norm.bias": model.tensors["received.tel.norm.bias"] + 1}
    if method == "fenda":
        sign(model.metadata, moved, Path("model"))
    else:
        with pytest.raises(UsageError, match="received encoder"):
            sign(model.metadata, moved, Path("model"))
