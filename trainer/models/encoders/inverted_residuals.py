"""MobileNetV2's network.

Sandler et al. (2018), "MobileNetV2: Inverted Residuals and Linear Bottlenecks". The tensors' names
and the random initial values' distribution are torchvision's, whose weights fit. torchvision itself
would cost each node 84 MiB and one or two seconds, since it loads torch's compiler.
"""

from typing import NamedTuple, cast

from torch import Tensor, nn

from trainer.models.encoders.staged_encoder import StagedEncoder

# channels of the first and the last convolution
_FIRST = 32
_LAST = 1280


class _Stage(NamedTuple):
    """Blocks one after another; only the first of them has the stride."""

    blocks: int
    stride: int
    expansion: int  # times the input's channels
    channels: int


# Table 2.
_STAGES = (
    _Stage(1, 1, 1, 16),
    _Stage(2, 2, 6, 24),
    _Stage(3, 2, 6, 32),
    _Stage(4, 2, 6, 64),
    _Stage(3, 1, 6, 96),
    _Stage(3, 2, 6, 160),
    _Stage(1, 1, 6, 320),
)


class _Block(nn.Module):
    """Expansion to more channels, a convolution of each channel, projection to fewer,
    without a ReLU.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int):
        super().__init__()
        wide = inputs * expansion
        layer = [_layer(inputs, wide)] if expansion > 1 else []
        self.conv = nn.Sequential(
            *layer,
            _layer(wide, wide, kernel=3, stride=stride, groups=wide),
            nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, images: Tensor) -> Tensor:
        """[n, inputs, h, w] -> [n, outputs, h / stride, w / stride]."""
        out = cast(Tensor, self.conv(images))
        return images + out if self.is_residual else out


def mobilenet_v2(stages: int = len(_STAGES)) -> StagedEncoder:
    """Return the network: images [n, 3, S, S] -> features [n, 1280].

    It may end after fewer stages; after the fifth, features are [n, 96].
    """
    blocks = []
    inputs = _FIRST
    for stage in _STAGES[:stages]:
        for number in range(stage.blocks):
            stride = stage.stride if number == 0 else 1
            blocks.append(_Block(inputs, stage.channels, stride, stage.expansion))
            inputs = stage.channels
    last = [_layer(inputs, _LAST)] if stages == len(_STAGES) else []
    network = nn.Sequential(_layer(3, _FIRST, kernel=3, stride=2), *blocks, *last)
    for module in network.modules():
        # which torch would load its compiler for
        if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
            nn.init.kaiming_normal_(module.weight, mode="fan_out")
    return StagedEncoder({"features": network}, ["features"])


def _layer(
    inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """A convolution, BatchNorm and ReLU6."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(inplace=True),
    )
