"""A model's structure, free of values: functions of (named tensors, inputs). All that a loss needs from torch."""

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from broker_config.protocol.errors import UsageError
from trainer.models.catalogue import FEATURES
from trainer.models.fast_kernels import Run, lean
from trainer.models.initial_weights import Shape
from trainer.models.named_tensors import pick, take_from, trainable

Tree = dict[str, Tensor]


class _Reverse(torch.autograd.Function):
    """Identity forward; the gradient times -scale backward (gradient reversal, Ganin and Lempitsky 2015)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(features: Tensor, scale: float) -> Tensor:  # noqa: ARG004
        return features.view_as(features)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:  # noqa: ARG004
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * gradients[0], None


class Network:
    """An encoder's structure with linear heads; all values are passed in."""

    def __init__(self, model: str, classes: int, *, mapped: bool = False):
        self._model, self._encoder = model, lean(model, mapped)
        self.shape = Shape(FEATURES[model], classes)
        self.names = frozenset(f"encoder.{name}" for name in self._encoder.shapes)

    def mapped(self) -> "Network":
        """The same structure in operations that `torch.func.vmap` maps over stacked trees."""
        return Network(self._model, self.shape.classes, mapped=True)

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

    @property
    def has_stem(self) -> bool:
        """Whether the encoder begins with frozen layers."""
        return self._encoder.has_stem

    def stem(self, tree: Tree, images: Tensor) -> Tensor:
        """What the rest of the encoder starts from: images [n, 3, S, S], or the maps that a frozen stem makes of them.

        It sees one image at a time: maps are then the same bytes, however images are batched.
        """
        if not self.has_stem:
            return images
        stem, run = self._encoder.part("stem"), Run(take_from("encoder", tree), training=False)
        return torch.cat([stem(image, run) for image in images.unsqueeze(1)])

    def encode(self, tree: Tree, seen: Tensor, *, prefix: str = "encoder", training: bool = False) -> Tensor:
        """Features [n, features] of what `stem` gave; `training` uses and updates BatchNorm's batch statistics."""
        return cast(Tensor, self._encoder.rest(seen, Run(take_from(prefix, tree), training)))

    def part(self, name: str, tree: Tree, seen: Tensor, *, prefix: str = "encoder", training: bool = False) -> Any:
        """What one direct child of the encoder module makes of what the one before gave."""
        return self._encoder.part(name)(seen, Run(take_from(prefix, tree), training))

    def linear(self, tree: Tree, name: str, inputs: Tensor) -> Tensor:
        """The fully connected layer `name` of the tree."""
        return functional.linear(inputs, tree[f"{name}.weight"], tree[f"{name}.bias"])

    def cross_entropy(self, logits: Tensor, labels: Tensor | int) -> Tensor:
        """Mean cross-entropy of logits [n, c]; an int labels every row alike."""
        if isinstance(labels, int):
            labels = torch.full((len(logits),), labels, device=logits.device)
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
        return self._see(personal, self.stem(personal, images))

    def _see(self, personal: Tree, seen: Tensor) -> Tensor:
        features = self.encode(personal, seen)
        if not any(name.startswith("received.") for name in personal):
            return features
        received = self.encode(personal, seen, prefix="received")
        if "fusion" in personal:
            return self.fuse(personal["fusion"], received, features)
        return self.join(received, features)

    def judge(self, personal: Tree, images: Tensor) -> Tensor:
        """Logits [n, classes] of a personal model."""
        return self.judge_seen(personal, self.stem(personal, images))

    def judge_seen(self, personal: Tree, seen: Tensor) -> Tensor:
        """Logits [n, classes] of a personal model for what its `stem` gave."""
        return self.linear(personal, "classifier", self._see(personal, seen))


def to_tensors(arrays: dict[str, np.ndarray], device: str = "cpu") -> Tree:
    """Copies as torch tensors (aligned by torch's allocator, so that arithmetic does not depend on their origin)."""
    return {name: torch.from_numpy(array).to(device, copy=True) for name, array in arrays.items()}


def to_arrays(tree: Tree) -> dict[str, np.ndarray]:
    """Copies as numpy arrays."""
    return {name: value.detach().cpu().contiguous().numpy().copy() for name, value in tree.items()}
