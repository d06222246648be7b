"""Keys of one node for one round of masked contributions,
and the seeds of the masks that follow from them.

The masks are those of Bonawitz et al. (2017): one for each pair of nodes, which cancel in the sum,
and one of each node's own. A node draws one root for a round; all that it says in it follows from
that and from what it was told, so that a process that was killed says the same again. What a round
reveals says nothing about another one.
"""

import hashlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from broker_config.protocol import topics
from broker_config.protocol.messages import PublicKeys
from broker_config.security import secret_sharing
from broker_config.security.secret_sharing import SHARE_BYTES
from broker_config.security.signing import ForgedError

ROOT_BYTES = 32
# contexts of signatures
KEYS = "mask keys"
SURVIVORS = "survivors"
_NONCE = bytes(12)  # a key encrypts one message
_ANY = X25519PrivateKey.generate()  # with points that are no keys all private ones share the same


class Scope(NamedTuple):
    """The round that keys are for, under one spec: they mean nothing elsewhere."""

    federation: str
    run: str
    round: int
    spec: str  # digest


def draw_root() -> bytes:
    """The secret from which all of a node's secrets of one round follow."""
    return secrets.token_bytes(ROOT_BYTES)


def points(names: Sequence[str]) -> dict[str, int]:
    """Where each member of a cohort has its shares."""
    return {name: number for number, name in enumerate(sorted(names), 1)}


def digest_of(cohort: Mapping[str, PublicKeys]) -> str:
    """SHA-256 of a cohort's names and keys, hexadecimal."""
    lines = [" ".join((name, *_parts(keys))) for name, keys in sorted(cohort.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def keys_statement(scope: Scope, node: str, keys: PublicKeys) -> bytes:
    """What a node's signature under its keys covers."""
    return _lines(*scope, node, *_parts(keys))


def survivors_statement(
    scope: Scope, cohort: Mapping[str, PublicKeys], senders: Sequence[str], survivors: Sequence[str]
) -> bytes:
    """What a node's signature under the survivors of a round covers: of which cohort,
    and of whose masks.
    """
    return _lines(*scope, digest_of(cohort), ",".join(sorted(senders)), ",".join(sorted(survivors)))


class RoundSecrets:
    """What one node alone knows in one round.

    Args:
        root: from `draw_root`.
        scope: the round.
        node: the node's name.
    """

    def __init__(self, root: bytes, scope: Scope, node: str):
        self._root = root
        self._scope = scope
        self._node = node
        self.agreement = _derive(root, "agreement")
        self.own = _derive(root, "own mask")
        self._cipher = X25519PrivateKey.from_private_bytes(_derive(root, "cipher"))

    def public(self, classes: Sequence[int] = ()) -> PublicKeys:
        """The keys that belong to these secrets, unsigned,
        and the classes that the node tells with them.
        """
        return PublicKeys(
            agreement=public_key(self.agreement),
            cipher=self._cipher.public_key().public_bytes_raw().hex(),
            commitment=commitment(self.own),
            classes=tuple(classes),
        )

    def seeds(
        self, cohort: Mapping[str, PublicKeys], senders: Sequence[str]
    ) -> list[tuple[bytes, int]]:
        """The seed of each mask of this node, and its sign.

        Args:
            cohort: everybody's keys.
            senders: the other members with whom it has a mask.

        Raises:
            ForgedError: nobody can have a key that is among them.
        """
        pairs = pair_masks(
            self._scope,
            self.agreement,
            self._node,
            {name: cohort[name].agreement for name in senders},
        )
        return [(own_seed(self._scope, self.own, self._node), 1), *pairs]

    def neighbours(self, cohort: Collection[str], count: int) -> list[str]:
        """So many of the other members, to get shares of our secrets:
        which ones nobody else can guess.
        """
        others = sorted({*cohort} - {self._node})
        if count == len(others):
            return others
        return sorted(
            sorted(others, key=lambda name: _derive(self._root, f"neighbour {name}"))[:count]
        )

    def shares_for(
        self, names: Collection[str], cohort: Mapping[str, PublicKeys], threshold: int
    ) -> dict[str, bytes]:
        """For each of these members of a cohort: its shares of our two secrets,
        `agreement` then `own`.
        """
        found = digest_of(cohort)
        at = points(list(cohort))

        def split(purpose: str, secret: bytes) -> list[bytes]:
            wide = [
                int.from_bytes(_derive(self._root, f"{purpose} {found} {number}", 64), "big")
                for number in range(1, threshold)
            ]
            return secret_sharing.split(secret, wide, [at[name] for name in names])

        each = zip(split("agreement", self.agreement), split("own mask", self.own), strict=True)
        return {name: agreement + own for name, (agreement, own) in zip(names, each, strict=True)}

    def encrypt_shares(
        self, cohort: Mapping[str, PublicKeys], shares: Mapping[str, bytes]
    ) -> dict[str, str]:
        """Shares for other members, each encrypted for it, hexadecimal.

        ForgedError if nobody can have its key.
        """
        found = digest_of(cohort)
        return {
            name: self._aead(cohort[name], found, (self._node, name))
            .encrypt(_NONCE, each, None)
            .hex()
            for name, each in shares.items()
        }

    def decrypt_shares(
        self, cohort: Mapping[str, PublicKeys], encrypted: Mapping[str, str]
    ) -> dict[str, bytes]:
        """Other members' shares for us; of whoever has not encrypted any for this cohort there
        are none.
        """
        found = digest_of(cohort)
        shares = {}
        for name, text in encrypted.items():
            with suppress(InvalidTag, ValueError):
                cipher = self._aead(cohort[name], found, (name, self._node))
                shares[name] = cipher.decrypt(_NONCE, bytes.fromhex(text), None)
        return shares

    def _aead(self, other: PublicKeys, cohort: str, way: tuple[str, str]) -> ChaCha20Poly1305:
        shared = _exchange(self._cipher, other.cipher)
        return ChaCha20Poly1305(_hkdf(shared, "share", *map(str, self._scope), cohort, *way))


def pair_masks(
    scope: Scope, agreement: bytes, node: str, others: Mapping[str, str]
) -> list[tuple[bytes, int]]:
    """Seed of each mask that a node has in common with another, and the sign with which it,
    and not the other, adds it.

    Args:
        scope: the round.
        agreement: the node's secret.
        node: its name.
        others: their public keys, by name.

    Raises:
        ForgedError: nobody can have one of these keys.
    """
    private = X25519PrivateKey.from_private_bytes(agreement)
    signed_seeds: list[tuple[bytes, int]] = []
    for other, public in others.items():
        sign = 1 if node < other else -1
        signed_seeds.append(
            (
                _hkdf(
                    _exchange(private, public),
                    "pair mask",
                    *map(str, scope),
                    *sorted((node, other)),
                ),
                sign,
            )
        )
    return signed_seeds


def own_seed(scope: Scope, own: bytes, node: str) -> bytes:
    """The seed of a node's own mask."""
    return _hkdf(own, "own mask", *map(str, scope), node)


def public_key(agreement: bytes) -> str:
    """The public key that belongs to an `agreement` secret, hexadecimal."""
    return X25519PrivateKey.from_private_bytes(agreement).public_key().public_bytes_raw().hex()


def commitment(own: bytes) -> str:
    """What binds a node to the secret of its own mask, and says nothing about it; hexadecimal."""
    return _derive(own, "commitment").hex()


def check(keys: PublicKeys) -> None:
    """Raise ForgedError if nobody can have one of these keys: whoever used it would fail,
    or share its secret.
    """
    for public in (keys.agreement, keys.cipher):
        _exchange(_ANY, public)


def split_pair(shares: bytes) -> tuple[bytes, bytes]:
    """The share of `agreement` and that of `own`;
    ForgedError if they are not as long as such are.
    """
    if len(shares) != 2 * SHARE_BYTES:
        raise ForgedError("its shares are of another length")
    return shares[:SHARE_BYTES], shares[SHARE_BYTES:]


def _exchange(private: X25519PrivateKey, public: str) -> bytes:
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(public)))
    except ValueError:
        raise ForgedError("nobody can have that key") from None


def _parts(keys: PublicKeys) -> tuple[str, str, str, str]:
    return keys.agreement, keys.cipher, keys.commitment, ",".join(map(str, keys.classes))


def _lines(*parts: object) -> bytes:
    """No part holds a line break, so it is certain where each ends."""
    return "\n".join(map(str, parts)).encode()


def _context(*parts: str) -> bytes:
    return "\0".join((topics.ROOT, *parts)).encode()


def _derive(secret: bytes, purpose: str, length: int = 32) -> bytes:
    return HKDFExpand(SHA256(), length, _context("masks", purpose)).derive(secret)


def _hkdf(secret: bytes, *parts: str) -> bytes:
    return HKDF(SHA256(), 32, None, _context(*parts)).derive(secret)
