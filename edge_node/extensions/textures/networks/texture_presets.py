"""Texture networks by the names that `--model` takes. Imports torch only to build one.

Each is an encoder, registered in `pyproject.toml`. To add one, add a line here and there, and a
function here if none builds its kind. Those named `*_SMALL` train on two cores; the others are for
a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from edge_node.extensions.textures.networks.sizes import PAPER_TEL, SMALL_TEL, Tel
from edge_node.extensions.textures.networks.texture_weights import rename_pretrained
from trainer.models.encoders.encoder import Beginning, Encoder

if TYPE_CHECKING:
    from trainer.models.encoders.encoder_module import EncoderModule

Build = Callable[[], "EncoderModule"]

_VGG19 = Beginning("stem", "VGG19's first layers", partial(rename_pretrained, stem=True))


def _with_stem(build: Build, size: int, features: int, values: int) -> Encoder:
    """A network that begins with VGG19's first layers, frozen."""
    return Encoder(
        features, values, build, "VGG19_Weights", size=size, only_size=True, beginning=_VGG19
    )


def _from_parts(
    size: int, features: int, tel: Tel | None, codebooks: tuple[int, ...], depth: int
) -> Build:
    """FedTFI's network.

    Without `tel` or `codebooks` (words of width `depth`) that part is left out.
    """

    def build() -> EncoderModule:
        from edge_node.extensions.textures.networks import texture_network  # noqa: PLC0415  (imports torch)

        return texture_network.build(size, features, tel, codebooks, depth)

    return build


def _baseline(head: str, trunk: str) -> Build:
    """A baseline of FedTFI: a head on a trunk; see `baselines.build`."""

    def build() -> EncoderModule:
        from edge_node.extensions.textures.networks import baselines  # noqa: PLC0415  (imports torch)

        return baselines.build(head, trunk)

    return build


def _on_torchvision(head: str, trunk: str, weights: str, features: int, values: int) -> Encoder:
    """A baseline on one of torchvision's networks."""
    source = f"torchvision's {weights.removesuffix('_Weights')}"
    beginning = Beginning("trunk", source, partial(rename_pretrained, stem=False))
    build = _baseline(head, trunk)
    return Encoder(features, values, build, weights, size=224, only_size=True, beginning=beginning)


FEDTFI = _with_stem(_from_parts(224, 512, PAPER_TEL, (8, 16, 32, 64), 128), 224, 512, 135_359_492)
FEDTFI_SMALL = _with_stem(_from_parts(64, 128, SMALL_TEL, (4, 8, 16, 32), 64), 64, 128, 1_090_632)
TEL_SMALL = _with_stem(_from_parts(64, 128, SMALL_TEL, (), 0), 64, 128, 591_500)
MUSTEN_SMALL = _with_stem(_from_parts(64, 128, None, (4, 8, 16, 32), 64), 64, 128, 792_264)
MAPS_SMALL = _with_stem(_from_parts(64, 128, None, (), 0), 64, 128, 301_324)
RESNET_SMALL = _with_stem(_baseline("resnet", "small"), 64, 128, 793_996)
DEEPTEN_SMALL = _with_stem(_baseline("deepten", "small"), 64, 1024, 803_356)
DEP_SMALL = _with_stem(_baseline("dep", "small"), 64, 128, 854_780)
CLASS_SMALL = _with_stem(_baseline("class", "small"), 64, 256, 799_404)
CUNET_SMALL = _with_stem(_baseline("cunet", "small"), 64, 512, 802_836)
TEL_DEEPTEN_SMALL = _with_stem(_baseline("deepten", "tel"), 64, 1024, 584_348)
TEL_DEP_SMALL = _with_stem(_baseline("dep", "tel"), 64, 128, 635_772)
TEL_CLASS_SMALL = _with_stem(_baseline("class", "tel"), 64, 256, 581_420)
DEEPTEN_RESNET18 = _on_torchvision("deepten", "resnet18", "ResNet18_Weights", 4096, 11_256_288)
DEEPTEN_RESNET50 = _on_torchvision("deepten", "resnet50", "ResNet50_Weights", 4096, 23_827_936)
DEP_RESNET18 = _on_torchvision("dep", "resnet18", "ResNet18_Weights", 128, 11_876_296)
DEP_RESNET50 = _on_torchvision("dep", "resnet50", "ResNet50_Weights", 128, 24_745_952)
CLASS_RESNET18 = _on_torchvision("class", "resnet18", "ResNet18_Weights", 1024, 11_248_704)
CLASS_RESNET50 = _on_torchvision("class", "resnet50", "ResNet50_Weights", 2560, 23_808_064)
CUNET = _on_torchvision("cunet", "densenet121", "DenseNet121_Weights", 1024, 7_170_120)
