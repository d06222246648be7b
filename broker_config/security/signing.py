"""Ed25519 signatures. Each is made for one context; in another one it means nothing.

What is signed are bytes as they are, so nothing has to be brought into a canonical form first. Sealed bytes carry their
signature in front: 0x01, 64 bytes of signature, content.
"""

from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from broker_config.protocol.codec import HEAD, SEALED

_DOMAIN = b"edge-node/v1"


class ForgedError(ValueError):
    """Bytes that are not signed by whom they should be; the text says briefly what is wrong."""


class SigningKey:
    """A private key. Its 32 `raw` bytes are the secret, `public` (64 hexadecimal digits) is for everybody."""

    def __init__(self, raw: bytes):
        self._key = Ed25519PrivateKey.from_private_bytes(raw)
        self.public = self._key.public_key().public_bytes_raw().hex()

    @classmethod
    def generate(cls) -> Self:
        """A new one, at random."""
        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    @property
    def raw(self) -> bytes:
        """The secret."""
        return self._key.private_bytes_raw()

    def sign(self, context: str, content: bytes) -> bytes:
        """Return the signature, 64 bytes."""
        return self._key.sign(_signed(context, content))

    def seal(self, context: str, content: bytes) -> bytes:
        """Return `content` with its signature in front."""
        return b"".join((SEALED, self.sign(context, content), content))


def verify(public: str, context: str, content: bytes, signature: bytes) -> None:
    """Return if `signature` is that of the owner of `public` under `content`, in this context; else ForgedError."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(signature, _signed(context, content))
    except (InvalidSignature, ValueError):
        raise ForgedError("its signature does not fit") from None


def unseal(public: str, context: str, data: bytes) -> bytes:
    """Return the content of sealed bytes; ForgedError unless the owner of `public` has sealed it for this context."""
    if not data.startswith(SEALED) or len(data) < HEAD:
        raise ForgedError("it is not signed")
    content = data[HEAD:]
    verify(public, context, content, data[1:HEAD])
    return content


def _signed(context: str, content: bytes) -> bytes:
    """What a signature covers. No context holds a zero byte, so where it ends is certain."""
    return b"\0".join((_DOMAIN, context.encode(), content))
