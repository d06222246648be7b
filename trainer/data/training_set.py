"""A node's images as training sees them: on the device, normalised, augmented on request."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from broker_config.protocol.messages import Preprocessing
from trainer.data.class_folders import LabelledImages
from trainer.models.network import Network, Tensors
from trainer.progress.long_work import check_stop

_BATCH_PIXELS = 1 << 18  # about; more take memory, and are no faster


class Augmentation(NamedTuple):
    """The augmentation of each image of a batch; drawn on the CPU, whatever the device."""

    symmetries: Tensor  # bool [3, b, 1, 1, 1]: mirrored, upside down, transposed
    lighting: Tensor  # [2, b, 1, 1, 1]: change of contrast and brightness, within 20 %

    @staticmethod
    def draw(count: int, random: torch.Generator) -> "Augmentation":
        """A random augmentation of `count` images."""
        symmetries = torch.rand((3, count, 1, 1, 1), generator=random) < 0.5
        return Augmentation(
            symmetries, torch.rand((2, count, 1, 1, 1), generator=random) * 0.4 - 0.2
        )


class TrainingSet(NamedTuple):
    """Images of a node, or of several nodes one after the other, ready for the network."""

    images: Tensor  # uint8 [n, 3, S, S]
    labels: Tensor  # int64 [n]
    mean: Tensor  # [3, 1, 1]
    std: Tensor
    stem_output: Tensor | None = None  # for the unaugmented images, where it is cached

    @staticmethod
    def of(
        images: LabelledImages, preprocessing: Preprocessing, device: str = "cpu"
    ) -> "TrainingSet":
        """From uint8 [n, S, S, 3] and the federation's preprocessing."""
        stem_output = (
            None if images.stem_output is None else torch.from_numpy(images.stem_output).to(device)
        )
        return TrainingSet(
            torch.from_numpy(np.ascontiguousarray(images.images)).to(device).permute(0, 3, 1, 2),
            torch.from_numpy(np.asarray(images.labels, np.int64)).to(device),
            torch.tensor(preprocessing.mean, device=device)[:, None, None],
            torch.tensor(preprocessing.std, device=device)[:, None, None],
            stem_output,
        )

    @staticmethod
    def joined(sets: "Sequence[TrainingSet]") -> "TrainingSet":
        """One set's images after another's."""
        first = sets[0]
        images = torch.cat([each.images for each in sets])
        labels = torch.cat([each.labels for each in sets])
        kept = [each.stem_output for each in sets if each.stem_output is not None]
        stem_output = torch.cat(kept) if kept else None
        return first._replace(images=images, labels=labels, stem_output=stem_output)

    def network_input(
        self, index: Tensor | slice, augmentation: Augmentation | None = None
    ) -> Tensor:
        """Images [b, 3, S, S], normalised, and augmented if `augmentation` is given."""
        images: Tensor = self.images[index].float() / 255
        if augmentation is not None:
            images = augment(images, augmentation)
        return (images - self.mean) / self.std

    def with_stem_output(self, network: Network, tensors: Tensors) -> "TrainingSet":
        """The set with the output of a frozen stem, if there is one, computed once."""
        if self.stem_output is not None or not network.has_stem:
            return self
        return self._replace(
            stem_output=network.apply_stem(tensors, self.network_input(slice(None)))
        )

    def encoder_input(
        self,
        network: Network,
        tensors: Tensors,
        index: Tensor | slice,
        augmentation: Augmentation | None = None,
    ) -> Tensor:
        """The encoders' input: the stem's output for images,
        augmented if `augmentation` is given.
        """
        if self.stem_output is None or augmentation is not None:
            return network.apply_stem(tensors, self.network_input(index, augmentation))
        return self.stem_output[index]

    def in_batches(
        self, compute: Callable[[Tensors, Tensor], Tensor], network: Network, tensors: Tensors
    ) -> np.ndarray:
        """Return [n, ...], what `compute` makes of the tensors and the encoders' input."""
        count = len(self.labels)
        pixels = self.images.shape[2] * self.images.shape[3]
        # Batches have nearly equal sizes: some kernels round a single image otherwise.
        parts = min(count, -(-count * pixels // _BATCH_PIXELS))
        bounds = [count * part // parts for part in range(parts + 1)]
        computed = []
        with torch.no_grad():
            for start, end in pairwise(bounds):
                check_stop()
                inputs = self.encoder_input(network, tensors, slice(start, end))
                computed.append(compute(tensors, inputs))
        return torch.cat(computed).cpu().numpy()


def augment(images: Tensor, augmentation: Augmentation) -> Tensor:
    """One of the square's eight symmetries, other contrast and brightness, for each image [b,
    3, S, S] in 0..1.

    A surface has no up or left; its lighting varies. Defects stay what they are.
    """
    mirror, flip, turn = augmentation.symmetries.to(images.device)
    contrast, brightness = augmentation.lighting.to(images.device)
    images = torch.where(mirror, images.flip(3), images)
    images = torch.where(flip, images.flip(2), images)
    images = torch.where(turn, images.transpose(2, 3), images)
    mean = images.mean((1, 2, 3), keepdim=True)
    varied: Tensor = (images - mean) * (1 + contrast) + mean * (1 + brightness)
    return varied.clamp(0, 1)


def encode_all(network: Network, tensors: Tensors, data: TrainingSet) -> np.ndarray:
    """Return features [n, features] of every image, by the encoder among the tensors."""
    return data.in_batches(network.encode, network, tensors)
