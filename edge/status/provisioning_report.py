"""Report of a run of `provision`: what it changed and which steps follow,
for people and for machines.
"""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from broker_config.protocol.federation_kinds import KINDS
from broker_config.protocol.topics import COORDINATOR
from broker_config.security.member_registry import (
    BROKER,
    MemberRegistry,
    RegisteredMember,
    RegistryChanges,
)
from broker_config.security.provisioning import ProvisioningResult
from edge.terminal.formatting import pluralize

_NOT_AS_ROOT = "root's mosquitto becomes user mosquitto, who cannot read this folder"


def json_object(folder: Path, done: ProvisioningResult) -> dict[str, Any]:
    """The report for machines. A member with new keys is both in `revoked` and in `added`."""
    registry = done.registry
    changes = done.changes
    members = []
    for name, member in registry.members.items():
        file = (
            {"answer": _file(name, member)} if member.has_own_keys else {"kit": _file(name, member)}
        )
        members.append(
            {
                "name": name,
                "expires": member.pair.expires,
                **file,
                "fingerprint": member.fingerprint,
            }
        )
    return {
        "federation": registry.federation,
        "folder": str(folder),
        "founded": done.before is None,
        "added": changes.added,
        "renewed": changes.renewed,
        "revoked": changes.revoked,
        "moved": changes.moved,
        "restored": _relative(folder, done.restored),
        "changed": _relative(folder, done.changed),
        "version": registry.version,
        "charter_expires": registry.charter_expires,
        "authority_expires": registry.ca.expires,
        "broker_expires": registry.broker.expires,
        "authority": registry.fingerprint,
        "members": members,
    }


def text_lines(folder: Path, done: ProvisioningResult, *, as_root: bool = False) -> Iterator[str]:
    """The report for people: all members, the changes, and the next steps, which may be root's."""
    registry = done.registry
    width = max(map(len, registry.pairs))
    yield f"federation {registry.federation}, version {registry.version}"
    for name, member in registry.members.items():
        yield (
            f"  {name:{width}}  until {member.pair.expires:%Y-%m-%d}  "
            f"{folder}/{_file(name, member)}"
        )
    yield f"  {BROKER:{width}}  until {registry.broker.expires:%Y-%m-%d}  {folder}/broker/"
    yield f"fingerprint of the authority: {registry.fingerprint}"
    if not all(member.has_own_keys for member in registry.members.values()):
        yield f"passphrases: {folder}/passphrases.txt (send each one separately from its kit)"
    if held := [name for name in registry.nodes if not registry.members[name].has_own_keys]:
        yield (
            f"for trials: whoever has this folder holds the keys of {', '.join(held)}; "
            f"in production each makes its own: edge-node request {registry.federation} NAME"
        )
    yield (
        f"lines: {folder}/trust/NODE.trust until {registry.charter_expires:%Y-%m-%d} (edge-node "
        "serve --trust)"
    )
    yield f"offline, with a backup: {folder}/authority/ until {registry.ca.expires:%Y-%m-%d}"
    yield ""
    yield from _changes(folder, done)
    chosen_steps = (
        _first_steps(folder, done, as_root=as_root) if done.before is None else _steps(folder, done)
    )
    steps = list(chosen_steps)
    if steps:
        yield "next:"
    for number, step in enumerate(steps, start=1):
        yield f"  {number}. {step}"
    if done.before not in (None, done.registry) and not _invalidates_all_kits(done):
        yield "all other kits stay valid"


def _changes(folder: Path, done: ProvisioningResult) -> Iterator[str]:
    """A sentence for each kind of change."""
    changes = done.changes
    before = done.before
    if before is None:
        yield (
            f"federation {done.registry.federation} is founded, with "
            f"{pluralize(len(done.registry.nodes), 'node')}"
        )
        return
    if not done.changed:
        yield "nothing has changed, nothing needs to be done"
    if done.restored:
        yield f"written again: {', '.join(_relative(folder, done.restored))}"
        yield (
            "nothing else is needed, unless an interrupted run left them out: then hand them out "
            "as it would have"
        )
    yield from _member_changes(changes, before)
    if changes.moved:
        yield f"the broker's address is {done.registry.url}"
    if changes.relocated:
        yield f"the broker's files belong in {done.registry.broker_folder}"


def _member_changes(changes: RegistryChanges, before: MemberRegistry) -> Iterator[str]:
    """A sentence for each kind of change of members."""
    if gone := [name for name in changes.revoked if name not in changes.added]:
        yield (
            f"revoked: {', '.join(gone)}; until mosquitto has its new files, all goes on as before"
        )
    if changes.rekeyed:
        yield (
            f"new keys: {', '.join(changes.rekeyed)}; the old ones work until mosquitto is "
            "restarted"
        )
    if new := [name for name in changes.added if name not in changes.revoked]:
        yield f"new: {', '.join(new)}"
    for name in changes.renewed:
        yield (
            f"new certificate: {name}; the old one holds until "
            f"{before.pairs[name].expires:%Y-%m-%d}"
        )


def _first_steps(folder: Path, done: ProvisioningResult, *, as_root: bool) -> Iterator[str]:
    registry = done.registry
    if registry.broker_folder:
        yield from _install_broker(folder, registry.broker_folder)
    elif as_root:
        command = shlex.join(["edge-node", "provision", registry.federation, "--out", str(folder)])
        yield f"{command} --broker-folder /etc/edge-node/broker  ({_NOT_AS_ROOT})"
    else:
        yield (
            f"mosquitto -c {(folder / 'broker').resolve()}/mosquitto.conf  (not as root: "
            f"{_NOT_AS_ROOT})"
        )
    yield from (
        _hand_out(folder, done, name)
        for name, member in registry.members.items()
        if member.has_own_keys
    )
    others = "; ".join(kind.first_step for kind in KINDS.values())
    otherwise = f"  ({others})" if others else ""
    yield f"edge-node coordinate --kit {_kit(registry, COORDINATOR)} --classes ...{otherwise}"
    yield f"edge-node join --kit {_kit(registry, registry.nodes[0])} --data images/"


def _kit(registry: MemberRegistry, name: str) -> str:
    """Where the member finds its kit: what `request` made stands in a folder of its own."""
    return f"{name}-kit/{name}.kit" if registry.members[name].has_own_keys else f"{name}.kit"


def _install_broker(folder: Path, there: str) -> Iterator[str]:
    yield f"mkdir -p {there} && cp -a {folder}/broker/. {there} && chown -R mosquitto: {there}"
    yield f"mosquitto -c {there}/mosquitto.conf"


def _steps(folder: Path, done: ProvisioningResult) -> Iterator[str]:
    """Next steps after a change; the broker comes first,
    so that whoever restarts meets the new one.
    """
    changes = done.changes
    before = done.before
    assert before is not None
    changed = changes.moved or changes.relocated
    if changes.revoked or changed:
        there = done.registry.broker_folder if changes.relocated else None
        how = f": {'; '.join(_install_broker(folder, there))}" if there else ""
        yield f"copy {folder}/broker/ to the broker's machine, and restart mosquitto{how}"
    elif BROKER in changes.renewed:
        yield f"copy {folder}/broker/ to the broker's machine, and reload mosquitto"
    all_kits = _invalidates_all_kits(done)
    if all_kits or changes.nodes:
        yield f"{_hand_out(folder, done, COORDINATOR)}, and start it again"
    for name in changes.added:
        if name != COORDINATOR:
            yield _hand_out(folder, done, name)
    for name in changes.renewed:
        if name != BROKER and not all_kits:
            yield _hand_out(
                folder, done, name, before=f" before {before.pairs[name].expires:%Y-%m-%d}"
            )
    if all_kits:
        yield "give all others their new kits or answers too; passphrases are the same"


def _invalidates_all_kits(done: ProvisioningResult) -> bool:
    """Whether no old kit is valid any more: they name another broker or coordinator."""
    return done.changes.moved or COORDINATOR in done.changes.revoked


def _hand_out(folder: Path, done: ProvisioningResult, name: str, before: str = "") -> str:
    """What a member gets, and how."""
    member = done.registry.members[name]
    new = name in done.changes.added
    give = f"give {'the ' * (name == COORDINATOR)}{name} {folder}/{_file(name, member)}{before}"
    if not member.has_own_keys:
        passphrase_text = (
            " and, separately, its new passphrase" if new else " (its passphrase is the same)"
        )
        return f"{give}{passphrase_text}"
    check = f"if it reads out {member.fingerprint} as its request's fingerprint, " if new else ""
    return f"{check}{give}, for edge-node request {done.registry.federation} {name} --accept"


def _file(name: str, member: RegisteredMember) -> str:
    """What a member gets, in the federation's folder."""
    return f"answers/{name}.answer" if member.has_own_keys else f"kits/{name}.kit"


def _relative(folder: Path, paths: Sequence[Path]) -> list[str]:
    return [str(path.relative_to(folder)) for path in paths]
