"""What a run of the authority has changed: two registers, compared."""

from typing import NamedTuple

from broker_config.protocol.topics import COORDINATOR, MONITOR
from broker_config.security.member_registry import Register


class Changes(NamedTuple):
    """Names of members, or `broker`. Who has got new keys is both revoked and added."""

    added: list[str]
    renewed: list[str]
    revoked: list[str]
    moved: bool  # the broker has another address: all kits name it
    relaid: bool  # the broker's files lie elsewhere

    @property
    def rekeyed(self) -> list[str]:
        """Whose keys are new, and whose old ones are revoked."""
        return [name for name in self.added if name in self.revoked]

    @property
    def nodes(self) -> list[str]:
        """The nodes that came, went or have new keys: the coordinator must hear of each."""
        return [name for name in dict.fromkeys([*self.added, *self.revoked]) if name not in (COORDINATOR, MONITOR)]


def compare(old: Register | None, new: Register) -> Changes:
    """What distinguishes `new` from `old`; with no old one, all its members are added."""
    if old is None:
        return Changes(list(new.members), [], [], moved=False, relaid=False)
    # Passphrases are random and stay with the keys.
    phrases = {name: holder.passphrase for name, holder in old.members.items()}
    added = [name for name, holder in new.members.items() if phrases.get(name) != holder.passphrase]
    before = {each.serial for each in old.issued if each.revoked}
    revoked = [each.member for each in new.issued if each.revoked and each.serial not in before]
    renewed = [name for name, pair in new.pairs.items() if name not in added and pair.serial != old.pairs[name].serial]
    return Changes(
        added,
        renewed,
        list(dict.fromkeys(revoked)),
        moved=old.url != new.url,
        relaid=old.broker_folder != new.broker_folder,
    )
