"""A node's images as training sees them: on the device, normalised, varied where augmentation is asked for."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from broker_config.protocol.messages import Preprocessing
from trainer.data.class_folders import LabelledImages
from trainer.models.network import Network, Tree


class Views(NamedTuple):
    """How each of some images is varied; drawn on the CPU, whatever the device."""

    turns: Tensor  # bool [3, b, 1, 1, 1]: mirrored, upside down, transposed
    light: Tensor  # [2, b, 1, 1, 1]: change of contrast and brightness, within 20 %

    @staticmethod
    def draw(count: int, random: torch.Generator) -> "Views":
        """Of `count` images."""
        turns = torch.rand((3, count, 1, 1, 1), generator=random) < 0.5
        return Views(turns, torch.rand((2, count, 1, 1, 1), generator=random) * 0.4 - 0.2)


class TrainingSet(NamedTuple):
    """Images of a node, or of several nodes one after the other, ready for the network."""

    images: Tensor  # uint8 [n, 3, S, S]
    labels: Tensor  # int64 [n]
    mean: Tensor  # [3, 1, 1]
    std: Tensor
    seen: Tensor | None = None  # what the network's stem makes of the images as they are, where that is kept

    @staticmethod
    def of(images: LabelledImages, preprocessing: Preprocessing, device: str = "cpu") -> "TrainingSet":
        """From uint8 [n, S, S, 3] and the federation's preprocessing."""
        return TrainingSet(
            torch.from_numpy(np.ascontiguousarray(images.images)).to(device).permute(0, 3, 1, 2),
            torch.from_numpy(np.asarray(images.labels, np.int64)).to(device),
            torch.tensor(preprocessing.mean, device=device)[:, None, None],
            torch.tensor(preprocessing.std, device=device)[:, None, None],
            None if images.seen is None else torch.from_numpy(images.seen).to(device),
        )

    @staticmethod
    def joined(sets: "Sequence[TrainingSet]") -> "TrainingSet":
        """One set's images after another's."""
        first = sets[0]
        images, labels = torch.cat([each.images for each in sets]), torch.cat([each.labels for each in sets])
        seen = None if first.seen is None else torch.cat([each.seen for each in sets if each.seen is not None])
        return first._replace(images=images, labels=labels, seen=seen)

    def network_input(self, index: Tensor | slice, views: Views | None = None) -> Tensor:
        """Images [b, 3, S, S], varied if `views` are given, normalised."""
        images: Tensor = self.images[index].float() / 255
        if views is not None:
            images = augment(images, views)
        return (images - self.mean) / self.std

    def keep_seen(self, network: Network, tree: Tree) -> "TrainingSet":
        """With what a frozen stem makes of the images, if there is one: it is computed now, and never again."""
        if self.seen is not None or not network.has_stem:
            return self
        return self._replace(seen=network.stem(tree, self.network_input(slice(None))))

    def see(self, network: Network, tree: Tree, index: Tensor | slice, views: Views | None = None) -> Tensor:
        """What the network's stem makes of images, varied if `views` are given: what encoders start from."""
        if self.seen is None or views is not None:
            return network.stem(tree, self.network_input(index, views))
        return self.seen[index]


def augment(images: Tensor, views: Views) -> Tensor:
    """One of the square's eight symmetries, other contrast and brightness, for each image [b, 3, S, S] in 0..1.

    A surface has no up or left; its lighting varies. Defects stay what they are.
    """
    mirror, flip, turn = views.turns.to(images.device)
    contrast, brightness = views.light.to(images.device)
    images = torch.where(mirror, images.flip(3), images)
    images = torch.where(flip, images.flip(2), images)
    images = torch.where(turn, images.transpose(2, 3), images)
    mean = images.mean((1, 2, 3), keepdim=True)
    varied: Tensor = (images - mean) * (1 + contrast) + mean * (1 + brightness)
    return varied.clamp(0, 1)
