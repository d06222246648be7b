"""A network that guesses a picture from an image's features; it learns on the attacker's own images."""

import numpy as np
import torch
from torch import Tensor

from trainer.audit import measures
from trainer.audit.comparison import to_pictures
from trainer.audit.fitted_network import fitted, perceptron
from trainer.data.class_folders import LabelledImages
from trainer.training.seeding import generator, key_to_seed

_EPOCHS, _BATCH = 60, 16


class FeatureDecoder:
    """Learns from features [n, d] of the attacker's images; `blind` is these images' mean [3, SIDE, SIDE]."""

    def __init__(self, features: np.ndarray, own: LabelledImages, seed: int):
        known, pictures = torch.from_numpy(features).float(), to_pictures(own)
        self._mean, self._deviation = known.mean(0), known.std(0).clamp_min(1e-6)
        self.blind = pictures.mean(0)
        scaled, random = (known - self._mean) / self._deviation, generator(seed, "decoder")
        torch.manual_seed(key_to_seed(seed, "decoder"))
        network = perceptron(scaled.shape[1], 3, measures.SIDE, measures.SIDE)
        self._fitted = fitted(network, lambda: (scaled, pictures), _EPOCHS, random, _BATCH)

    def guess(self, feature: np.ndarray) -> Tensor:
        """The picture [3, SIDE, SIDE] of a feature [d]."""
        scaled = (torch.from_numpy(feature).float() - self._mean) / self._deviation
        return torch.from_numpy(self._fitted.guess(scaled[None]))[0]
