"""Baseline networks of FedTFI: a published head on a trunk.

`docs/textures.md` lists their sizes.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from edge_node.extensions.textures.networks.class_statistics import ClassHead
from edge_node.extensions.textures.networks.cunet import CUNetHead
from edge_node.extensions.textures.networks.deepten import DeepTenHead
from edge_node.extensions.textures.networks.depnet import DepNetHead
from edge_node.extensions.textures.networks.sizes import SMALL_TEL
from edge_node.extensions.textures.networks.stem import STEM_CHANNELS, Stem
from edge_node.extensions.textures.networks.tel import TextureEmbedding
from edge_node.extensions.textures.networks.texture_network import MAP_CHANNELS, TextureNetwork
from edge_node.extensions.textures.networks.trunk import (
    DenseTrunk,
    GlobalAveragePooling,
    ResNetTrunk,
    SmallTrunk,
    TokenHead,
)
from trainer.models.torchvision_import import torchvision_models


class Sizes(NamedTuple):
    """Sizes of all heads on one trunk."""

    channels: tuple[int, ...]  # of the stages, from shallow to deep
    grid: int  # index of the stage to whose size CLASSNet resizes the others
    batch_norm: bool
    descriptor: int  # width of descriptors in Deep-TEN, DEPNet and CU-Net
    codewords: int  # of Deep-TEN
    dep_codewords: int
    dep_side: int  # width of each of DEPNet's two views
    volumes: int  # of CLASSNet
    length: float  # of normalised features


_SMALL = Sizes((MAP_CHANNELS, 128, 128), 1, False, 64, 16, 16, 16, 16, 8.0)
# of the grid of tokens, and the number of layers that it stands for
_SIDE = 8
_LAYERS = 3
_ON_TOKENS = _SMALL._replace(channels=(SMALL_TEL.width,) * _LAYERS)
_RESNET18 = Sizes((64, 128, 256, 512), 2, True, 128, 32, 8, 64, 64, 1.0)
_RESNET50 = _RESNET18._replace(channels=(256, 512, 1024, 2048), dep_codewords=32)
_TORCHVISION = {
    "resnet18": _RESNET18,
    "resnet50": _RESNET50,
    "densenet121": _RESNET18._replace(channels=(1024,)),
}
_BINS = 8
_COMPONENTS = 8
_DEP_FEATURES = 128

_HEADS: dict[str, Callable[[Sizes], nn.Module]] = {
    "resnet": lambda _: GlobalAveragePooling(),
    "deepten": lambda s: DeepTenHead(
        s.channels[-1], s.descriptor, s.codewords, s.length, batch_norm=s.batch_norm
    ),
    "dep": lambda s: DepNetHead(
        s.channels[-1],
        s.descriptor,
        s.dep_codewords,
        s.dep_side,
        _DEP_FEATURES,
        s.length,
        batch_norm=s.batch_norm,
    ),
    "class": lambda s: ClassHead(s.channels, s.volumes, _BINS, s.grid),
    "cunet": lambda s: CUNetHead(
        s.channels[-1], s.descriptor, _COMPONENTS, s.length, batch_norm=s.batch_norm
    ),
}


def build(head: str, trunk: str) -> TextureNetwork:
    """A head on a trunk.

    Args:
        head: resnet, deepten, dep, class or cunet.
        trunk: `small` (the stem, FedTFI's projection and a small residual trunk), `tel`
            (`fedtfi_small` with the head in place of MusTEN), or torchvision's `resnet18`,
            `resnet50` or `densenet121`.
    """
    if trunk in _TORCHVISION:
        network = getattr(torchvision_models(), trunk)()
        stages = DenseTrunk(network) if trunk == "densenet121" else ResNetTrunk(network)
        return TextureNetwork({"trunk": stages, "head": _HEADS[head](_TORCHVISION[trunk])})
    parts = {"stem": Stem(), "project": nn.Conv2d(STEM_CHANNELS, MAP_CHANNELS, 1)}
    if trunk == "tel":
        tel = TextureEmbedding(MAP_CHANNELS, _SIDE**2, *SMALL_TEL)
        return TextureNetwork(
            {**parts, "tel": tel, "encoding": TokenHead(_HEADS[head](_ON_TOKENS), _SIDE, _LAYERS)}
        )
    return TextureNetwork(
        {
            **parts,
            "trunk": SmallTrunk(MAP_CHANNELS, _SMALL.channels[1:]),
            "head": _HEADS[head](_SMALL),
        }
    )
