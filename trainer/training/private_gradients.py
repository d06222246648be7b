"""Gradients in which no single image can be told: each image's is cut,
noise is added to their sum (DP-SGD).

Abadi et al., *Deep Learning with Differential Privacy*, 2016; but all images are in every step,
none are sampled.
"""

from collections.abc import Callable, Iterator
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from broker_config.protocol.messages import ImagePrivacy
from trainer.methods.base import Batch, Encode, Loss
from trainer.models.network import Network, Tensors
from trainer.privacy.noise import derive_key, draw_normal

_AT_ONCE = 8  # images whose gradients are in memory together
_BITS = 28  # the sum's grid: steps of 2^-28 of the clip's length


class PrivateGradients:
    """Gradients of one phase, step after step, with a node's own noise.

    Noise follows from the node's secret, from all that the phase starts from (`basis`), and from
    the sum that it hides. So the same step, made again after a kill, says the same; and no two
    different sums have the same noise, whose difference would show theirs.
    """

    def __init__(self, privacy: ImagePrivacy, secret: str, basis: str, phase: str):
        self._privacy = privacy
        self._step = 0
        self._key = derive_key(secret.encode(), b"gradients", basis.encode(), phase.encode())

    def compute(
        self,
        loss: Loss,
        network: Network,
        tensors: Tensors,
        moved: Tensors,
        encode: Encode,
        count: int,
        read: Callable[[slice], Batch],
    ) -> tuple[Tensors, dict[str, Tensor]]:
        """The mean gradient of `count` images with noise,
        and the means of what `loss` reports, which have none.

        Args:
            loss: of a batch.
            network: in operations that can be mapped over images; `encode` likewise.
            tensors: all of them.
            moved: those of them whose gradient is wanted.
            encode: the encoder as the phase runs it.
            count: of images.
            read: images of these positions.
        """
        total = {
            name: torch.zeros(value.shape, dtype=torch.float64) for name, value in moved.items()
        }
        metrics: dict[str, Tensor] = {}
        for gradients, reported in _gradients(loss, network, tensors, moved, encode, count, read):
            for name, value in _whole(gradients, self._privacy.clip).items():
                total[name] += value.cpu()
            for name, each in reported.items():
                metrics[name] = metrics.get(name, each.new_zeros(())) + each.sum() / count
        noisy = self._add_noise(total)
        grid = self._privacy.clip * 2.0**-_BITS / count
        self._step += 1
        return {name: (value * grid).to(moved[name]) for name, value in noisy.items()}, metrics

    def _add_noise(self, total: Tensors) -> Tensors:
        """Sums in steps of the grid, with noise in such steps."""
        names = sorted(total)
        parts = (total[name].numpy().tobytes() for name in names)
        key = derive_key(self._key, self._step.to_bytes(8, "little"), *parts)
        deviation = self._privacy.noise * 2.0**_BITS
        noisy = {}
        for name in names:
            drawn = draw_normal([derive_key(key, name.encode())], total[name].numel())[0]
            noisy[name] = total[name] + torch.from_numpy(np.rint(deviation * drawn)).view(
                total[name].shape
            )
        return noisy


def _gradients(
    loss: Loss,
    network: Network,
    tensors: Tensors,
    moved: Tensors,
    encode: Encode,
    count: int,
    read: Callable[[slice], Batch],
) -> Iterator[tuple[Tensors, dict[str, Tensor]]]:
    """Each image's own gradients [n, ...] and metrics [n], some images at a time."""
    fixed = {name: value.detach() for name, value in tensors.items() if name not in moved}

    def of_one(
        own: Tensors, image: Tensor, label: Tensor, received: Tensors
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return loss(
            network, {**fixed, **own}, Batch(image[None], label[None], None, received), encode
        )

    compute = torch.func.vmap(torch.func.grad(of_one, has_aux=True), (None, 0, 0, None))
    leaves = {name: value.detach() for name, value in moved.items()}
    for start in range(0, count, _AT_ONCE):
        batch = read(slice(start, start + _AT_ONCE))
        yield compute(leaves, batch.images, batch.labels, batch.received)


def _whole(gradients: Tensors, clip: float) -> Tensors:
    """The sum over images of their gradients, each cut to the length `clip`,
    in steps of the grid: whole numbers.

    Rounding moves a gradient by half a step in each number at most: that is left for it. One that
    is not finite counts as none.
    """
    numbers = sum(value[0].numel() for value in gradients.values())
    most = clip * (1 - sqrt(numbers) * 2.0 ** -(_BITS + 1))
    squares = sum(value.double().flatten(1).square().sum(1) for value in gradients.values())
    lengths = torch.as_tensor(squares).sqrt()
    factors = torch.where(lengths.isfinite(), 1 / lengths.clamp(min=most), 0) * (
        most * 2.0**_BITS / clip
    )
    return {
        name: (value.double().nan_to_num(0, 0, 0) * factors.view(-1, *[1] * (value.ndim - 1)))
        .round()
        .sum(0)
        for name, value in gradients.items()
    }
