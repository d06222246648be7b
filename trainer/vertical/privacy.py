"""Noise that a sensor adds to its embeddings on purpose."""

import numpy as np

from broker_config.vertical import Privacy
from trainer.vertical.channel import Array


def protected(privacy: Privacy, embedding: Array, random: np.random.Generator) -> Array:
    """Each row of an embedding [N, D] cut to the length `clip`, then noise of `multiplier` such lengths (Gaussian)."""
    if not privacy.clip:
        return embedding
    length = np.linalg.norm(embedding, axis=1, keepdims=True)
    cut = embedding * np.minimum(1, privacy.clip / np.maximum(length, 1e-12))
    noise = random.normal(0, privacy.multiplier * privacy.clip, embedding.shape)
    return np.asarray(cut + noise, np.float32)
