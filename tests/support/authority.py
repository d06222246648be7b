"""Authority of a federation of the tests: who belongs to it, with keys and kits,
but without certificates.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import msgspec

from broker_config.protocol import topics
from broker_config.security.kit import Kit
from broker_config.security.member_list import Member, MemberList
from broker_config.security.member_list import sign as sign_members
from broker_config.security.message_signing import MessageSigner
from broker_config.security.signing import SigningKey
from tests.support.threaded_federation import PLANTS

LATER = datetime.now(UTC) + timedelta(days=9)


class Authority:
    """Who says who belongs to a federation; makes kits without certificates."""

    def __init__(
        self,
        federation: str,
        version: int = 1,
        expires: datetime = LATER,
        nodes: Sequence[str] = PLANTS,
    ):
        self.key = SigningKey.generate()
        self.keys = {name: SigningKey.generate() for name in (topics.COORDINATOR, *nodes)}
        members = {name: Member(key.public, LATER) for name, key in self.keys.items()}
        self.charter = MemberList(
            federation=federation,
            version=version,
            issued=datetime.now(UTC),
            expires=expires,
            coordinator=members.pop(topics.COORDINATOR),
            nodes=members,
        )

    def kit(self, name: str, **changes: object) -> Kit:
        kit = Kit(
            federation=self.charter.federation,
            name=name,
            broker="mqtts://nowhere",
            authority=self.key.public,
            charter=sign_members(self.charter, self.key),
            ca="",
            certificate="",
            key="",
            signing=self.keys[name].raw,
        )
        return msgspec.structs.replace(kit, **changes)

    def revoke(self, node: str) -> None:
        left = {name: member for name, member in self.charter.nodes.items() if name != node}
        self.charter = msgspec.structs.replace(
            self.charter, version=self.charter.version + 1, nodes=left
        )

    def signers(self) -> dict[str, MessageSigner]:
        return {name: MessageSigner(self.kit(name)) for name in self.keys}
