"""Anomaly detection from good images alone:
a Gaussian of the features that a network for photographs has at places.

After Rippel, Mertens and Merhof, "Modeling the distribution of normal data in pre-trained deep
features for anomaly detection", ICPR 2020, and Defard et al., "PaDiM", 2021. A surface looks alike
everywhere, so that all places share one Gaussian, and a part need not lie in the same place in each
image.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import stdtrit
from sklearn.covariance import ledoit_wolf
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from trainer.models import backbones
from trainer.models.encoders.staged_encoder import StagedEncoder
from trainer.models.initial_weights import initial_encoder
from trainer.models.named_tensors import strip_prefix

MODEL = "efficientnet_lite0"  # its ImageNet weights come with edge-node-weights
# last blocks of its fourth and fifth stage, with 80 and 112 channels: later ones blur the place
_TAPS = ("_blocks.7", "_blocks.10")
# of the mean over places: a small defect counts, and so does a surface that is strange all over
_POWER = 4
_BATCH = 16  # images
_FOLDS = 5
FALSE_REJECTS = 0.01  # share of good images that a threshold is to reject

# ImageNet's mean and standard deviation, of values from 0 to 255.
_MEAN = (123.675, 116.28, 103.53)
_STD = (58.395, 57.12, 57.375)


class PlaceFeatures(nn.Module):
    """Features of an image's places, 16 pixels apart, each averaged with its neighbours'."""

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        # an exported graph has no place for layers that do not run
        self.encoder = StagedEncoder.of(backbones.build(MODEL), _TAPS[-1])
        arrays = strip_prefix("encoder", initial_encoder(MODEL, "imagenet", seed=0))
        for name, value in self.encoder.state_dict().items():
            value.copy_(torch.from_numpy(arrays[name]))
        self.register_buffer("mean", torch.tensor(_MEAN)[:, None, None])
        self.register_buffer("std", torch.tensor(_STD)[:, None, None])
        self.eval()

    def forward(self, image: Tensor) -> Tensor:
        """Uint8 [n, S, S, 3] -> [n, 192, S / 16, S / 16], rounded up."""
        values = (image.permute(0, 3, 1, 2).float() - self.mean) / self.std
        return torch.cat([_smooth(each) for each in self.encoder.maps(values, _TAPS)], 1)

    @torch.no_grad()
    def of_images(self, images: np.ndarray) -> Iterator[Tensor]:
        """The features [192, h, w] of images uint8 [n, S, S, 3], one after another."""
        for first in range(0, len(images), _BATCH):
            yield from self(torch.from_numpy(images[first : first + _BATCH]))


def _smooth(values: Tensor) -> Tensor:
    return avg_pool2d(values, 3, stride=1, padding=1, count_include_pad=False)


class PatchDensity(nn.Module):
    """The Gaussian of good features: features [n, d, h, w] -> how strange each place is,
    and each image.
    """

    mean: Tensor
    whitening: Tensor

    def __init__(self, mean: Tensor, whitening: Tensor):
        """`mean` [d]; `whitening` [d, d] makes the features' covariance the identity."""
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("whitening", whitening)

    @classmethod
    def fit(cls, features: Tensor) -> "PatchDensity":
        """Fit it to features [n, d, h, w], with the covariance shrunk after Ledoit and Wolf
        (2004).
        """
        places = features.permute(0, 2, 3, 1).reshape(-1, features.shape[1]).double().numpy()
        covariance, _ = ledoit_wolf(places)
        inverse = np.linalg.cholesky(np.linalg.inv(covariance)).T
        return cls(*(torch.from_numpy(array).float() for array in (places.mean(0), inverse)))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Squared Mahalanobis distance over d, about 1 for good ones: of places [n, h, w],
        and of images [n].

        An image's is the power mean of its places', of the fourth power: nearly that of its
        strangest place.
        """
        centred = (features - self.mean[:, None, None]).permute(0, 2, 3, 1)
        places = (centred @ self.whitening.T).square().mean(3)
        places = _smooth(places[:, None])[:, 0]
        return places, (places**_POWER).mean((1, 2)) ** (1 / _POWER)


class Judgement(NamedTuple):
    """When a distance is too large: its logarithm is compared,
    which is about normal among good images.
    """

    threshold: float
    slope: float  # of the logit of "strange", by the logarithm of the distance

    @classmethod
    def of(cls, distances: np.ndarray) -> "Judgement":
        """From distances [n] of good images: a further one exceeds the threshold with
        probability FALSE_REJECTS.

        That is the upper prediction limit of a normal sample; at the mean, "strange" has that
        probability too.
        """
        logarithms = np.log(distances)
        count = len(logarithms)
        mean = logarithms.mean()
        deviation = logarithms.std(ddof=1)
        excess = deviation * np.sqrt(1 + 1 / count) * stdtrit(count - 1, 1 - FALSE_REJECTS)
        return cls(float(mean + excess), float(np.log(1 / FALSE_REJECTS - 1) / excess))

    def rejects(self, distances: np.ndarray) -> np.ndarray:
        """Whether each is too large, bool [n]."""
        rejected: np.ndarray = np.log(distances) >= self.threshold
        return rejected


def cross_validate(
    features: Tensor, groups: np.ndarray, strange: Tensor | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Distances of good images, each under the Gaussian of others, and of strange ones,
    as if they were such images.

    Args:
        features: [n, d, h, w] of good images.
        groups: [n] numbers; images of one number are alike, and judged together.
        strange: [m, d, h, w]; their distances are the geometric means under all folds' Gaussians.
    """
    good = np.empty(len(features))
    others = []
    for fold in range(_FOLDS):
        inside = groups % _FOLDS == fold
        density = PatchDensity.fit(features[~inside])
        good[inside] = density(features[inside])[1].numpy()
        if strange is not None:
            others.append(density(strange)[1].log().numpy())
    typical = np.exp(np.mean(others, 0)) if others else None
    return good, typical
