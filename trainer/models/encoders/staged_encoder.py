"""An encoder as a row of layers, with its features the means of the maps at some of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from trainer.models.encoders.encoder_module import EncoderModule, Evidence, explain_mean


class StagedEncoder(EncoderModule):
    """Layers that run one after another; the maps after the layers `taps` are the features' maps.

    The features are the means of these maps over height and width, side by side. All taps must have
    the same stride, so that their maps fit together without being resized: heat maps and int8
    graphs rely on that.

    A layer is named as PyTorch names it, for example `_blocks.14`.
    """

    def __init__(self, layers: Mapping[str, nn.Module], taps: Sequence[str]):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.taps = tuple(taps)

    @staticmethod
    def of(network: nn.Module, tap: str) -> StagedEncoder:
        """Return the children of `network` up to `tap`, which must run in their order.

        The tap may lie within a child, for example `_blocks.14`, if that child, too, does nothing
        but run its children in their order.
        """
        return StagedEncoder(_layers_up_to(network, tap), [tap])

    def maps(self, images: Tensor, names: Collection[str]) -> list[Tensor]:
        """Return the maps [n, c, h, w] after each of the layers `names`, in the order they run.

        One pass computes them all. Layers after the last one that is named do not run.
        """
        found = []
        for name, layer in self._steps(names):
            images = layer(images)
            if name in names:
                found.append(images)
                if len(found) == len(names):
                    break
        return found

    def feature_map(self, images: Tensor) -> Tensor:
        """Return the maps [n, features, h, w] whose means are the features."""
        found = self.maps(images, self.taps)
        return torch.cat(found, 1) if len(found) > 1 else found[0]

    def forward(self, images: Tensor) -> Tensor:
        """[n, 3, S, S] -> features [n, features]."""
        return self.feature_map(images).mean((2, 3))

    def explain(self, inputs: Tensor) -> tuple[Tensor, Evidence | None]:
        """Return the features, and class activation maps of the maps whose means they are."""
        return explain_mean(self.feature_map(inputs))

    def _steps(self, names: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
        """Yield the layers in order; a child is taken apart if a name lies within it."""
        for name, child in self.named_children():
            if any(each.startswith(f"{name}.") for each in names):
                for inner, layer in child.named_children():
                    yield f"{name}.{inner}", layer
            else:
                yield name, child


def _layers_up_to(network: nn.Module, last: str) -> OrderedDict[str, nn.Module]:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for name, layer in network.named_children():
        if last.startswith(f"{name}."):
            layers[name] = nn.Sequential(_layers_up_to(layer, last.removeprefix(f"{name}.")))
            break
        layers[name] = layer
        if name == last:
            break
    return layers
