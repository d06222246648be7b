"""A model's structure, free of values: functions of (named tensors, inputs).

All that a loss needs from torch.
"""

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from broker_config.protocol.errors import UsageError
from trainer.models.catalogue import FEATURES
from trainer.models.fast_kernels import Context, functional_encoder
from trainer.models.fusion import infer_fusion
from trainer.models.initial_weights import Shape
from trainer.models.named_tensors import is_trainable, select, strip_prefix

Tensors = dict[str, Tensor]


class _Reverse(torch.autograd.Function):
    """Identity forward; the gradient times -scale backward (gradient reversal,
    Ganin and Lempitsky 2015).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(features: Tensor, scale: float) -> Tensor:  # noqa: ARG004
        return features.view_as(features)

    @staticmethod
    def setup_context(
        ctx: Any,
        inputs: tuple[Tensor, float],
        output: Tensor,  # noqa: ARG004
    ) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * gradients[0], None


class Network:
    """An encoder's structure with linear heads; all values are passed in."""

    def __init__(self, model: str, classes: int, *, mapped: bool = False):
        self._model = model
        self._encoder = functional_encoder(model, mapped)
        self.shape = Shape(FEATURES[model], classes)
        self.shapes = {f"encoder.{name}": shape for name, shape in self._encoder.shapes.items()}

    def mapped(self) -> "Network":
        """The same structure in operations that `torch.func.vmap` maps over stacked tensors."""
        return Network(self._model, self.shape.classes, mapped=True)

    def check(self, tensors: Tensors, source: str) -> None:
        """Raise UsageError unless `tensors` holds exactly this encoder's tensors,
        below `encoder.`, in its shapes.
        """
        expected = self.shapes
        found = {
            name: tuple(value.shape)
            for name, value in tensors.items()
            if name.startswith("encoder.")
        }
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

    def apply_stem(self, tensors: Tensors, images: Tensor) -> Tensor:
        """The encoder's input: images [n, 3, S, S], or the maps that a frozen stem makes of them.

        Images pass the stem one at a time: maps are then the same bytes, however images are
        batched.
        """
        if not self.has_stem:
            return images
        stem = self._encoder.part("stem")
        context = Context(strip_prefix("encoder", tensors), training=False)
        return torch.cat([stem(image, context) for image in images.unsqueeze(1)])

    def encode(
        self, tensors: Tensors, inputs: Tensor, *, prefix: str = "encoder", training: bool = False
    ) -> Tensor:
        """Features [n, features] of an encoder's input;
        in `training` BatchNorm uses and updates batch statistics.
        """
        return cast(
            Tensor, self._encoder.rest(inputs, Context(strip_prefix(prefix, tensors), training))
        )

    def part(
        self,
        name: str,
        tensors: Tensors,
        inputs: Tensor,
        *,
        prefix: str = "encoder",
        training: bool = False,
    ) -> Any:
        """What one direct child of the encoder module makes of what the one before gave."""
        return self._encoder.part(name)(inputs, Context(strip_prefix(prefix, tensors), training))

    def linear(self, tensors: Tensors, name: str, inputs: Tensor) -> Tensor:
        """The fully connected layer `name` of the tensors."""
        return functional.linear(inputs, tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    def cross_entropy(self, logits: Tensor, labels: Tensor | int) -> Tensor:
        """Mean cross-entropy of logits [n, c]; an int labels every row alike."""
        if isinstance(labels, int):
            labels = torch.full((len(logits),), labels, device=logits.device)
        return functional.cross_entropy(logits, labels)

    def reverse(self, features: Tensor, scale: float) -> Tensor:
        """`features`, whose gradient will be multiplied by -scale."""
        return cast(Tensor, _Reverse.apply(features, scale))  # type: ignore[no-untyped-call]

    @staticmethod
    def flat(tensors: Tensors, prefixes: Iterable[str]) -> Tensor:
        """All values under `prefixes` that gradients move, as one vector, ordered by name."""
        return torch.cat(
            [
                value.flatten()
                for name, value in sorted(select(tensors, prefixes).items())
                if is_trainable(name)
            ]
        )

    def features(self, personal: Tensors, images: Tensor) -> Tensor:
        """The features [n, features] of a personal model that its classifier takes."""
        return self._features(personal, self.apply_stem(personal, images))

    def _features(self, personal: Tensors, inputs: Tensor) -> Tensor:
        fusion = infer_fusion(personal)
        return fusion.fuse(
            [self.encode(personal, inputs, prefix=prefix) for prefix in fusion.encoders], personal
        )

    def predict(self, personal: Tensors, images: Tensor) -> Tensor:
        """Logits [n, classes] of a personal model."""
        return self.logits(personal, self.apply_stem(personal, images))

    def logits(self, personal: Tensors, inputs: Tensor) -> Tensor:
        """Logits [n, classes] of a personal model for what its `apply_stem` gave."""
        return self.linear(personal, "classifier", self._features(personal, inputs))


def to_tensors(arrays: dict[str, np.ndarray], device: str = "cpu") -> Tensors:
    """Copies as torch tensors (aligned by torch's allocator,
    so that arithmetic does not depend on their origin).
    """
    return {name: torch.from_numpy(array).to(device, copy=True) for name, array in arrays.items()}


def to_arrays(tensors: Tensors) -> dict[str, np.ndarray]:
    """Copies as numpy arrays."""
    return {
        name: value.detach().cpu().contiguous().numpy().copy() for name, value in tensors.items()
    }
