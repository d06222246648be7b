"""Adam and SGD over named tensors.

torch's functions take the steps: its classes load its compiler, which costs each node 72 MiB and
one or two seconds.
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from trainer.methods.base import Sgd
from trainer.models.network import Tensors

_BETAS = (0.9, 0.999)
_EPSILON = 1e-8
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")

_adam = partial(adam, fused=True, amsgrad=False, weight_decay=0.0, eps=_EPSILON, maximize=False)
_sgd = partial(sgd, fused=True, dampening=0.0, nesterov=False, maximize=False)


class Optimiser:
    """Moves tensors against their gradients, by Adam, or by SGD that is at rest at first.

    Adam: Kingma and Ba (2015), "Adam: A Method for Stochastic Optimization", algorithm 1.
    """

    def __init__(
        self,
        tensors: Tensors,
        rates: Mapping[str, float],
        moments: Tensors,
        descent: Sgd | None = None,
    ):
        """With `descent` it is SGD.

        Args:
            tensors: those to move, in place.
            rates: the learning rate of each.
            moments: Adam's state, named `{tensor}/{step|exp_avg|exp_avg_sq}`; of other tensors too,
                and not modified.
            descent: momentum and weight decay.
        """
        self._tensors = tensors
        self._descent = descent
        self._by_rate: dict[float, list[str]] = defaultdict(list)
        for name in tensors:
            self._by_rate[rates[name]].append(name)
        self._velocities = dict.fromkeys(tensors)  # SGD's
        kept = {} if descent else moments
        self.moments = {
            name: value.clone()
            for name, value in kept.items()
            if name.rpartition("/")[0] in tensors
        }

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for tensor in self._tensors.values():
            tensor.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move the tensors that have a gradient."""
        for rate, names in self._by_rate.items():
            moved = {
                name: self._tensors[name] for name in names if self._tensors[name].grad is not None
            }
            if moved and self._descent:
                self._descend(rate, moved, self._descent)
            elif moved:
                self._adapt(rate, moved)

    def _adapt(self, rate: float, moved: Tensors) -> None:
        for name, tensor in moved.items():
            if f"{name}/step" not in self.moments:
                start = (
                    torch.zeros_like(tensor),
                    torch.zeros_like(tensor),
                    torch.zeros((), device=tensor.device),
                )
                self.moments |= {
                    f"{name}/{moment}": value for moment, value in zip(_MOMENTS, start, strict=True)
                }
        moments = []
        for moment in _MOMENTS:
            moments.append([self.moments[f"{name}/{moment}"] for name in moved])
        first, second, steps = moments
        _adam(
            [*moved.values()],
            _gradients(moved),
            first,
            second,
            [],
            steps,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            lr=rate,
        )

    def _descend(self, rate: float, moved: Tensors, by: Sgd) -> None:
        velocities: list[Tensor | None] = [self._velocities[name] for name in moved]
        _sgd(
            [*moved.values()],
            _gradients(moved),
            velocities,
            lr=rate,
            momentum=by.momentum,
            weight_decay=by.weight_decay,
        )
        self._velocities |= dict(zip(moved, velocities, strict=True))


def _gradients(tensors: Tensors) -> list[Tensor]:
    return [tensor.grad for tensor in tensors.values() if tensor.grad is not None]
