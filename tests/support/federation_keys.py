"""A federation's keys without its certificates, and bundles that they sign, rightly and wrongly."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from broker_config.protocol.messages import Manifest
from broker_config.security import member_list
from broker_config.security.kit import Kit
from broker_config.security.member_list import Member, MemberList
from broker_config.security.message_signing import BROADCAST, signed_fields
from broker_config.security.signing import SigningKey
from broker_config.security.trust import Trust
from edge.bundle import bundle_format as bundle
from tests.support.tiny_bundle import MEASURED, tiny_bundle

RUN = "ab" * 8


def soon(days: float) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)


class FederationKeys:
    """The authority of a federation, its coordinator, plant-a and plant-b."""

    def __init__(self, federation: str = "test"):
        self.federation = federation
        self.authority = SigningKey.generate()
        self.keys = {name: SigningKey.generate() for name in ("coordinator", "plant-a", "plant-b")}

    def charter(self, version: int = 1, *, days: float = 365, without: str = "") -> bytes:
        """Sealed; with the keys as they are now."""
        members = {
            name: Member(key.public, soon(days))
            for name, key in self.keys.items()
            if name != without
        }
        charter = MemberList(
            federation=self.federation,
            version=version,
            issued=soon(-1),
            expires=soon(days),
            coordinator=members.pop("coordinator"),
            nodes=members,
        )
        return member_list.sign(charter, self.authority)

    def trust(self, node: str = "plant-a", charter: bytes = b"") -> Trust:
        return Trust(
            federation=self.federation,
            node=node,
            authority=self.authority.public,
            charter=charter or self.charter(),
        )

    def kit(self, name: str) -> Kit:
        """A member's, without certificates."""
        return Kit(
            federation=self.federation,
            name=name,
            broker="mqtts://nowhere",
            authority=self.authority.public,
            charter=self.charter(),
            ca="",
            certificate="",
            key="",
            signing=self.keys[name].raw,
        )

    def broadcast(self, **changes: object) -> Manifest:
        """As the coordinator has signed it, for round 30 of RUN."""
        blank = Manifest(
            federation=self.federation,
            run=RUN,
            round=30,
            node="coordinator",
            digest="d" * 64,
            size=9,
            chunk_size=1024,
        )
        manifest = msgspec.structs.replace(blank, **changes)
        signature = self.keys["coordinator"].sign(BROADCAST, signed_fields(manifest)).hex()
        return msgspec.structs.replace(manifest, signature=signature)

    def bundle(
        self,
        folder: Path,
        *,
        key: SigningKey | None = None,
        charter: bytes = b"",
        size: int = 16,
        **changes: object,
    ) -> Path:
        """A bundle that plant-a has signed, or the owner of `key`;
        `changes` are of its manifest.
        """
        signing = bundle.Signing(
            key or self.keys["plant-a"], charter or self.charter(), self.broadcast(), soon(days=90)
        )
        tiny_bundle(
            folder,
            node="plant-a",
            size=size,
            federation=self.federation,
            run=RUN,
            round_=30,
            signing=signing,
            confidence=MEASURED,
        )
        if changes:
            path = folder / bundle.MANIFEST
            content = json.dumps(
                json.loads(path.read_bytes()) | msgspec.to_builtins(changes)
            ).encode()
            path.write_bytes(content)
            (folder / bundle.SIGNATURE).write_bytes(signing.key.sign(bundle.CONTEXT, content))
        return folder
