"""A guess of a picture from an image's features, learnt on the attacker's own images."""

import numpy as np
import torch
from torch import Tensor

from edge_node.extensions.audit import measures
from edge_node.extensions.audit.attack_scores import to_pictures
from trainer.data.class_folders import LabelledImages

_PENALTIES = 10.0 ** np.arange(2, -4, -1)  # in mean squared lengths of the features


class FeatureDecoder:
    """Ridge regression of pictures on features,
    whose penalty suits the images left out in turn best.

    `blind` is the picture [3, SIDE, SIDE] of who sees nothing: the mean of the attacker's images.
    """

    def __init__(self, features: np.ndarray, own: LabelledImages):
        """Learn from the features [n, d] of the attacker's images, n > 1."""
        pictures = to_pictures(own)
        self.blind = pictures.mean(0)
        self._mean = features.mean(0, dtype=np.float64)
        self._known = features - self._mean
        wanted = (pictures - self.blind).flatten(1).double().numpy()
        kernel = self._known @ self._known.T
        values, vectors = np.linalg.eigh(kernel)
        along = vectors.T @ wanted
        scale = max(float(values.mean()), 1e-30)

        def left_out(penalty: float) -> float:
            shrunk = np.maximum(values, 0) / (np.maximum(values, 0) + penalty * scale)
            # in its own guess, the mean included
            own_part = (np.square(vectors) * shrunk).sum(1) + 1 / len(own.labels)
            return float(
                np.square(
                    (wanted - vectors @ (shrunk[:, None] * along)) / (1 - own_part)[:, None]
                ).mean()
            )

        best = min(_PENALTIES, key=left_out)
        self._weights = vectors @ (along / (np.maximum(values, 0) + best * scale)[:, None])

    def guess(self, feature: np.ndarray) -> Tensor:
        """The picture [3, SIDE, SIDE] of a feature [d]."""
        made = torch.from_numpy((feature - self._mean) @ self._known.T @ self._weights)
        return (self.blind + made.float().view(3, measures.SIDE, measures.SIDE)).clamp(0, 1)
