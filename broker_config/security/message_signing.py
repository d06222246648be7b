"""What a member says in its federation, signed; what it hears, checked. The broker in between is trusted with neither.

A message's context is its topic, so it means nothing as another kind of message, in another federation, or from another
member. Requests for chunks and the chunks themselves are not signed: a manifest's hash says what they must add up to.
"""

from broker_config.protocol import topics
from broker_config.protocol.errors import UsageError, brief
from broker_config.protocol.messages import Manifest
from broker_config.security.kit import Kit
from broker_config.security.signing import ForgedError, SigningKey, unseal, verify

BROADCAST = "broadcast"
_NAMED = 100  # topics that are named in the log


class Seal:
    """One member's signature, and its knowledge of the others'. CharterError if its kit's charter is no good."""

    def __init__(self, kit: Kit):
        self.federation, self.name = kit.federation, kit.name
        self.charter = kit.members()
        self._key = SigningKey(kit.signing) if kit.signing else None
        self._told: set[str] = set()  # topics
        if self._key and self.charter.key(kit.name) != self._key.public:
            raise UsageError(
                f"{kit.name} is no member of federation {kit.federation!r} any more, or its kit is an old one",
                "ask whoever provisions the federation for a new kit",
            )

    def close(self, topic: str, payload: bytes) -> bytes:
        """The payload as it is published on `topic`."""
        if not payload or self._key is None or topics.signer(topic) is None:
            return payload
        return self._key.seal(topic, payload)

    def open(self, topic: str, data: bytes) -> bytes:
        """The payload that arrived on `topic`; ForgedError if it does not come from whom it should."""
        who = topics.signer(topic)
        if not data or who is None:
            return data
        if topics.federation_of(topic) != self.federation:
            raise ForgedError(f"it is not of federation {self.federation}")
        key = self.charter.key(who)
        if key is None:
            raise ForgedError(f"{brief(who, 64)} is no member")
        return unseal(key, topic, data)

    def is_news(self, topic: str) -> bool:
        """Whether a forged message on this topic is to be told: the first one is, as long as they are not too many."""
        new = topic not in self._told and len(self._told) < _NAMED
        self._told |= {topic} if new else set()
        return new

    def attest(self, manifest: Manifest) -> str:
        """The coordinator's signature under a broadcast, hexadecimal: what a bundle made from it can show."""
        return self._key.sign(BROADCAST, attested(manifest)).hex() if self._key else ""

    def secret(self, purpose: str) -> str:
        """16 hexadecimal digits that nobody else can guess, the same for each purpose for ever."""
        return self._key.sign("secret", purpose.encode())[:8].hex() if self._key else ""


def check_broadcast(manifest: Manifest, coordinator: str) -> None:
    """Return if the owner of the public key `coordinator` has made this broadcast; else ForgedError."""
    try:
        signature = bytes.fromhex(manifest.signature)
    except ValueError:
        raise ForgedError("its signature is not hexadecimal") from None
    verify(coordinator, BROADCAST, attested(manifest), signature)


def attested(manifest: Manifest) -> bytes:
    """What a manifest's signature covers. None of the fields holds a line break."""
    fields = (manifest.federation, manifest.run, manifest.round, manifest.node, manifest.digest)
    return "\n".join(map(str, fields)).encode()
