"""Noise that a sensor adds to its embeddings on purpose, and how much it hides.

What counts as one person's or product's data is a product's sample at a sensor; whoever reads a product's embeddings
should hardly be able to tell it from another sample. A sample weighs in every round whose window holds its product,
and every time that its embedding leaves the sensor adds to what is known of it (`releases`, `spent`).

What this does not bound: a model that was trained on a sample carries traces of it into the embeddings of other
products. For that, training would have to be private, too.
"""

import hashlib
from math import ceil, erfc, exp, inf, log, log1p, pi, prod, sqrt

import numpy as np

from broker_config.vertical import LineSpec, Privacy
from trainer.vertical.channel import Array, Doubles

DELTA = 1e-5  # of what is told


def protected(privacy: Privacy, embedding: Array, secret: bytes, copy: int = 0) -> Array:
    """Each row of an embedding [N, D] cut to the length `clip`, then noise of `multiplier` such lengths (Gaussian).

    The noise follows from the sensor's secret and the embedding itself. So nobody else can draw it and take it off; who
    replays a round repeats what was said and reveals nothing new; and no two embeddings ever have the same noise, whose
    difference would show theirs. `copy` tells apart two messages that shall have noise of their own.
    """
    if not privacy.clip:
        return embedding
    if len(secret) < 16:
        raise ValueError("a sensor that protects its embeddings needs a secret of its own")
    length = np.linalg.norm(embedding, axis=1, keepdims=True)
    cut = embedding * np.minimum(1, privacy.clip / np.maximum(length, 1e-12))
    key = hashlib.blake2b(embedding.tobytes(), key=secret, salt=bytes([copy])).digest()
    return np.asarray(cut + privacy.multiplier * privacy.clip * _normal(key, embedding.shape), np.float32)


def releases(spec: LineSpec, rounds: int) -> int:
    """How often the embedding of one product leaves a sensor in so many rounds, at most."""
    window = spec.window
    times = min(rounds, ceil(window.size / window.chunk)) if window.size else rounds
    return times + (min(times, spec.denoising.rounds) if spec.denoising.target == "noisy" else 0)


def spent(privacy: Privacy, times: int, delta: float) -> float:
    """Epsilon: for a product whose embedding left a sensor so often, at this delta; infinite without protection.

    Two samples' cut embeddings lie at most 2 `clip` apart. n releases with Gaussian noise tell them apart exactly as
    well as one whose noise is smaller by the root of n (Dong et al. 2022), and for one the relation of epsilon and
    delta is known (Balle and Wang 2018). So this is no bound that could be tightened.
    """
    if not times:
        return 0.0
    if not privacy.clip * privacy.multiplier:
        return inf
    distance = 2 * sqrt(times) / privacy.multiplier
    low, high = 0.0, 1.0
    while revealed(distance, high) > delta:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if revealed(distance, middle) > delta else (low, middle)
    return high


def account(spec: LineSpec, rounds: int) -> str:
    """What a product whose embedding has left its sensor most often has spent so far; "" if nothing protects it."""
    if not spec.privacy.clip:
        return ""
    epsilon = spent(spec.privacy, releases(spec, rounds), DELTA)
    return f"after {rounds} rounds a product has spent epsilon {epsilon:.3g} of its protection, at delta {DELTA:g}"


def revealed(distance: float, epsilon: float) -> float:
    """Delta of one Gaussian release at this epsilon, for two values so many standard deviations apart."""
    first, second = distance / 2 - epsilon / distance, -distance / 2 - epsilon / distance
    return exp(_log_normal_cdf(first)) - exp(epsilon + _log_normal_cdf(second))


def _log_normal_cdf(x: float) -> float:
    if x > -20:
        return log(erfc(-x / sqrt(2)) / 2)
    return -x * x / 2 - log(-x * sqrt(2 * pi)) + log1p(-(x**-2) + 3 * x**-4)  # Mills' ratio: to 1e-7


def _normal(key: bytes, shape: tuple[int, ...]) -> Doubles:
    """Normal numbers from a cryptographic stream (SHAKE-256, Box and Muller)."""
    count = prod(shape)
    half = -(-count // 2)
    bits = np.frombuffer(hashlib.shake_256(key).digest(16 * half), "<u8").reshape(2, half)
    radius, angle = ((bits >> np.uint64(11)) + 0.5) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log(radius)), 2 * np.pi * angle
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count].reshape(shape)
