"""A predictor computes what the graph says, and refuses what does not compute as promised."""

import msgspec
import numpy as np
import pytest

from edge.bundle import bundle_format
from edge.bundle.bundle_format import Bundle, BundleError
from edge.bundle.reference import Reference
from edge.inference.predictor import Predictor
from tests.support.tiny_bundle import CLASSES, tiny_bundle, tiny_onnx, tiny_probabilities

IMAGES = np.random.default_rng(1).integers(0, 256, (5, 16, 16, 3), np.uint8)


@pytest.fixture
def tiny(tmp_path):
    return tiny_bundle(tmp_path / "bundle")


def rewritten(tiny: Bundle, onnx: bytes, **changes: object) -> Bundle:
    """The bundle with another graph or description,
    and the golden image and probabilities that it had.
    """
    golden = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    bundle_format.write_bundle(
        tiny.folder,
        msgspec.structs.replace(tiny.manifest, **changes),
        onnx,
        golden,
        tiny.manifest.golden.probabilities,
    )
    return bundle_format.read_bundle(tiny.folder)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_probabilities_are_the_graphs_for_every_batch_size(tiny, count):
    found = Predictor(tiny).run(IMAGES[:count]).probabilities
    assert found.dtype == np.float32
    assert np.allclose(found, tiny_probabilities(IMAGES[:count]), atol=1e-6)


def test_the_label_is_the_likeliest_class(tiny):
    pure = np.zeros((3, 16, 16, 3), np.uint8)
    for channel in range(3):
        pure[channel, :, :, channel] = 255
    assert Predictor(tiny).labels(pure) == list(CLASSES)


@pytest.mark.parametrize(
    "images",
    [IMAGES[0], IMAGES[:, :8], IMAGES.astype(np.float32)],
    ids=["no batch", "another size", "floats"],
)
def test_other_arrays_are_refused_with_what_was_expected(tiny, images):
    with pytest.raises(ValueError, match=r"uint8 \[N, 16, 16, 3\]"):
        Predictor(tiny).run(images)


def test_the_self_test_passes_on_what_was_exported(tiny):
    Predictor(tiny).self_test()


def test_the_self_test_finds_a_graph_that_computes_something_else(tiny):
    other = tiny_onnx(16).replace(np.float32(10 / 255).tobytes(), np.float32(11 / 255).tobytes())
    with pytest.raises(BundleError, match="self-test"):
        Predictor(rewritten(tiny, other)).self_test()


@pytest.mark.parametrize(
    "changes", [{"output": "scores"}, {"input": bundle_format.Input(size=16, name="picture")}]
)
def test_the_self_test_finds_a_graph_with_other_names_than_the_manifest(tiny, changes):
    with pytest.raises(BundleError, match="does not compute"):
        Predictor(rewritten(tiny, tiny_onnx(16), **changes)).self_test()


def reference(features: int) -> bytes:
    """Of a model that has so many features."""
    random = np.random.default_rng(2)
    return Reference.from_features(
        random.normal(size=(60, features)).astype("f4"), np.arange(60) % 3, 3
    ).encode()


def test_the_self_test_finds_a_reference_of_another_graph(tmp_path):
    Predictor(tiny_bundle(tmp_path / "right", extras=True, reference=reference(3))).self_test()
    other = Predictor(tiny_bundle(tmp_path / "other", extras=True, reference=reference(5)))
    with pytest.raises(BundleError, match=r"features \[1, 3\].*\[1, 5\]"):
        other.self_test()


def test_the_self_test_finds_extras_that_the_graph_lacks_or_gives_in_other_shapes(tiny):
    with pytest.raises(BundleError, match="does not compute"):
        Predictor(rewritten(tiny, tiny_onnx(16), extras=("features",))).self_test()
    with pytest.raises(BundleError, match=r"opinions \[1, 2, 3\].*\[1, 1, 3\]"):
        Predictor(
            rewritten(tiny, tiny_onnx(16, True), extras=("opinions",), encoders=("own",))
        ).self_test()


def test_a_file_that_is_no_graph_is_refused_when_loaded(tiny):
    with pytest.raises(BundleError, match=r"model\.onnx"):
        Predictor(rewritten(tiny, b"not a graph"))


@pytest.mark.parametrize("count", [1, 3])
def test_extras_are_given_only_to_those_who_ask(tmp_path, count):
    predictor = Predictor(tiny_bundle(tmp_path / "bundle", extras=True))
    images = IMAGES[:count]
    assert predictor.run(images)[1:] == (None, None, None)
    found = predictor.run(images, ("features", "opinions", "maps"))
    assert np.allclose(found.features, images.mean((1, 2)), atol=1e-3)
    halves = [tiny_probabilities(half) for half in np.split(images, 2, axis=2)]
    assert np.allclose(found.opinions, np.stack(halves, 1), atol=1e-5)
    assert np.allclose(found.maps.mean((1, 3, 4)), images.mean((1, 2)) * 10 / 255, atol=1e-5)


def test_a_bundle_without_extras_has_none_to_give(tiny):
    assert Predictor(tiny).run(IMAGES, ("features", "maps"))[1:] == (None, None, None)
