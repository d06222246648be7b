"""A model's structure, free of values: functions of (named tensors, inputs). All that a loss needs from torch."""

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from broker_config.errors import UsageError
from trainer.lean import Run, lean
from trainer.tree import pick, take_from, trainable
from trainer.weights import FEATURES, Shape

Tree = dict[str, Tensor]


class _Reverse(torch.autograd.Function):
    """Identity forward; the gradient times -scale backward (gradient reversal, Ganin and Lempitsky 2015)."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * gradients[0], None


class Network:
    """An encoder's structure with linear heads; all values are passed in."""

    def __init__(self, model: str, classes: int):
        self._encoder = lean(model)
        self.shape = Shape(FEATURES[model], classes)
        self.names = frozenset(f"encoder.{name}" for name in self._encoder.shapes)

    def check(self, tree: Tree, source: str) -> None:
        """Raise UsageError unless `tree` holds exactly this encoder's tensors, below `encoder.`, in its shapes."""
        expected = {f"encoder.{name}": shape for name, shape in self._encoder.shapes.items()}
        found = {name: tuple(value.shape) for name, value in tree.items() if name.startswith("encoder.")}
        if found != expected:
            wrong = sorted(set(found.items()) ^ set(expected.items()))[0][0]
            raise UsageError(
                f"{source} does not fit the model: {wrong} is {found.get(wrong, 'missing')}, "
                f"the model has {expected.get(wrong, 'no such tensor')}",
                "take the weights that were made for this model, or another --model",
            )

    def encode(self, tree: Tree, images: Tensor, *, prefix: str = "encoder", training: bool = False) -> Tensor:
        """Features [n, features] of images [n, 3, S, S]; `training` uses and updates BatchNorm's batch statistics."""
        return self._encoder(images, Run(take_from(prefix, tree), training))

    def linear(self, tree: Tree, name: str, inputs: Tensor) -> Tensor:
        """The fully connected layer `name` of the tree."""
        return functional.linear(inputs, tree[f"{name}.weight"], tree[f"{name}.bias"])

    def cross_entropy(self, logits: Tensor, labels: Tensor | int) -> Tensor:
        """Mean cross-entropy of logits [n, c]; an int labels every row alike."""
        if isinstance(labels, int):
            labels = torch.full((len(logits),), labels)
        return functional.cross_entropy(logits, labels)

    def reverse(self, features: Tensor, scale: float) -> Tensor:
        """`features`, whose gradient will be multiplied by -scale."""
        return cast(Tensor, _Reverse.apply(features, scale))  # type: ignore[no-untyped-call]

    @staticmethod
    def fuse(weight: Tensor, received: Tensor, own: Tensor) -> Tensor:
        """AFedCL eq. (9): weight * received + (1 - weight) * own, features [n, features]."""
        return weight * received + (1 - weight) * own

    @staticmethod
    def join(received: Tensor, own: Tensor) -> Tensor:
        """Both encoders' features side by side (FENDA), [n, 2 * features]."""
        return torch.cat([received, own], 1)

    @staticmethod
    def flat(tree: Tree, prefixes: Iterable[str]) -> Tensor:
        """All values under `prefixes` that gradients move, as one vector, ordered by name."""
        return torch.cat([value.flatten() for name, value in sorted(pick(tree, prefixes).items()) if trainable(name)])

    def see(self, personal: Tree, images: Tensor) -> Tensor:
        """Features of a personal model: its encoder's, fused (AFedCL) or joined (FENDA) with those of `received`."""
        features = self.encode(personal, images)
        if not any(name.startswith("received.") for name in personal):
            return features
        received = self.encode(personal, images, prefix="received")
        if "fusion" in personal:
            return self.fuse(personal["fusion"], received, features)
        return self.join(received, features)

    def judge(self, personal: Tree, images: Tensor) -> Tensor:
        """Logits [n, classes] of a personal model."""
        return self.linear(personal, "classifier", self.see(personal, images))


def to_tensors(arrays: dict[str, np.ndarray]) -> Tree:
    """Copies as torch tensors (aligned by torch's allocator, so that arithmetic does not depend on their origin)."""
    return {name: torch.from_numpy(array).clone() for name, array in arrays.items()}


def to_arrays(tree: Tree) -> dict[str, np.ndarray]:
    """Copies as numpy arrays."""
    return {name: value.detach().contiguous().numpy().copy() for name, value in tree.items()}
