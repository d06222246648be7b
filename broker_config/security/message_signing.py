"""Signatures of a federation's messages: made for what a member publishes,
verified on what it receives.

The broker in between is trusted with neither. A message's context is its topic, so it means nothing
as another kind of message, in another federation, or from another member. Requests for chunks and
the chunks themselves are not signed: a manifest's hash says what they must add up to.
"""

import msgspec

from broker_config.protocol import topics
from broker_config.protocol.errors import UsageError, abbreviate
from broker_config.protocol.messages import Manifest, RecordHead
from broker_config.security.kit import Kit
from broker_config.security.message_encryption import MessageEncryption, read_open_part
from broker_config.security.signing import (
    ForgedError,
    SigningKey,
    UnknownKeyError,
    open_envelope,
    verify,
)

BROADCAST = "broadcast"
RECORD = "record"
_LOGGED = 100  # topics that are named in the log


class MessageSigner:
    """One member's signing key and the public keys of the others.

    MemberListError if its kit's list is not valid.
    """

    def __init__(self, kit: Kit):
        self.federation = kit.federation
        self.name = kit.name
        self.members = kit.members()
        self._key = SigningKey(kit.signing) if kit.signing and kit.name != topics.MONITOR else None
        self._logged: set[str] = set()  # topics
        if self._key and self.members.key(kit.name) != self._key.public:
            raise UsageError(
                f"{kit.name} is no member of federation {kit.federation!r} any more, or its kit "
                "is an old one",
                "ask whoever provisions the federation for a new kit",
            )

    def sign(self, topic: str, payload: bytes) -> bytes:
        """The payload as it is published on `topic`."""
        if not payload or self._key is None or topics.expected_signer(topic) is None:
            return payload
        return self._key.sign_envelope(topic, payload)

    def verify(self, topic: str, data: bytes) -> bytes:
        """The payload that arrived on `topic`; ForgedError unless the topic's expected signer
        has signed it.
        """
        expected = topics.expected_signer(topic)
        if not data or expected is None:
            return data
        if topics.federation_of(topic) != self.federation:
            raise ForgedError(f"it is not of federation {self.federation}")
        key = self.members.key(expected)
        if key is None:
            raise ForgedError(f"{abbreviate(expected, 64)} is no member")
        return open_envelope(key, topic, data)

    def read(self, topic: str, data: bytes, encryption: MessageEncryption | None) -> bytes:
        """As `verify`, and decrypted as far as this process can.

        ForgedError if nothing of it can be read.
        """
        content = self.verify(topic, data)
        return encryption.decrypt(topic, content) if encryption else read_open_part(content)

    def is_first_forgery(self, topic: str, error: ValueError) -> bool:
        """Whether to log a forged message on this topic: the first one,
        until too many topics had one.

        Another key is no forgery: a coordinator that was started again has one.
        """
        if isinstance(error, UnknownKeyError):
            return False
        new = topic not in self._logged and len(self._logged) < _LOGGED
        self._logged |= {topic} if new else set()
        return new

    def sign_broadcast(self, manifest: Manifest) -> str:
        """The coordinator's signature under a broadcast, hexadecimal;
        a bundle made from it can show that.
        """
        return self._key.sign(BROADCAST, signed_fields(manifest)).hex() if self._key else ""

    def sign_head(self, head: RecordHead) -> RecordHead:
        """The head of this member's record, signed."""
        if self._key is None:
            return head
        signature = self._key.sign(RECORD, _head_fields(head, self.federation, self.name)).hex()
        return msgspec.structs.replace(head, signature=signature)

    def sign_statement(self, context: str, content: bytes) -> str:
        """This member's signature under what others will be shown of it, hexadecimal."""
        return self._key.sign(context, content).hex() if self._key else ""

    def verify_statement(self, name: str, context: str, content: bytes, signature: str) -> None:
        """Raise ForgedError unless this node of the federation has signed that;
        its coordinator is none.
        """
        member = self.members.nodes.get(name)
        if member is None:
            raise ForgedError(f"{abbreviate(name, 64)} is no node")
        verify(member.key, context, content, bytes.fromhex(signature))

    def derive_secret(self, purpose: str) -> str:
        """16 hexadecimal digits that nobody else can guess, always the same for one purpose."""
        return self._key.sign("secret", purpose.encode())[:8].hex() if self._key else ""


def verify_broadcast(manifest: Manifest, coordinator: str) -> None:
    """Raise ForgedError unless the owner of the public key `coordinator` has signed this
    broadcast.
    """
    try:
        signature = bytes.fromhex(manifest.signature)
    except ValueError:
        raise ForgedError("its signature is not hexadecimal") from None
    verify(coordinator, BROADCAST, signed_fields(manifest), signature)


def verify_head(head: RecordHead, key: str, federation: str, name: str) -> None:
    """Raise ForgedError unless `name`, the owner of this public key,
    has signed the head of its record.
    """
    verify(key, RECORD, _head_fields(head, federation, name), bytes.fromhex(head.signature))


def _head_fields(head: RecordHead, federation: str, name: str) -> bytes:
    return "\n".join((federation, name, str(head.entries), head.digest)).encode()


def signed_fields(manifest: Manifest) -> bytes:
    """What a manifest's signature covers. None of the fields holds a line break."""
    fields = (manifest.federation, manifest.run, manifest.round, manifest.node, manifest.digest)
    return "\n".join(map(str, fields)).encode()
