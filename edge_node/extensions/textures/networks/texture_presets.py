"""Texture networks by the names that `--model` takes. Imports torch only to build one.

To add a network, add a line to PRESETS, and a function here if none builds its kind. Those named
`*_small` train on two cores; the others are meant for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from edge_node.extensions.textures.networks.sizes import PAPER_TEL, SMALL_TEL, Tel

if TYPE_CHECKING:
    from torch import nn

Build = Callable[[], "nn.Module"]


class Preset(NamedTuple):
    """A texture network: its encoder, up to the features that a linear classifier takes."""

    build: Build
    size: int  # pixels of the images that it takes
    features: int  # width of its feature vector
    values: int  # how many numbers its encoder holds
    stem: bool = True  # whether it begins with VGG19's first layers, frozen
    # torchvision's weights that it starts from, in its stem or its trunk
    imagenet: str = "VGG19_Weights"

    @property
    def begins_with(self) -> str:
        """What a file with its first layers holds, in words."""
        network = self.imagenet.removesuffix("_Weights")
        return f"{network}'s first layers" if self.stem else f"torchvision's {network}"


def _from_parts(
    size: int, features: int, tel: Tel | None, codebooks: tuple[int, ...], depth: int
) -> Build:
    """FedTFI's network.

    Without `tel` or `codebooks` (words of width `depth`) that part is left out.
    """

    def build() -> nn.Module:
        from edge_node.extensions.textures.networks import texture_network  # noqa: PLC0415  (imports torch)

        return texture_network.build(size, features, tel, codebooks, depth)

    return build


def _baseline(head: str, trunk: str) -> Build:
    """A baseline of FedTFI: a head on a trunk; see `baselines.build`."""

    def build() -> nn.Module:
        from edge_node.extensions.textures.networks import baselines  # noqa: PLC0415  (imports torch)

        return baselines.build(head, trunk)

    return build


def _on_torchvision(head: str, trunk: str, weights: str, features: int, values: int) -> Preset:
    return Preset(_baseline(head, trunk), 224, features, values, stem=False, imagenet=weights)


PRESETS: dict[str, Preset] = {
    "fedtfi": Preset(_from_parts(224, 512, PAPER_TEL, (8, 16, 32, 64), 128), 224, 512, 135_359_492),
    "fedtfi_small": Preset(_from_parts(64, 128, SMALL_TEL, (4, 8, 16, 32), 64), 64, 128, 1_090_632),
    "tel_small": Preset(_from_parts(64, 128, SMALL_TEL, (), 0), 64, 128, 591_500),
    "musten_small": Preset(_from_parts(64, 128, None, (4, 8, 16, 32), 64), 64, 128, 792_264),
    "maps_small": Preset(_from_parts(64, 128, None, (), 0), 64, 128, 301_324),
    "resnet_small": Preset(_baseline("resnet", "small"), 64, 128, 793_996),
    "deepten_small": Preset(_baseline("deepten", "small"), 64, 1024, 803_356),
    "dep_small": Preset(_baseline("dep", "small"), 64, 128, 854_780),
    "class_small": Preset(_baseline("class", "small"), 64, 256, 799_404),
    "cunet_small": Preset(_baseline("cunet", "small"), 64, 512, 802_836),
    "tel_deepten_small": Preset(_baseline("deepten", "tel"), 64, 1024, 584_348),
    "tel_dep_small": Preset(_baseline("dep", "tel"), 64, 128, 635_772),
    "tel_class_small": Preset(_baseline("class", "tel"), 64, 256, 581_420),
    "deepten_resnet18": _on_torchvision(
        "deepten", "resnet18", "ResNet18_Weights", 4096, 11_256_288
    ),
    "deepten_resnet50": _on_torchvision(
        "deepten", "resnet50", "ResNet50_Weights", 4096, 23_827_936
    ),
    "dep_resnet18": _on_torchvision("dep", "resnet18", "ResNet18_Weights", 128, 11_876_296),
    "dep_resnet50": _on_torchvision("dep", "resnet50", "ResNet50_Weights", 128, 24_745_952),
    "class_resnet18": _on_torchvision("class", "resnet18", "ResNet18_Weights", 1024, 11_248_704),
    "class_resnet50": _on_torchvision("class", "resnet50", "ResNet50_Weights", 2560, 23_808_064),
    "cunet": _on_torchvision("cunet", "densenet121", "DenseNet121_Weights", 1024, 7_170_120),
}
