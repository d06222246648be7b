"""The contract of every encoder: maps of several layers from one pass,
and features that are the means of these maps.
"""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor, nn

from trainer.methods.base import MODEL
from trainer.models import backbones
from trainer.models.catalogue import CANDIDATES, FEATURES, KNOWN, LACKS, SHIPPED, VALUES
from trainer.models.encoders.encoder_module import EncoderModule
from trainer.models.encoders.staged_encoder import StagedEncoder
from trainer.models.initial_weights import initial_encoder
from trainer.models.named_tensors import Arrays

ANY_SIZE = [name for name, encoder in KNOWN.items() if not encoder.only_size]
MIDDLES = [name for name in KNOWN if LACKS[name]]
"""The encoders that hold a part of another network's tensors, and no more."""


def pictures(size: int, count: int = 2) -> Tensor:
    return torch.rand((count, 3, size, size), generator=torch.Generator().manual_seed(size))


# The module


def three_layers(*taps: str) -> StagedEncoder:
    """A stem, and a body of two blocks; each halves height and width."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(4, 5, 3, 2, 1), nn.Conv2d(5, 6, 3, 2, 1))
    return StagedEncoder({"stem": nn.Conv2d(3, 4, 3, 2, 1), "body": body}, taps)


def count_runs(encoder: StagedEncoder) -> dict[str, int]:
    """Return how often each layer has run from now on."""
    runs = dict.fromkeys(("stem", "body", "body.0", "body.1"), 0)

    def count(name: str, *_: object) -> None:
        runs[name] += 1

    for name in runs:
        encoder.get_submodule(name).register_forward_hook(partial(count, name))
    return runs


def test_one_pass_gives_maps_of_different_strides_in_the_order_of_the_layers() -> None:
    encoder = three_layers("body")
    runs = count_runs(encoder)
    maps = encoder.maps(pictures(32), ["body.1", "stem", "body.0"])
    assert [tuple(each.shape) for each in maps] == [(2, 4, 16, 16), (2, 5, 8, 8), (2, 6, 4, 4)]
    assert runs == {"stem": 1, "body": 0, "body.0": 1, "body.1": 1}
    for name, found in zip(("stem", "body.0", "body.1"), maps, strict=True):
        assert torch.equal(encoder.maps(pictures(32), [name])[0], found)


def test_layers_after_the_last_one_that_is_named_do_not_run() -> None:
    encoder = three_layers("body.0")
    runs = count_runs(encoder)
    features = encoder(pictures(32))
    assert features.shape == (2, 5)
    assert runs == {"stem": 1, "body": 0, "body.0": 1, "body.1": 0}


def test_features_of_several_taps_stand_side_by_side() -> None:
    encoder = three_layers("body.0", "body.1")
    encoder.get_submodule("body.1").stride = (1, 1)
    images = pictures(32)
    first, second = encoder.maps(images, ["body.0", "body.1"])
    maps = encoder.feature_map(images)
    assert torch.equal(maps, torch.cat([first, second], 1))
    assert torch.equal(encoder(images), maps.mean((2, 3)))


def test_a_networks_children_are_taken_up_to_the_tap() -> None:
    network = nn.Sequential()
    for name in ("first", "second", "third"):
        network.add_module(name, nn.Conv2d(3, 3, 1))
    encoder = StagedEncoder.of(network, "second")
    assert [name for name, _ in encoder.named_children()] == ["first", "second"]
    images = pictures(8)
    assert torch.equal(encoder(images), network[:2](images).mean((2, 3)))


def test_a_tap_within_a_child_ends_the_child() -> None:
    whole = three_layers("body")
    encoder = StagedEncoder.of(whole, "body.0")
    assert list(encoder.state_dict()) == [
        name for name in whole.state_dict() if "body.1" not in name
    ]
    images = pictures(32)
    assert torch.equal(encoder.feature_map(images), whole.maps(images, ["body.0"])[0])


# Every encoder


@pytest.mark.parametrize("model", ANY_SIZE)
def test_an_encoder_keeps_the_contract_at_an_odd_size(model: str) -> None:
    torch.manual_seed(0)
    encoder = backbones.build(model).eval()
    images = pictures(97)
    with torch.no_grad():
        explained, _ = encoder.explain(images)
        features = encoder(images)
    assert sum(value.numel() for value in encoder.state_dict().values()) == VALUES[model]
    assert features.shape == (2, FEATURES[model])
    assert features.isfinite().all()
    assert not torch.equal(features[0], features[1])
    torch.testing.assert_close(explained, features)
    assert encoder.without_stem() is encoder


@pytest.mark.parametrize("model", ANY_SIZE)
def test_the_evidence_of_all_places_is_what_the_head_makes_of_the_features(model: str) -> None:
    encoder = backbones.build(model).eval()
    head = torch.randn(3, FEATURES[model], generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        features, evidence = encoder.explain(pictures(97))
    assert evidence
    torch.testing.assert_close(evidence(head).mean((2, 3)), features @ head.T, rtol=1e-4, atol=1e-4)


def test_an_encoder_that_says_nothing_of_places_has_features_and_no_evidence() -> None:
    class Largest(EncoderModule):
        def forward(self, images: Tensor) -> Tensor:
            return images.amax((2, 3))

    images = pictures(8)
    features, evidence = Largest().explain(images)
    assert torch.equal(features, images.amax((2, 3)))
    assert evidence is None


@pytest.mark.parametrize("model", ["efficientnet_lite0", "efficientnet_lite0_mid"])
def test_the_places_of_a_shipped_network_come_in_the_strides_of_its_stages(model: str) -> None:
    encoder = backbones.build(model)
    assert isinstance(encoder, StagedEncoder)
    with torch.no_grad():
        maps = encoder.maps(pictures(97), ["_blocks.7", "_blocks.10", "_blocks.14"])
    assert [each.shape[1:] for each in maps] == [(80, 7, 7), (112, 7, 7), (192, 4, 4)]


# Weights


def bare(arrays: Arrays) -> Arrays:
    return {name.removeprefix("encoder."): array for name, array in arrays.items()}


@pytest.mark.parametrize("model", MIDDLES)
def test_a_variant_from_the_middle_is_a_part_of_the_whole_network(
    model: str, tmp_path: Path
) -> None:
    """Its weights come from the whole network's file."""
    whole = bare(initial_encoder(model.removesuffix("_mid"), "none", 1))
    save_file(
        {**whole, "classifier.weight": np.ones((2, 3), np.float32)}, tmp_path / "whole.safetensors"
    )
    middle = bare(initial_encoder(model, str(tmp_path / "whole.safetensors"), 0))
    assert middle.keys() == backbones.build(model).state_dict().keys()
    assert middle.keys() < whole.keys()
    assert all(np.array_equal(array, whole[name]) for name, array in middle.items())


def test_the_default_encoder_is_the_published_network_and_our_directions_of_its_end() -> None:
    ours = bare(initial_encoder("efficientnet_lite0_mid", "imagenet", 0))
    published = bare(initial_encoder("efficientnet_lite0", "imagenet", 0))
    assert ours.keys() - published.keys() == {"_projection.weight"}
    assert all(np.array_equal(ours[name], array) for name, array in published.items())


def test_weights_are_chosen_among_encoders_whose_weights_come_with_the_package() -> None:
    assert set(CANDIDATES) <= set(SHIPPED)
    assert MODEL in CANDIDATES
