"""MobileNetV2 is torchvision's network, number by number."""

import pytest
import torch
from torch import nn

from trainer.models import backbones
from trainer.models.encoders.inverted_residuals import mobilenet_v2
from trainer.models.torchvision_import import torchvision_models


@pytest.fixture(scope="module")
def published() -> nn.Module:
    torch.manual_seed(0)
    network: nn.Module = torchvision_models().mobilenet_v2().features
    return network


@pytest.mark.parametrize("size", [63, 64])
@pytest.mark.parametrize("is_training", [False, True])
def test_maps_are_torchvisions(published: nn.Module, size: int, is_training: bool) -> None:
    ours = mobilenet_v2()
    ours.get_submodule("features").load_state_dict(published.state_dict())
    images = torch.rand((2, 3, size, size), generator=torch.Generator().manual_seed(size))
    with torch.no_grad():
        maps = ours.train(is_training).feature_map(images)
        assert torch.equal(maps, published.train(is_training)(images))


def test_drawn_values_spread_as_torchvisions(published: nn.Module) -> None:
    torch.manual_seed(1)
    ours = dict(mobilenet_v2().get_submodule("features").named_parameters())
    for name, theirs in published.named_parameters():
        if theirs.ndim > 1:
            assert ours[name].std().item() == pytest.approx(theirs.std().item(), rel=0.2), name
        else:
            assert torch.equal(ours[name], theirs), name


def test_a_structure_without_values_draws_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.init, "kaiming_normal_", None)
    with torch.device("meta"):
        assert all(value.is_meta for value in backbones.build("mobilenet_v2").state_dict().values())
