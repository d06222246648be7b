"""Ed25519 signatures, each valid in one context only.

The bytes are signed as they are, so nothing has to be brought into a canonical form first. An
envelope is 0x01, then 64 bytes of signature, then the content.
"""

import base64
import hashlib
from typing import Annotated, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta

from broker_config.protocol.codec import ENVELOPE_HEADER, ENVELOPE_MARK

PublicKey = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z", description="Ed25519, hexadecimal")]
_DOMAIN = b"edge-node/v1"


class ForgedError(ValueError):
    """Bytes without a valid signature of the expected signer;
    the text says briefly what is wrong.
    """


class UnknownKeyError(ForgedError):
    """What was encrypted with a key that this process does not have: not yet, or not any more."""


class SigningKey:
    """A private key.

    Its 32 `raw` bytes are the secret, `public` (64 hexadecimal digits) is for everybody.
    """

    def __init__(self, raw: bytes):
        self._key = Ed25519PrivateKey.from_private_bytes(raw)
        self.public = self._key.public_key().public_bytes_raw().hex()

    @classmethod
    def generate(cls) -> Self:
        """A new random key."""
        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    @property
    def raw(self) -> bytes:
        """The secret."""
        return self._key.private_bytes_raw()

    def sign(self, context: str, content: bytes) -> bytes:
        """Return the signature, 64 bytes."""
        return self._key.sign(_signed_bytes(context, content))

    def sign_envelope(self, context: str, content: bytes) -> bytes:
        """Return `content` with its signature in front."""
        return b"".join((ENVELOPE_MARK, self.sign(context, content), content))


def verify(public: str, context: str, content: bytes, signature: bytes) -> None:
    """Raise ForgedError unless `signature` is that of the owner of `public` over `content` in
    this context.
    """
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(
            signature, _signed_bytes(context, content)
        )
    except (InvalidSignature, ValueError):
        raise ForgedError("its signature does not fit") from None


def open_envelope(public: str, context: str, data: bytes) -> bytes:
    """Return an envelope's content; ForgedError unless the owner of `public` has signed it for
    this context.
    """
    if not data.startswith(ENVELOPE_MARK) or len(data) < ENVELOPE_HEADER:
        raise ForgedError("it is not signed")
    content = data[ENVELOPE_HEADER:]
    verify(public, context, content, data[1:ENVELOPE_HEADER])
    return content


def fingerprint(content: bytes) -> str:
    """125 bits of SHA-256, to be compared by voice: `group_letters`."""
    return group_letters(hashlib.sha256(content).digest())


def group_letters(data: bytes) -> str:
    """The first 125 bits as 25 letters and digits, in groups of five to be read out."""
    text = base64.b32encode(data[:16]).decode().lower()[:25]
    return "-".join(text[start : start + 5] for start in range(0, 25, 5))


def _signed_bytes(context: str, content: bytes) -> bytes:
    """What a signature covers.

    No context holds a zero byte, so it is certain where the context ends.
    """
    return b"\0".join((_DOMAIN, context.encode(), content))
