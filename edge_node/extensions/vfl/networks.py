"""Networks: a feature model at each sensor, a linear head at the server (paper VII-C)."""

import threading
from collections.abc import Callable, Sequence
from math import prod
from typing import TypeVar

import torch
from torch import Tensor, nn

from broker_config.protocol.errors import UsageError, suggest
from trainer.seeding import key_to_seed

HEAD = "head"
# torch has one generator in a process: parties that share it draw in turn
_DRAWING = threading.Lock()
_Model = TypeVar("_Model", bound=nn.Module)


def _conv(shape: Sequence[int]) -> nn.Sequential:
    """C-MAPSS: two convolutions over time, 8 and 14 channels;
    a window of 15 cycles gives 2 x 14 = 28 numbers.

    Kernels and strides are our choice: the paper has neither. The paper names no activation after
    the second convolution, and there is none.
    """
    columns, cycles = shape
    if cycles < 9:
        raise UsageError(
            f"a window of {cycles} cycles is too short for the convolutions",
            "take 9 cycles or more",
        )
    return nn.Sequential(
        nn.Conv1d(columns, 8, 5, stride=2), nn.ReLU(), nn.Conv1d(8, 14, 3, stride=2), nn.Flatten()
    )


def _dense(shape: Sequence[int]) -> nn.Sequential:
    """One reading a product: two layers, 16 numbers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(prod(shape), 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU()
    )


def _vgg(shape: Sequence[int], widths: Sequence[Sequence[int]], embedding: int) -> nn.Sequential:
    """13 convolutions in five blocks, a pooling after each block that still has 2 x 2 pixels or
    more.

    First values after He et al. (2015): with torch's own nothing of the image is left after 13
    layers.
    """
    channels, side, _ = shape
    layers: list[nn.Module] = []
    for block in widths:
        for width in block:
            layers += [_scaled(nn.Conv2d(channels, width, 3, padding=1), side), nn.ReLU()]
            channels = width
        if side >= 2:
            layers.append(nn.MaxPool2d(2))
            side //= 2
    last = nn.Linear(channels * side * side, embedding)
    return nn.Sequential(*layers, nn.Flatten(), _scaled(last), nn.ReLU())


def _scaled(layer: nn.Conv2d | nn.Linear, side: int | None = None) -> nn.Module:
    """First values that keep the scale of what passes; of `side` pixels' 3 taps each,
    two see padding alone.
    """
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    if side:
        layer.weight.data *= 3 * side / (3 * side - 2)
    return layer


_PAPER = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
_SMALL = ((16,), (32,), (64,))

NETWORKS: dict[str, Callable[[Sequence[int]], nn.Sequential]] = {
    "conv": _conv,
    "dense": _dense,
    "vgg13": lambda shape: _vgg(shape, _PAPER, 4096),
    "vgg_small": lambda shape: _vgg(shape, _SMALL, 128),
}


class ClipNorm(nn.Module):
    """Embeddings [N, D] that are longer than `length` are cut to it: what protection needs,
    so that training knows.
    """

    def __init__(self, length: float):
        super().__init__()
        self.length = length

    def forward(self, embedding: Tensor) -> Tensor:
        """[N, D] -> [N, D]."""
        shortened: Tensor = embedding * (
            self.length / embedding.norm(dim=1, keepdim=True).clamp_min(self.length)
        )
        return shortened


def build_feature_model(
    network: str, shape: Sequence[int], seed: int, sensor: str, clip: float = 0.0
) -> nn.Sequential:
    """h_k: a sensor's samples float32 [N, *shape] -> embeddings [N, D],
    no longer than `clip` (0: any length).

    Raises:
        UsageError: there is no such network, or not for this shape.
    """
    if network not in NETWORKS:
        raise UsageError(f"there is no feature model {network!r}", suggest(network, NETWORKS))
    model = _drawn(lambda: NETWORKS[network](shape), seed, sensor)
    return model.append(ClipNorm(clip)) if clip else model


def build_head_model(embeddings: Sequence[int], classes: int, seed: int) -> nn.Linear:
    """h_0: all embeddings beside one another, [N, sum of D_k] -> logits [N, classes]."""
    return _drawn(lambda: nn.Linear(sum(embeddings), classes), seed, HEAD)


def embedding_size(network: str, shape: Sequence[int]) -> int:
    """D_k of a sensor whose samples have this shape: a stranger's word for it costs no memory."""
    with torch.no_grad(), torch.device("meta"):
        return int(build_feature_model(network, shape, 0, "")(torch.zeros(1, *shape)).shape[1])


def _drawn(make: Callable[[], _Model], seed: int, party: str) -> _Model:
    """First values that hang on (seed, party) alone."""
    with _DRAWING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(key_to_seed(seed, "first values", party))
        return make()
