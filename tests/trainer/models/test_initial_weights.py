"""Initial encoders: drawn from a seed, downloaded,
or read from a file that is this model's and no program.
"""

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from broker_config.protocol.errors import UsageError
from tests.support import stem_encoder
from tests.support.paths import REPOSITORY
from trainer.models import backbones
from trainer.models.catalogue import FEATURES, KNOWN, SHIPPED
from trainer.models.initial_weights import (
    choose_weights,
    depends_on_seed,
    init_linear,
    initial_encoder,
)
from trainer.models.named_tensors import Arrays, is_frozen
from trainer.models.network import Network, to_tensors

MODELS = [name for name, encoder in KNOWN.items() if not encoder.beginning]
models = pytest.mark.parametrize("model", MODELS)


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(one[name], other[name]) for name in one
    )


def bare(encoder: Arrays) -> Arrays:
    """The tensors by their published names."""
    return {name.removeprefix("encoder."): array for name, array in encoder.items()}


# Backbones


@models
def test_a_backbones_feature_vector_is_as_wide_as_promised(model: str) -> None:
    network = Network(model, 3)
    tensors = to_tensors(initial_encoder(model, "none", 0))
    network.check(tensors, "a drawn encoder")
    with torch.no_grad():
        features = network.encode(tensors, network.apply_stem(tensors, torch.rand(2, 3, 64, 64)))
    assert features.shape == (2, FEATURES[model]) == (2, network.shape.features)
    assert features.isfinite().all()
    assert not torch.equal(features[0], features[1])


@pytest.mark.slow
def test_a_torchvision_that_brings_its_operators_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "models.py").touch()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "import torch\n"
        "library = torch.library.Library('torchvision', 'DEF')\n"
        "library.define('nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')\n"
    )
    code = (
        "from trainer.models.torchvision_import import torchvision_models; "
        "print(torchvision_models().__file__)"
    )
    path = os.pathsep.join((str(tmp_path), str(REPOSITORY)))
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == str(tmp_path / "torchvision" / "models.py")


@pytest.mark.slow
@models
def test_a_drawn_encoder_follows_from_its_seed_alone(model: str) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one = initial_encoder(model, "none", 5)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert same(one, initial_encoder(model, "none", 5))
    assert not same(one, initial_encoder(model, "none", 6))


@models
def test_an_encoder_holds_float32_only_and_no_batch_counters(model: str) -> None:
    encoder = initial_encoder(model, "none", 0)
    assert {array.dtype for array in encoder.values()} == {np.dtype(np.float32)}
    assert all(name.startswith("encoder.") for name in encoder)
    assert not any("num_batches_tracked" in name for name in encoder)


def test_a_linear_layer_is_drawn_within_one_over_the_root_of_its_inputs() -> None:
    layer = init_linear("classifier", 16, 3, np.random.default_rng(0))
    shapes = {name: array.shape for name, array in layer.items()}
    assert shapes == {"classifier.weight": (3, 16), "classifier.bias": (3,)}
    assert all(array.dtype == np.float32 for array in layer.values())
    assert 0.2 < max(np.abs(array).max() for array in layer.values()) <= 0.25


# Files


@pytest.mark.parametrize(
    ("model", "head"),
    [("resnet18", "fc"), ("mobilenet_v2", "classifier.1"), ("efficientnet_lite0", "_fc")],
)
def test_a_file_with_published_names_is_read_without_its_classifier_and_batch_counters(
    model: str, head: str, tmp_path: Path
) -> None:
    drawn = initial_encoder(model, "none", 1)
    counters = {
        name.replace("running_mean", "num_batches_tracked"): np.array(7)
        for name in bare(drawn)
        if name.endswith("running_mean")
    }
    assert counters
    save_file(
        {
            **bare(drawn),
            **counters,
            f"{head}.weight": np.ones((5, FEATURES[model])),
            f"{head}.bias": np.ones(5),
        },
        tmp_path / "pretrained.safetensors",
    )
    assert same(initial_encoder(model, str(tmp_path / "pretrained.safetensors"), 0), drawn)


def test_of_an_earlier_federations_model_the_encoder_is_taken_without_heads_and_sums(
    tmp_path: Path,
) -> None:
    drawn = initial_encoder("small", "none", 1)
    heads = init_linear("classifier", 64, 3, np.random.default_rng(0))
    save_file(
        {**drawn, **heads, "statistics.sums": np.ones((3, 64), np.int64)},
        tmp_path / "global.safetensors",
    )
    assert same(initial_encoder("small", str(tmp_path / "global.safetensors"), 0), drawn)


def test_half_precision_weights_are_read_as_float32(tmp_path: Path) -> None:
    drawn = initial_encoder("small", "none", 1)
    save_file(
        {name: array.astype(np.float16) for name, array in bare(drawn).items()},
        tmp_path / "half.safetensors",
    )
    read = initial_encoder("small", str(tmp_path / "half.safetensors"), 0)
    assert {array.dtype for array in read.values()} == {np.dtype(np.float32)}
    assert all(np.allclose(read[name], drawn[name], atol=1e-3) for name in drawn)


def refused(model: str, weights: object) -> UsageError:
    with pytest.raises(UsageError) as caught:
        initial_encoder(model, str(weights), 0)
    assert caught.value.remedy
    return caught.value


def test_a_pickled_file_is_never_read_and_the_remedy_says_how_to_convert_it(tmp_path: Path) -> None:
    torch.save(
        {name: torch.from_numpy(a) for name, a in backbones.draw("small", 0).items()},
        tmp_path / "weights.pt",
    )
    error = refused("small", tmp_path / "weights.pt")
    assert "weights.pt is not a safetensors" in error.what
    assert "safetensors.torch.save_file" in error.remedy
    assert "never read" in error.remedy


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"\xff" * 100, (2).to_bytes(8, "little") + b"[]"]
)
def test_garbage_is_refused_by_its_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "garbage.safetensors").write_bytes(content)
    assert "garbage.safetensors is not" in refused("small", tmp_path / "garbage.safetensors").what


def test_weights_in_a_type_that_numpy_does_not_have_are_refused(tmp_path: Path) -> None:
    """In a process of its own, as on a coordinator: onnx teaches numpy bfloat16."""
    save_torch_file(
        {"features.0.weight": torch.zeros(3, dtype=torch.bfloat16)}, tmp_path / "brain.safetensors"
    )
    reading = (
        "import sys; from trainer.models import initial_weights as w; w.initial_encoder('small', "
        "sys.argv[1], 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", reading, tmp_path / "brain.safetensors"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "UsageError: " in done.stderr
    assert "(data type 'bfloat16'" in done.stderr
    assert "save them as float32" in done.stderr


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_weights_of_a_training_that_diverged_are_refused(value: float, tmp_path: Path) -> None:
    arrays = backbones.draw("small", 0)
    arrays["features.0.bias"][3] = value
    save_file(arrays, tmp_path / "diverged.safetensors")
    assert (
        "diverged.safetensors holds NaN" in refused("small", tmp_path / "diverged.safetensors").what
    )


@pytest.mark.parametrize("weights", ["missing.safetensors", "Imagenet", "."])
def test_a_file_that_is_not_there_is_named_with_what_else_there_is(
    weights: str, tmp_path: Path
) -> None:
    error = refused("small", tmp_path / weights)
    assert str(tmp_path / weights) in error.what
    assert "none, surface, imagenet or" in error.remedy


@models
def test_a_file_of_another_model_is_refused_at_once(model: str, tmp_path: Path) -> None:
    other = next(name for name in MODELS if name != model)
    save_file(bare(initial_encoder(other, "none", 0)), tmp_path / "other.safetensors")
    error = refused(model, tmp_path / "other.safetensors")
    assert "other.safetensors" in error.what
    assert model in error.what
    assert "another --model" in error.remedy


@pytest.mark.parametrize(
    "difference", ["another model", "a tensor missing", "a tensor too many", "another shape"]
)
def test_a_network_refuses_an_encoder_that_is_not_its_own_and_names_a_tensor(
    difference: str,
) -> None:
    tensors = to_tensors(initial_encoder("small", "none", 0))
    match difference:
        case "another model":
            tensors = to_tensors(initial_encoder("resnet18", "none", 0))
        case "a tensor missing":
            del tensors["encoder.features.3.bias"]
        case "a tensor too many":
            tensors["encoder.features.99.bias"] = torch.zeros(1)
        case "another shape":
            tensors["encoder.features.3.bias"] = torch.zeros(31)
    with pytest.raises(UsageError, match="the broadcast") as caught:
        Network("small", 3).check(tensors, "the broadcast")
    expected = {
        "another model": "encoder.bn1.bias is (64,), the model has no such tensor",
        "a tensor missing": "encoder.features.3.bias is missing, the model has (32,)",
        "a tensor too many": "encoder.features.99.bias is (1,), the model has no such tensor",
        "another shape": "encoder.features.3.bias is (31,), the model has (32,)",
    }
    assert expected[difference] in caught.value.what
    assert "another --model" in caught.value.remedy


# First layers from a file

STEM = {"first.weight": np.full((4, 3, 3, 3), 0.1), "first.bias": np.arange(4.0)}


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of an encoder's first layers, and more than is needed."""
    stem_encoder.register_stem_encoder(monkeypatch.setitem)
    save_file({**STEM, "second.bias": np.zeros(5)}, tmp_path / "published.safetensors")
    return tmp_path / "published.safetensors"


def test_an_encoder_that_begins_with_a_files_layers_is_drawn_from_there_on(begun: Path) -> None:
    one, again, other = (initial_encoder(stem_encoder.NAME, str(begun), seed) for seed in (5, 5, 6))
    assert same(one, again)
    for name in one:
        drawn_anew = not np.array_equal(one[name], other[name])
        assert drawn_anew is not is_frozen(name), name
    assert np.array_equal(one["encoder.stem.bias"], STEM["first.bias"].astype(np.float32))
    drawn = initial_encoder(stem_encoder.NAME, "none", 5)
    assert one.keys() == drawn.keys()
    assert np.array_equal(one["encoder.rest.weight"], drawn["encoder.rest.weight"])


def test_its_whole_encoder_from_a_file_is_taken_as_it_is(begun: Path) -> None:
    drawn = initial_encoder(stem_encoder.NAME, "none", 3)
    save_file(bare(drawn), begun)
    assert same(initial_encoder(stem_encoder.NAME, str(begun), 0), drawn)


@pytest.mark.parametrize("wrong", [{}, {"first.bias": np.zeros(5)}])
def test_a_file_without_these_layers_or_with_others_is_refused(wrong: Arrays, begun: Path) -> None:
    save_file({"first.weight": STEM["first.weight"], **wrong}, begun)
    error = refused(stem_encoder.NAME, begun)
    assert stem_encoder.NAME in error.what
    assert begun.name in error.what


@pytest.mark.usefixtures("begun")
def test_what_is_drawn_behind_first_layers_depends_on_the_seed_whatever_the_file() -> None:
    assert depends_on_seed(stem_encoder.NAME, "file.safetensors")
    assert depends_on_seed("small", "none")
    assert not depends_on_seed("small", "file.safetensors")


@pytest.mark.usefixtures("begun")
def test_training_runs_behind_the_stem_what_the_module_computes() -> None:
    network = Network(stem_encoder.NAME, 3)
    tensors = to_tensors(initial_encoder(stem_encoder.NAME, "none", 0))
    images = torch.rand(2, 3, stem_encoder.SIZE, stem_encoder.SIZE)
    module = backbones.build(stem_encoder.NAME)
    module.load_state_dict({name[8:]: value for name, value in tensors.items()})
    with torch.no_grad():
        seen = network.apply_stem(tensors, images)
        assert seen.shape == (2, 4, 8, 8)
        torch.testing.assert_close(network.encode(tensors, seen), module(images))
    assert network.has_stem


# Names and downloads


def test_an_unknown_model_is_answered_with_those_there_are() -> None:
    error = refused("mobilenet", "none")
    assert "mobilenet" in error.what
    assert all(model in error.remedy for model in FEATURES)


def test_a_model_without_imagenet_weights_says_which_have_some() -> None:
    error = refused("small", "imagenet")
    assert "'small'" in error.what
    named = error.remedy.removeprefix("take one of ").split(", ")
    assert {each for each in named if each in MODELS} == {*MODELS} - {"small"}


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No connection, and an empty folder as torch's cache."""
    # the discard port: connections are refused
    nobody = urllib.request.ProxyHandler({"https": "http://127.0.0.1:9"})
    urllib.request.install_opener(urllib.request.build_opener(nobody))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    yield tmp_path
    urllib.request.install_opener(None)  # the next request makes the default one anew


@pytest.mark.usefixtures("offline")
def test_imagenet_weights_without_a_connection_say_what_else_can_be_done() -> None:
    error = refused("mobilenet_v2", "imagenet")
    assert "https://download.pytorch.org/" in error.what
    assert "Connection refused" in error.what
    assert "--weights surface, none or a FILE.safetensors" in error.remedy
    assert "--model efficientnet_lite0" in error.remedy


@pytest.mark.usefixtures("offline", "begun")
def test_an_encoder_that_only_begins_with_weights_is_sent_to_none_that_it_does_not_have(
    tmp_path: Path,
) -> None:
    for weights in ("imagenet", "surface"):
        remedy = refused(stem_encoder.NAME, weights).remedy
        assert remedy.endswith("--weights none or a FILE.safetensors of a drawn stem")
    assert "surface" not in refused(stem_encoder.NAME, tmp_path / "missing.safetensors").remedy


@pytest.mark.usefixtures("offline")
def test_what_torch_says_of_a_download_is_not_on_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    refused("resnet18", "imagenet")
    said = capsys.readouterr()
    assert said.out == ""
    assert "Downloading" in said.err


@pytest.mark.usefixtures("offline")
def test_offline_the_weights_that_come_with_the_package_are_the_default() -> None:
    assert {model: choose_weights(model) for model in MODELS} == {
        **dict.fromkeys(MODELS, "imagenet"),
        "mobilenet_v2": "surface",
        "mobilenet_v2_mid": "surface",
        "small": "none",
    }


def test_imagenet_weights_in_the_cache_are_the_default_without_a_connection(offline: Path) -> None:
    (offline / "hub" / "checkpoints").mkdir(parents=True)
    (offline / "hub" / "checkpoints" / "mobilenet_v2-7ebf99e0.pth").touch()
    assert choose_weights("mobilenet_v2") == "imagenet"


def test_without_torch_the_weights_that_come_with_the_package_are_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert choose_weights("mobilenet_v2") == "surface"
    assert choose_weights("efficientnet_lite0") == "imagenet"


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("model", SHIPPED)
def test_the_weights_in_the_package_are_the_models_and_no_draw(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    shipped = initial_encoder(model, SHIPPED[model].weights, 0)
    monkeypatch.setitem(sys.modules, "torch", torch)
    Network(model, 3).check(to_tensors(shipped), "the package's weights")
    assert {array.dtype for array in shipped.values()} == {np.dtype(np.float32)}
    assert not same(shipped, initial_encoder(model, "none", 0))
    assert all(np.isfinite(array).all() for array in shipped.values())
    assert min(array.min() for name, array in shipped.items() if name.endswith("running_var")) >= 0


@pytest.mark.parametrize("model", ["small", "efficientnet_lite0"])
def test_a_model_without_weights_of_our_own_says_which_has_some(model: str) -> None:
    error = refused(model, "surface")
    assert f"no surface weights for '{model}' come with edge-node" in error.what
    assert "--model mobilenet_v2" in error.remedy


def test_a_machine_without_torch_reads_a_file_but_cannot_draw_or_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = initial_encoder("small", "none", 1)
    save_file(bare(drawn), tmp_path / "small.safetensors")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert same(initial_encoder("small", str(tmp_path / "small.safetensors"), 0), drawn)
    for weights in ("none", "imagenet"):
        error = refused("small", weights)
        assert f"--weights {weights} needs torch" in error.what
        assert "edge-node[train]" in error.remedy
        assert "surface" not in error.remedy
