"""Differential privacy of embeddings: noise that a sensor adds on purpose, and how much it hides.

What counts as one person's or product's data is a product's sample at a sensor; whoever reads a
product's embeddings should hardly be able to tell it from another sample. A sample weighs in every
round whose window holds its product, and every time that its embedding leaves the sensor adds to
what is known of it (`count_releases`, `spent_epsilon`).

What this does not bound: a model that was trained on a sample carries traces of it into the
embeddings of other products. For that, training would have to be private, too.
"""

import hashlib
import struct
from collections import Counter
from math import ceil, inf, sqrt
from pathlib import Path

import msgspec
import numpy as np

from broker_config.protocol.errors import EdgeNodeError
from broker_config.protocol.vfl_messages import Privacy, VflSpec
from broker_config.security.one_time import digest_spec
from broker_config.storage import checksums, disk
from trainer.privacy import accountant
from trainer.privacy.accountant import DELTA
from trainer.privacy.noise import derive_key, draw_normal
from trainer.vfl.channel_noise import Array


def protect(privacy: Privacy, embedding: Array, secret: bytes, copy: int = 0) -> Array:
    """Each row of an embedding [N, D] cut to the length `clip`,
    then noise of `multiplier` such lengths (Gaussian).

    The noise is derived from the secret, the protection and the row. Nobody without the secret can
    remove it. Asking again for a row returns the same value. Two embeddings never share noise, at
    whatever scale; equal rows are numbered, so that their noise differs. `copy` tells apart two
    messages that need noise of their own. The secret must be the run's: see `run_secret`.
    """
    if not privacy.clip:
        return embedding
    if len(secret) < 16:
        raise ValueError("a sensor that protects its embeddings needs a secret of its own")
    length = np.linalg.norm(embedding, axis=1, keepdims=True)
    cut = embedding * np.minimum(1, privacy.clip / np.maximum(length, 1e-12))
    keys = []
    scale = struct.pack(">dd", privacy.clip, privacy.multiplier)
    equal = Counter[bytes]()
    for row in embedding:
        data = row.tobytes()
        salt = copy.to_bytes(1, "little") + equal[data].to_bytes(8, "little")
        keys.append(hashlib.blake2b(data, key=secret, salt=salt, person=scale).digest())
        equal[data] += 1
    return np.asarray(
        cut + privacy.multiplier * privacy.clip * draw_normal(keys, embedding.shape[1]), np.float32
    )


def run_secret(secret: bytes, spec: VflSpec) -> bytes:
    """Return what a sensor draws its noise by in one run, from the secret of its state folder."""
    return derive_key(secret, b"embeddings", digest_spec(spec).encode())


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """What one run has told of a product."""

    rounds: int = 0  # that count for the product
    again: int = 0  # further embeddings of a round that was begun again
    squared: float = 0.0  # squared distance, in deviations of the noise


class ProtectionAccount:
    """What a sensor's runs have told of one product, in a file of its state folder.

    A product's sample has the same embedding at the beginning of two runs, and nearly the same
    whenever a round is begun again, with noise of its own each time: what all tell adds up.

    Raises:
        EdgeNodeError: the file is damaged.
    """

    def __init__(self, folder: Path):
        self._path = folder / "protection.json"
        try:
            self._told = checksums.read_record(self._path, dict[str, _Told]) or {}
        except checksums.DamagedError as error:
            raise EdgeNodeError(
                f"the account of what this sensor's embeddings have told, {self._path}, is "
                f"damaged: {error}",
                "restore it from a copy; without one, remove it and add the earlier runs' epsilon "
                "yourself",
            ) from error

    def spend(self, spec: VflSpec, round_: int) -> None:
        """Write down, before a round's embeddings leave, what a product has spent by then."""
        if not spec.privacy.clip * spec.privacy.multiplier:
            return
        run = digest_spec(spec)
        before = self._told.get(run, _Told())
        rounds = max(before.rounds, round_)
        again = before.again + (round_ <= before.rounds)
        copies = 2 if spec.denoising.target == "noisy" and spec.denoising.rounds else 1
        times = count_releases(spec, rounds) + copies * again
        squared = 4 * times / spec.privacy.multiplier**2
        self._told[run] = _Told(rounds=rounds, again=again, squared=squared)
        with disk.writing(self._path.parent):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            checksums.write_record(self._path, self._told)

    def describe(self, spec: VflSpec) -> str:
        """What a product has spent in all; "" if there was one run without repeated rounds."""
        told = self._told.get(digest_spec(spec))
        if told is None or (len(self._told) < 2 and not told.again):
            return ""
        epsilon = accountant.spent_epsilon(
            sqrt(sum(each.squared for each in self._told.values())), DELTA
        )
        runs = len(self._told)
        begun = sum(each.again for each in self._told.values())
        return (
            f"with all of this sensor's runs ({runs}) and rounds that were begun again ({begun}), "
            f"epsilon {epsilon:.3g}"
        )


def count_releases(spec: VflSpec, rounds: int) -> int:
    """The most often that the embedding of one product leaves a sensor in so many rounds."""
    window = spec.window
    times = min(rounds, ceil(window.size / window.chunk)) if window.size else rounds
    times_or_zero = min(times, spec.denoising.rounds) if spec.denoising.target == "noisy" else 0
    return times + times_or_zero


def spent_epsilon(privacy: Privacy, times: int, delta: float) -> float:
    """Epsilon: for a product whose embedding left a sensor so often, at this delta;
    infinite without protection.

    Two samples' cut embeddings lie at most 2 `clip` apart.
    """
    if not times:
        return 0.0
    if not privacy.clip * privacy.multiplier:
        return inf
    return accountant.spent_epsilon(2 * sqrt(times) / privacy.multiplier, delta)


def describe_spent(spec: VflSpec, rounds: int) -> str:
    """What a product whose embedding has left its sensor most often has spent so far;
    "" if nothing protects it.
    """
    if not spec.privacy.clip:
        return ""
    epsilon = spent_epsilon(spec.privacy, count_releases(spec, rounds), DELTA)
    return (
        f"after {rounds} rounds a product has spent epsilon {epsilon:.3g} of its protection, at "
        f"delta {DELTA:g}"
    )
