"""Group key of a federation's members: what is encrypted with it, and how it reaches them.

The coordinator's process draws it and encrypts it for each node's process (HPKE, RFC 9180). Every key that is used is
derived from it (HKDF with SHA-256) for one topic; what is encrypted is authenticated, too (ChaCha20-Poly1305).
"""

import secrets
from functools import lru_cache
from typing import NamedTuple, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from broker_config.protocol import topics
from broker_config.security.signing import ForgedError

KEY_BYTES = 32
ID_BYTES = 8
NONCE_BYTES = 12
_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
_DERIVED = 4096  # ciphers and topics that are remembered


class Recipient(NamedTuple):
    """Whom a group key is meant for, and by whom: it opens nowhere else."""

    federation: str
    run: str
    node: str
    session: str  # of the node's process
    server: str  # the coordinator's process

    def info(self) -> bytes:
        """HPKE's `info`."""
        return _context("group key", *self)


class GroupKey:
    """The key that a coordinator's process and the nodes that it has welcomed have in common: 32 random bytes.

    `id` tells a key from another one and says nothing about it.
    """

    def __init__(self, raw: bytes):
        self._raw = raw
        self.id = _derive(raw, "id", "", ID_BYTES)

    @classmethod
    def draw(cls) -> Self:
        """A new random key."""
        return cls(secrets.token_bytes(KEY_BYTES))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupKey) and self._raw == other._raw

    def __hash__(self) -> int:
        return hash(self._raw)

    def hide_digest(self, topic: str) -> str:
        """A topic of chunks with 64 hexadecimal digits in the place of the digest, which say nothing about the blob."""
        return _hide_digest(self._raw, topic)

    def encrypt(self, topic: str, nonce: bytes, content: bytes, header: bytes) -> bytes:
        """The content of a message on this topic, encrypted; the `header` is authenticated with it."""
        return _cipher(self._raw, "message", topic).encrypt(nonce, content, header)

    def decrypt(self, topic: str, nonce: bytes, ciphertext: bytes, header: bytes) -> bytes:
        """The content of a message on this topic; ForgedError unless who has encrypted it has the key."""
        try:
            return _cipher(self._raw, "message", topic).decrypt(nonce, ciphertext, header)
        except InvalidTag:
            raise _not_by_a_member() from None

    def encrypt_chunk(self, topic: str, index: bytes, data: bytes) -> bytes:
        """The data of a chunk, encrypted. Topic and index determine them, so no nonce stands for two contents."""
        return _cipher(self._raw, "chunk", topic).encrypt(index.rjust(NONCE_BYTES, b"\0"), data, None)

    def decrypt_chunk(self, topic: str, index: bytes, data: bytes) -> bytes:
        """The data of a chunk; ForgedError unless who has encrypted them has the key."""
        try:
            return _cipher(self._raw, "chunk", topic).decrypt(index.rjust(NONCE_BYTES, b"\0"), data, None)
        except InvalidTag:
            raise _not_by_a_member() from None

    def encrypt_for(self, public: str, recipient: Recipient) -> str:
        """The key, encrypted for the owner of an X25519 key (64 hexadecimal digits); 160 hexadecimal digits.

        Raises:
            ValueError: nobody can have that key.
        """
        key = X25519PublicKey.from_public_bytes(bytes.fromhex(public))
        return _SUITE.encrypt(self._raw, key, recipient.info()).hex()


class KeyPair:
    """The keys of one process of a node, for which a coordinator encrypts the group key; `public` is for everybody."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw().hex()

    def decrypt(self, encrypted: str, recipient: Recipient) -> GroupKey:
        """The group key; ForgedError if it was not encrypted for these keys and this recipient."""
        try:
            return GroupKey(_SUITE.decrypt(bytes.fromhex(encrypted), self._private, recipient.info()))
        except (InvalidTag, ValueError):
            raise ForgedError("its group key is not for this process") from None


def _not_by_a_member() -> ForgedError:
    return ForgedError("it was not encrypted by a member")


def _context(*parts: str) -> bytes:
    """What keys are derived for, and encrypted for. No part holds a zero byte, so it is certain where each ends."""
    return "\0".join((topics.ROOT, *parts)).encode()


def _derive(raw: bytes, purpose: str, topic: str, length: int = KEY_BYTES) -> bytes:
    return HKDFExpand(SHA256(), length, _context(purpose, topic)).derive(raw)


@lru_cache(_DERIVED)
def _cipher(raw: bytes, purpose: str, topic: str) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(_derive(raw, purpose, topic))


@lru_cache(_DERIVED)
def _hide_digest(raw: bytes, topic: str) -> str:
    return topics.replace_blob(topic, _derive(raw, "blob", topic).hex())
