"""Keys by which a federation's members keep what is learnt from others,
and how the coordinator hands them out.

Each process of the coordinator draws a master key. From it follow the group key, which all nodes
are given, and each node's key, which that node alone is given: so no node can read what another one
contributes. Both reach a process of a node encrypted for it (HPKE, RFC 9180). What encrypts is
derived from them (HKDF with SHA-256) for one topic, and authenticates, too (ChaCha20-Poly1305).
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
    """Whom keys are meant for, and by whom: they open nowhere else."""

    federation: str
    run: str
    node: str
    session: str  # of the node's process
    server: str  # the coordinator's process

    def info(self) -> bytes:
        """HPKE's `info`."""
        return _context("group key", *self)


class SharedKey:
    """A key of 32 random bytes that members have in common.

    `id` tells it from another one, and no more about it.
    """

    def __init__(self, raw: bytes):
        self.raw = raw
        self.id = _derive(raw, "id", "", ID_BYTES)

    def hide_digest(self, topic: str) -> str:
        """A topic of chunks with 64 hexadecimal digits in the place of the digest,
        which say nothing about the blob.
        """
        return _hide_digest(self.raw, topic)

    def encrypt(self, topic: str, nonce: bytes, content: bytes, header: bytes) -> bytes:
        """The content of a message on this topic, encrypted;
        the `header` is authenticated with it.
        """
        return _cipher(self.raw, "message", topic).encrypt(nonce, content, header)

    def decrypt(self, topic: str, nonce: bytes, ciphertext: bytes, header: bytes) -> bytes:
        """The content of a message on this topic; ForgedError unless who has encrypted it has
        the key.
        """
        try:
            return _cipher(self.raw, "message", topic).decrypt(nonce, ciphertext, header)
        except InvalidTag:
            raise _not_by_a_member() from None

    def encrypt_chunk(self, topic: str, index: bytes, data: bytes) -> bytes:
        """The data of a chunk, encrypted.

        Topic and index determine them, so no nonce stands for two contents.
        """
        return _cipher(self.raw, "chunk", topic).encrypt(
            index.rjust(NONCE_BYTES, b"\0"), data, None
        )

    def decrypt_chunk(self, topic: str, index: bytes, data: bytes) -> bytes:
        """The data of a chunk; ForgedError unless who has encrypted them has the key."""
        try:
            return _cipher(self.raw, "chunk", topic).decrypt(
                index.rjust(NONCE_BYTES, b"\0"), data, None
            )
        except InvalidTag:
            raise _not_by_a_member() from None


class MasterKey:
    """The secret of one process of the coordinator,
    from which all keys follow that it shares with nodes.
    """

    def __init__(self, raw: bytes):
        self._raw = raw

    @classmethod
    def draw(cls) -> Self:
        """A new random one."""
        return cls(secrets.token_bytes(KEY_BYTES))

    def of(self, node: str | None) -> SharedKey:
        """The key that is shared with this node alone, or with all."""
        return _shared(self._raw, node)

    def encrypt_for(self, public: str, recipient: Recipient) -> str:
        """The group's and the node's key for the owner of an X25519 key; 224 hexadecimal digits.

        Raises:
            ValueError: nobody can have that X25519 key (64 hexadecimal digits).
        """
        key = X25519PublicKey.from_public_bytes(bytes.fromhex(public))
        return _SUITE.encrypt(
            self.of(None).raw + self.of(recipient.node).raw, key, recipient.info()
        ).hex()


class NodeKeys(NamedTuple):
    """What a node has been given."""

    node: str
    group: SharedKey
    own: SharedKey

    def of(self, node: str | None) -> SharedKey | None:
        """As that of `MasterKey`; None for another node."""
        return {None: self.group, self.node: self.own}.get(node)


class KeyPair:
    """The key pair of one process of a node, for which a coordinator encrypts;
    `public` is for everybody.
    """

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw().hex()

    def decrypt(self, encrypted: str, recipient: Recipient) -> NodeKeys:
        """The group's and the node's key; ForgedError if they were not encrypted for these keys
        and this recipient.
        """
        try:
            raw = _SUITE.decrypt(bytes.fromhex(encrypted), self._private, recipient.info())
        except (InvalidTag, ValueError):
            raise ForgedError("its group key is not for this process") from None
        return NodeKeys(recipient.node, SharedKey(raw[:KEY_BYTES]), SharedKey(raw[KEY_BYTES:]))


def _not_by_a_member() -> ForgedError:
    return ForgedError("it was not encrypted by a member")


def _context(*parts: str) -> bytes:
    """What keys are derived for, and encrypted for.

    No part holds a zero byte, so it is certain where each ends.
    """
    return "\0".join((topics.ROOT, *parts)).encode()


def _derive(raw: bytes, purpose: str, name: str, length: int = KEY_BYTES) -> bytes:
    return HKDFExpand(SHA256(), length, _context(purpose, name)).derive(raw)


@lru_cache(_DERIVED)
def _shared(raw: bytes, node: str | None) -> SharedKey:
    derived = _derive(raw, "group", "") if node is None else _derive(raw, "node", node)
    return SharedKey(derived)


@lru_cache(_DERIVED)
def _cipher(raw: bytes, purpose: str, topic: str) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(_derive(raw, purpose, topic))


@lru_cache(_DERIVED)
def _hide_digest(raw: bytes, topic: str) -> str:
    return topics.replace_blob(topic, _derive(raw, "blob", topic).hex())
