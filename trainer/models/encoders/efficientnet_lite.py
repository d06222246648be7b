"""EfficientNet-Lite0: EfficientNet-B0 without squeeze-and-excitation, with ReLU6 in place of swish.

From the TensorFlow model that Google published (github.com/tensorflow/tpu,
models/official/efficientnet/lite), whose "same" padding and BatchNorm epsilon are kept, so that its
weights fit. The tensors' names are those of the package `efficientnet-lite-pytorch`.
"""

from collections import OrderedDict
from typing import NamedTuple, cast

from torch import Tensor, nn
from torch.nn import functional

from trainer.models.encoders.staged_encoder import StagedEncoder

_EPS = 1e-3
# channels of the first and the last convolution
_FIRST = 32
_LAST = 1280
# the last block of the stage with 192 channels; its maps are as large as those of the end
_MIDDLE = "_blocks.14"


class _Stage(NamedTuple):
    """Blocks one after another; only the first of them has the stride."""

    blocks: int
    kernel: int
    stride: int
    expansion: int  # times the input's channels
    channels: int


# Tan and Le (2019), "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks",
# table 1.
_STAGES = (
    _Stage(1, 3, 1, 1, 16),
    _Stage(2, 3, 2, 6, 24),
    _Stage(2, 5, 2, 6, 40),
    _Stage(3, 3, 2, 6, 80),
    _Stage(3, 5, 1, 6, 112),
    _Stage(4, 5, 2, 6, 192),
    _Stage(1, 3, 1, 6, 320),
)


class HalvingPadding(nn.Module):
    """TensorFlow's "same" padding before a convolution of stride 2:
    of even images one more at the end than before.
    """

    def __init__(self, kernel: int):
        super().__init__()
        self.kernel = kernel

    def forward(self, images: Tensor) -> Tensor:
        """[n, c, h, w] -> zeros around it, so that the convolution leaves half of h and w,
        rounded up.
        """
        height, width = self.kernel - 2 + images.shape[2] % 2, self.kernel - 2 + images.shape[3] % 2
        return functional.pad(
            images, (width // 2, width - width // 2, height // 2, height - height // 2)
        )


class _Residual(nn.Sequential):
    """Layers that change their input by what they give."""

    def forward(self, images: Tensor) -> Tensor:
        """[n, c, h, w] -> [n, c, h, w]."""
        return images + cast(Tensor, super().forward(images))  # type: ignore[no-untyped-call]


def efficientnet_lite0(directions: int = 0) -> StagedEncoder:
    """Return the network: images [n, 3, S, S] -> features [n, 1280].

    With `directions` D the features are those of the middle of the network beside those of its end:
    [n, 192 + D]. The middle tells textures apart, the end objects. A linear layer without a bias
    brings the 1,280 channels of the end to D.
    """
    layers = OrderedDict(_layers("_conv_stem", "_bn0", 3, _FIRST, kernel=3, stride=2))
    blocks = []
    inputs = _FIRST
    for stage in _STAGES:
        for number in range(stage.blocks):
            stride = stage.stride if number == 0 else 1
            blocks.append(_block(stage, inputs, stride))
            inputs = stage.channels
    layers["_blocks"] = nn.Sequential(*blocks)
    layers |= _layers("_conv_head", "_bn1", inputs, _LAST)
    if not directions:
        return StagedEncoder(layers, ["_bn1_relu"])
    layers["_projection"] = nn.Conv2d(_LAST, directions, 1, bias=False)
    return StagedEncoder(layers, [_MIDDLE, "_projection"])


def _block(stage: _Stage, inputs: int, stride: int) -> nn.Sequential:
    """Expansion to more channels, a convolution of each channel, projection to fewer."""
    wide = inputs * stage.expansion
    kernel = stage.kernel
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if wide > inputs:
        layers |= _layers("_expand_conv", "_bn0", inputs, wide)
    layers |= _layers(
        "_depthwise_conv", "_bn1", wide, wide, kernel=kernel, stride=stride, groups=wide
    )
    layers |= _layers("_project_conv", "_bn2", wide, stage.channels)
    del layers["_bn2_relu"]
    return _Residual(layers) if stride == 1 and inputs == stage.channels else nn.Sequential(layers)


def _layers(
    convolution: str,
    norm: str,
    inputs: int,
    outputs: int,
    *,
    kernel: int = 1,
    stride: int = 1,
    groups: int = 1,
) -> dict[str, nn.Module]:
    """A convolution, with its padding, BatchNorm and ReLU6, by name."""
    padding = {f"{convolution}_padding": HalvingPadding(kernel)} if stride == 2 else {}
    inside = 0 if stride == 2 else kernel // 2
    return {
        **padding,
        convolution: nn.Conv2d(inputs, outputs, kernel, stride, inside, groups=groups, bias=False),
        norm: nn.BatchNorm2d(outputs, eps=_EPS),
        f"{norm}_relu": nn.ReLU6(),
    }
