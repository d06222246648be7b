"""The frozen stem of texture networks: where its values come from, that they stay,
and that its maps are kept.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor
from torch.nn import functional

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Spec
from tests.support.engine_agreement import assert_engines_agree
from tests.support.method_cases import CLASSES, equal
from trainer.data.class_folders import Images, LabelledImages
from trainer.data.training_set import TrainingSet
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import SimulationResult, simulate
from trainer.models.initial_weights import choose_weights, initial_encoder
from trainer.models.named_tensors import Arrays, is_frozen, select
from trainer.models.network import Network, to_arrays, to_tensors
from trainer.training.participant import Participant

MODEL = "maps_small"  # the quickest


def images(seed: int, count: int) -> LabelledImages:
    random = np.random.default_rng(seed)
    digests = tuple(random.bytes(32).hex() for _ in range(count))
    pixels = random.integers(0, 256, (count, 64, 64, 3)).astype(np.uint8)
    return LabelledImages(
        pixels, np.arange(count) % len(CLASSES), digests, tuple(map(Path, digests))
    )


SHARES = {f"plant-{k}": Images(images(k, 4), images(k + 10, 2)) for k in (1, 2)}


def drafted(
    method: str = "fedavg", model: str = MODEL, seed: int = 0, **training: object
) -> tuple[Spec, Arrays]:
    request = Request(
        method=method,
        model=model,
        weights="none",
        rounds=1,
        seed=seed,
        training={"augment": False, "local_epochs": 1, **training},  # type: ignore[dict-item]
    )
    return draft(request, federation="test", classes=CLASSES, nodes=2)


def run(*drawn: str, **training: object) -> SimulationResult:
    return simulate(*drafted(*drawn, **training), SHARES)


# Values


def normalised_file(path: Path, seed: int) -> Arrays:
    """A file like that of the normalised VGG19: a layer of colours, then convolutions,
    and one more than is needed.
    """
    random = np.random.default_rng(seed)
    shapes = {
        "0": (3, 3, 1, 1),
        "2": (64, 3, 3, 3),
        "5": (64, 64, 3, 3),
        "9": (128, 64, 3, 3),
        "12": (128, 128, 3, 3),
    }
    shapes["16"] = (256, 128, 3, 3)
    arrays = {
        f"{name}.weight": random.normal(0, 0.1, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    arrays |= {
        f"{name}.bias": random.normal(0, 0.1, shape[0]).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(arrays, path)
    return arrays


def vgg(arrays: Arrays, images: Tensor, colours: str | None, *names: str) -> Tensor:
    """conv1_1 .. conv2_2 with their poolings, behind a layer of colours if there is one."""
    values = to_tensors(arrays)
    if colours is not None:
        images = functional.conv2d(images, values[f"{colours}.weight"], values[f"{colours}.bias"])
    for number, name in enumerate(names):
        images = functional.conv2d(
            images, values[f"{name}.weight"], values[f"{name}.bias"], padding=1
        ).relu()
        images = functional.max_pool2d(images, 2) if number % 2 else images
    return images


def test_a_file_of_the_normalised_vgg19_becomes_the_stem_of_normalised_images(
    tmp_path: Path,
) -> None:
    """The file's layer of colours takes images in 0..1; ours takes what `network_input` gives."""
    arrays = normalised_file(tmp_path / "vgg.safetensors", 1)
    tensors = to_tensors(initial_encoder(MODEL, str(tmp_path / "vgg.safetensors"), 0))
    spec, _ = drafted()
    data = TrainingSet.of(images(3, 2), spec.preprocessing)
    seen = Network(MODEL, 3).apply_stem(tensors, data.network_input(slice(None)))
    expected = vgg(arrays, data.images.float() / 255, "0", "2", "5", "9", "12")
    # Zeros beyond the border stand for the mean colour in both; the tolerance is the rounding of
    # folded means.
    torch.testing.assert_close(seen, expected, rtol=1e-3, atol=1e-4)


def test_a_file_of_torchvisions_vgg19_becomes_the_stem(tmp_path: Path) -> None:
    renamed = {
        "2": "features.0",
        "5": "features.2",
        "9": "features.5",
        "12": "features.7",
        "16": "features.10",
    }
    arrays = {
        f"{renamed[name.partition('.')[0]]}.{name.partition('.')[2]}": array
        for name, array in normalised_file(tmp_path / "normalised.safetensors", 2).items()
        if not name.startswith("0.")
    }
    save_file(
        {**arrays, "classifier.6.bias": np.zeros(9, np.float32)}, tmp_path / "vgg19.safetensors"
    )
    tensors = to_tensors(initial_encoder(MODEL, str(tmp_path / "vgg19.safetensors"), 0))
    pixels = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    expected = vgg(arrays, pixels, None, "features.0", "features.2", "features.5", "features.7")
    torch.testing.assert_close(
        Network(MODEL, 3).apply_stem(tensors, pixels), expected, rtol=1e-4, atol=1e-5
    )


def test_behind_a_stem_from_a_file_all_is_drawn_from_the_seed(tmp_path: Path) -> None:
    normalised_file(tmp_path / "vgg.safetensors", 1)
    one, again, other = (
        initial_encoder(MODEL, str(tmp_path / "vgg.safetensors"), seed) for seed in (5, 5, 6)
    )
    assert equal(one, again)
    for name in one:
        drawn_anew = one[name].tobytes() != other[name].tobytes()
        assert drawn_anew is not (is_frozen(name) or "norm." in name), name


def test_a_whole_encoder_from_a_file_is_taken_as_it_is(tmp_path: Path) -> None:
    drawn = initial_encoder(MODEL, "none", 3)
    save_file(
        {name.removeprefix("encoder."): array for name, array in drawn.items()},
        tmp_path / "own.safetensors",
    )
    assert equal(initial_encoder(MODEL, str(tmp_path / "own.safetensors"), 0), drawn)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("12.weight", (128, 64, 3, 3)),
        ("0.weight", (5, 2, 3, 3)),
        ("0.bias", None),
        ("2.weight", None),
    ],
)
def test_a_file_with_another_vgg_or_with_a_part_of_one_is_refused(
    name: str, shape: tuple[int, ...] | None, tmp_path: Path
) -> None:
    arrays = normalised_file(tmp_path / "vgg.safetensors", 1)
    del arrays[name]
    arrays |= {} if shape is None else {name: np.zeros(shape, np.float32)}
    save_file(arrays, tmp_path / "vgg.safetensors")
    with pytest.raises(UsageError, match=f"{MODEL} has") as refused:
        initial_encoder(MODEL, str(tmp_path / "vgg.safetensors"), 0)
    assert "made for this model" in refused.value.remedy


@pytest.mark.parametrize(
    ("model", "source"),
    [("fedtfi_small", "VGG19's first layers"), ("cunet", "torchvision's DenseNet121")],
)
def test_a_network_for_which_no_weights_come_along_says_which_file_it_begins_with(
    model: str, source: str
) -> None:
    assert choose_weights(model) == "imagenet"
    with pytest.raises(UsageError) as refused:
        initial_encoder(model, "surface", 0)
    assert refused.value.remedy == f"pass --weights none or a FILE.safetensors of {source}"


# What a federation does with it


def test_a_federation_takes_the_one_size_that_its_network_takes() -> None:
    assert drafted()[0].preprocessing.size == 64
    with pytest.raises(UsageError, match=r"maps_small.*64.*96") as refused:
        draft(
            Request(model=MODEL, size=96, weights="none"),
            federation="test",
            classes=CLASSES,
            nodes=2,
        )
    assert "take 64" in refused.value.remedy


@pytest.mark.parametrize(
    "method", ["fedavg", "afedcl", "fenda", "ditto", "scaffold", "fednova", "fedbn", "fedala"]
)
def test_a_stem_is_broadcast_never_sent_never_moved_and_once_in_a_personal_model(
    method: str,
) -> None:
    spec, first = drafted(method)
    stem = {name: array for name, array in first.items() if is_frozen(name)}
    assert len(stem) == 10
    assert stem.keys() == {name for name in first if name.startswith("encoder.stem.")}
    assert not any(map(is_frozen, select(spec.tensors, spec.sends)))
    ended = simulate(spec, first, SHARES)
    assert equal({name: array for name, array in ended.broadcast.items() if is_frozen(name)}, stem)
    for model in ended.models.values():
        kept = {name: value for name, value in to_arrays(model.tensors).items() if is_frozen(name)}
        assert equal(kept, stem)
        moved = model.tensors["encoder.project.weight"].numpy() != first["encoder.project.weight"]
        assert moved.any()


@pytest.mark.parametrize("method", ["fedavg", "afedcl"])
def test_kept_maps_give_the_bytes_that_maps_made_anew_give(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = run(method)
    monkeypatch.setattr(TrainingSet, "with_stem_output", lambda self, network, tensors: self)
    anew = run(method)
    assert equal(kept.broadcast, anew.broadcast)
    for node, model in kept.models.items():
        assert equal(to_arrays(model.tensors), to_arrays(anew.models[node].tensors))
        assert model.metadata.metrics == anew.models[node].metadata.metrics


def test_maps_are_kept_where_images_are_not_varied_and_only_there() -> None:
    for augment in (False, True):
        spec, first = drafted(augment=augment)
        participant = Participant(spec, "plant-1", SHARES["plant-1"])
        participant.contribute(participant.start(first), first, 1)
        assert (participant.data.stem_output is None) is augment


def test_maps_do_not_depend_on_the_images_beside_them() -> None:
    network, tensors = Network(MODEL, 3), to_tensors(initial_encoder(MODEL, "none", 0))
    pixels = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(7))
    together, alone = (
        network.apply_stem(tensors, pixels),
        [network.apply_stem(tensors, image[None])[0] for image in pixels],
    )
    assert torch.equal(together, torch.stack(alone))


def test_a_seed_determines_a_texture_network() -> None:
    one, again, other = (
        run("fedavg", "fedtfi_small"),
        run("fedavg", "fedtfi_small"),
        run("fedavg", MODEL, seed=1),
    )
    assert equal(one.broadcast, again.broadcast)
    assert (
        one.broadcast["classifier.weight"].tobytes()
        != other.broadcast["classifier.weight"].tobytes()
    )


def test_stacked_nodes_learn_what_they_learn_one_by_one() -> None:
    """With SGD, whose steps follow from gradients without blowing up their rounding."""
    assert_engines_agree(*drafted("fednova", "fedtfi_small"), SHARES)
