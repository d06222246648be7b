"""Differential privacy of embeddings: noise that a sensor adds on purpose, and how much it hides.

What counts as one person's or product's data is a product's sample at a sensor; whoever reads a
product's embeddings should hardly be able to tell it from another sample. A sample weighs in every
round whose window holds its product, and every time that its embedding leaves the sensor adds to
what is known of it (`count_releases`, `spent_epsilon`).

What this does not bound: a model that was trained on a sample carries traces of it into the
embeddings of other products. For that, training would have to be private, too.
"""

import hashlib
import secrets
import struct
from collections import Counter
from math import ceil, inf, sqrt
from pathlib import Path

import msgspec
import numpy as np

from broker_config.protocol.errors import EdgeNodeError
from broker_config.protocol.round_contents import BOUND_REVISION
from broker_config.security.one_time import digest_spec
from broker_config.storage import checksums, disk
from edge_node.extensions.vfl.channel_noise import Array
from edge_node.extensions.vfl.messages import Privacy, VflSpec
from trainer.privacy.epsilon import DELTA
from trainer.privacy.epsilon import spent_epsilon as epsilon_of_distance
from trainer.privacy.noise import derive_key, draw_normal


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


_KEY_FILE = "secret.json"
# an older copy in the place of one must not make a sensor forget what it has told
_ACCOUNT = ("protection.json", "protection-copy.json")
_RESTORE = (
    "restore it from a copy; without one, take part in a new run with another --state folder, and "
    "add the earlier runs' epsilon yourself"
)


def open_protection(folder: Path, spec: VflSpec, *, is_known: bool) -> None:
    """Make a sensor's secret and its account of a protected run, where the run is new.

    `is_known` says whether the state folder was in the run before. Then both have to be there:
    a new secret would draw other noise for what was sent before, and a new account would not
    count it.

    Raises:
        EdgeNodeError: one is missing, or damaged.
    """
    if not spec.privacy.clip:
        return
    account = ProtectionAccount(folder)
    if is_known and not account.knows(spec):
        raise EdgeNodeError(
            f"this sensor was in run {spec.run}, and {folder / _ACCOUNT[0]}, which knew what its "
            "embeddings have told, does not know it",
            f"put {_ACCOUNT[0]} back from the newest copy of {folder}; without one, take part in "
            "a new run only, and add the earlier runs' epsilon yourself",
        )
    if account.is_empty and _read_secret(folder) is None:
        with disk.writing(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            checksums.write_record(folder / _KEY_FILE, secrets.token_bytes(32))
    load_secret(folder)
    account.begin(spec)


def load_secret(folder: Path) -> bytes:
    """Return what a sensor draws its noise by, which nobody else knows.

    Raises:
        EdgeNodeError: it is missing, or damaged.
    """
    secret = _read_secret(folder)
    if secret is None:
        raise EdgeNodeError(
            f"{folder / _KEY_FILE} is missing, by which this sensor has drawn the noise of earlier "
            "embeddings",
            _RESTORE,
        )
    return secret


def _read_secret(folder: Path) -> bytes | None:
    path = folder / _KEY_FILE
    try:
        return checksums.read_record(path, bytes)
    except checksums.DamagedError as error:
        raise EdgeNodeError(f"the secret {path} is damaged: {error}", _RESTORE) from error


def needed_revision(spec: VflSpec) -> int:
    """Return the revision of the protocol that a sensor of this federation must know."""
    return BOUND_REVISION if spec.privacy.clip else 0


def predates_binding(spec: VflSpec) -> bool:
    """Return whether the noise of a run is of an earlier version, and could hide two embeddings."""
    return spec.revision < needed_revision(spec)


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
        self._paths = [folder / name for name in _ACCOUNT]
        try:
            copies = checksums.read_copies(self._paths, dict[str, _Told])
        except checksums.DamagedError as error:
            raise EdgeNodeError(
                f"the account of what this sensor's embeddings have told, {self._paths[0]} and "
                f"its copy, is damaged: {error}",
                "restore it from a copy, the newest; without one, take part in a new run with "
                "another --state folder, and add the earlier runs' epsilon yourself",
            ) from error
        self._told = max(copies, key=_count_writes, default={})

    @property
    def is_empty(self) -> bool:
        """Whether no protected run is on it."""
        return not self._told

    def knows(self, spec: VflSpec) -> bool:
        """Return whether a run is on it."""
        return digest_spec(spec) in self._told

    def begin(self, spec: VflSpec) -> None:
        """Write down that the sensor takes part in a run."""
        self._told.setdefault(digest_spec(spec), _Told())
        self._write()

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
        self._write()

    def describe(self, spec: VflSpec) -> str:
        """What a product has spent in all; "" if there was one run without repeated rounds."""
        told = self._told.get(digest_spec(spec))
        played = [each for each in self._told.values() if each.rounds]
        if told is None or (len(played) < 2 and not told.again):
            return ""
        epsilon = epsilon_of_distance(sqrt(sum(each.squared for each in played)), DELTA)
        runs = len(played)
        begun = sum(each.again for each in played)
        return (
            f"with all of this sensor's runs ({runs}) and rounds that were begun again ({begun}), "
            f"epsilon {epsilon:.3g}"
        )

    def _write(self) -> None:
        folder = self._paths[0].parent
        with disk.writing(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            checksums.write_copies(self._paths, self._told)


def _count_writes(told: dict[str, _Told]) -> tuple[int, int]:
    """Return what only grows: runs, and rounds that were begun in them."""
    return len(told), sum(each.rounds + each.again for each in told.values())


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
    return epsilon_of_distance(2 * sqrt(times) / privacy.multiplier, delta)


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
