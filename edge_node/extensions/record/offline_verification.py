"""Verification of records, bundles and models from files alone,
and of what they say of one another.

A chain proves that its entries stand as they did when its head was known: to whoever signed it, or
to who kept it, as bundles and models keep that of their coordinator. Without either, its owner
could have written all of it anew.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, combinations, pairwise
from pathlib import Path

import msgspec
from msgspec import Struct

from broker_config.protocol import topics
from broker_config.protocol.errors import EdgeNodeError, UsageError, replace_unprintable
from broker_config.protocol.messages import Manifest, RecordHead
from broker_config.security import member_list, message_signing, signing
from broker_config.security.member_list import MemberList
from broker_config.security.received_file import read_bytes, read_json
from broker_config.security.signing import ForgedError
from broker_config.security.trust import Trust
from broker_config.storage import checksums, hash_chain
from broker_config.storage.hash_chain import ChainError
from edge.bundle import bundle_format
from edge.bundle.bundle_format import PERSONAL_MODEL
from edge.bundle.verification import verify_broadcast
from edge.registry import line_record
from edge.registry.bundle_store import BundleStore
from edge.registry.line_record import Event
from edge.terminal.formatting import pluralize
from edge_node.extensions.record.history import ContradictionError, History, Run
from edge_node.extensions.record.record_file import (
    ASK,
    RecordFile,
    RefusedError,
    Seal,
    add_entry,
    is_coordinator,
    line_stores,
    stored_lines,
)

_OTHER = f"give the record of that run; if it should be in one of these, it was removed: {ASK}"
_PLAIN = (
    "no signature was looked at: its owner could have written all of it anew; compare it with "
    "heads that others keep (bundles, models, --head)"
)


@dataclass
class Signature:
    """A member's signature that fits the charter beside it."""

    name: str  # of the member
    key: str  # with which it was made
    members: MemberList  # that charter
    what: str  # is signed

    @property
    def who(self) -> str:
        """The member, as people are told."""
        return f"{self.name}, a member of federation {self.members.federation},"


@dataclass
class Origin:
    """What a bundle or a model knows of the run that it comes from."""

    federation: str
    run: str
    round: int
    node: str
    broadcast: Manifest | None
    head: RecordHead | None


@dataclass
class Result:
    """What was found in one place."""

    path: Path
    kind: str = ""
    verified: list[str] = field(default_factory=list)
    not_verified: list[str] = field(default_factory=list)
    says: list[str] = field(default_factory=list)  # what it says, true or not
    refused: EdgeNodeError | None = None
    signatures: list[Signature] = field(default_factory=list)
    # Of records:
    digests: list[str] = field(default_factory=list)  # of its entries
    history: History = field(default_factory=History)
    seal: Seal | None = None  # of an exported one
    covered: int = 0  # its first entries, as far as a head that others keep is known
    # Of bundles and models:
    origin: Origin | None = None
    bundle: str = ""  # digest
    is_signed: bool = False

    def as_text(self) -> Iterator[str]:
        """For people. What others wrote cannot begin a line of its own."""
        lines = [
            f"{self.path}: {self.kind or 'cannot be read'}",
            *(f"  {text}" for text in self.says),
        ]
        lines += [f"  verified: {text}" for text in self.verified]
        lines += [f"  not verified: {text}" for text in self.not_verified]
        if self.refused:
            lines += [f"  FALSE: {self.refused.what}", f"    What to do: {self.refused.remedy}"]
        yield from (replace_unprintable(line, keep="") for line in lines)

    def as_object(self) -> dict[str, object]:
        """For machines."""
        head = {"entries": len(self.digests), "digest": self.digests[-1]} if self.digests else None
        refused = (
            {"what": self.refused.what, "remedy": self.refused.remedy} if self.refused else None
        )
        return {
            "path": str(self.path),
            "kind": self.kind,
            "verified": self.verified,
            "not_verified": self.not_verified,
            "says": self.says,
            "head": head,
            "covered": self.covered,
            "refused": refused,
        }


def verify(
    paths: Sequence[Path], trust: Trust | None = None, heads: Sequence[str] = ()
) -> list[Result]:
    """Verify each, and all of them against one another. `heads` are digests that somebody has kept.

    Raises:
        UsageError: one is nothing that can be verified.
    """
    known = _trusted_list(trust) if trust else None
    kinds = [_kind_of(path) for path in paths]
    results = [_verified(path, look, trust) for path, look in zip(paths, kinds, strict=True)]
    if known:
        _judge_signatures(results, known)
    records = [each for each in results if each.digests and not each.refused]
    _compare_records(records)
    for result in results:
        with _refusing(result):
            if result.origin and not result.refused:
                runs = [each for each in records if each.history.runs]
                _compare_origin(result, result.origin, runs)
        if result.bundle:
            for record in records:
                with _refusing(record):
                    _compare_service(record, result)
    for head in heads:
        found = [each for each in records if head in each.digests]
        for record in found:
            number = record.digests.index(head) + 1
            record.covered = max(record.covered, number)
            record.verified.append(
                f"the head {head} is its entry {number}: up to there it is as it was then"
            )
        if not found and results:
            results[-1].refused = results[-1].refused or RefusedError(
                f"the head {head} is that of no record that was given: an entry up to it was "
                "changed or removed",
                f"give the record that it is of; else {ASK}",
            )
    for record in records:
        _tell_uncovered(record)
    return results


Look = Callable[[Result, Trust | None], None]


def _kind_of(path: Path) -> Look:
    if path.is_file():
        return _look_at_file
    if (path / bundle_format.MANIFEST).is_file():
        if role := _role_of(path):
            raise UsageError(
                f"{path} is the bundle of a {role}, and no record tells of those", "leave it out"
            )
        return _look_at_bundle
    if is_coordinator(path):
        return _look_at_coordinator
    for folder in (path, path / "model"):
        if (folder / PERSONAL_MODEL).is_file():
            return functools.partial(_look_at_model, folder)
    if line_stores(path):
        return _look_at_line
    raise UsageError(
        f"{path} is nothing that can be verified",
        "name a bundle, a record that edge-node record wrote, or the state folder of a "
        "coordinator, a node or a line",
    )


def _role_of(folder: Path) -> str:
    """Return the role that a bundle names; that of a whole model names none."""
    # One that is damaged is looked at as any other.
    with suppress(EdgeNodeError, msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError):
        return bundle_format.check_format(folder, bundle_format.load_manifest(folder))
    return ""


def _verified(path: Path, look: Look, trust: Trust | None) -> Result:
    result = Result(path)
    with _refusing(result):
        look(result, trust)
    return result


@contextmanager
def _refusing(result: Result) -> Iterator[None]:
    """Keep what is found to be false in the result."""
    try:
        yield
    except (OSError, ChainError, RecursionError) as error:  # the last one: nested too deep
        result.refused = RefusedError(f"{result.path} is not what was written: {error}", ASK)
    except EdgeNodeError as error:
        result.refused = error


# ------------------------------------------------------------ records


def _look_at_file(result: Result, trust: Trust | None) -> None:
    file = RecordFile(result.path)
    _follow(result, file.lines())
    seal = file.seal
    if (
        seal is None
        or [seal.head.digest] != result.digests[-1:]
        or seal.head.entries != len(result.digests)
    ):
        raise ChainError("its last line, which has its head, is missing or of other entries")
    result.seal = seal
    if not seal.name:
        result.not_verified.append(_PLAIN)
        return
    signature = _verify_seal(result.path, seal, trust) if trust else None
    try:
        result.history.check_signer(seal.name, seal.federation)
    except ContradictionError as error:
        raise RefusedError(
            f"the record {result.path} is not {seal.name}'s to sign: {error}", ASK
        ) from None
    if signature:
        result.signatures.append(signature)
    else:
        result.not_verified.append(
            f"it says that {seal.name} has signed it: --trust FILE verifies that"
        )


def _verify_seal(path: Path, seal: Seal, trust: Trust) -> Signature:
    """Return the signature under the head of a record; RefusedError unless it fits."""
    members = member_list.verify_signature(seal.charter, trust.authority, str(path))
    key = members.key(seal.name)
    try:
        if key is None:
            raise ForgedError("it is no member")
        _check_federation(seal.federation, members)
        message_signing.verify_head(seal.head, key, members.federation, seal.name)
    except ForgedError as error:
        raise RefusedError(f"{path} is not signed by {seal.name}: {error}", ASK) from None
    return Signature(seal.name, key, members, "its head")


def _check_federation(stated: str, members: MemberList) -> None:
    """Raise ForgedError if what says to be of this federation has another one's charter."""
    if stated != members.federation:
        raise ForgedError(
            f"it is of federation {stated!r}, and its charter of {members.federation!r}"
        )


def _look_at_coordinator(result: Result, _: Trust | None) -> None:
    _follow(result, stored_lines(result.path))
    result.verified.append("the journal is as it was written, by its checksum")
    result.not_verified.append(_PLAIN)


def _look_at_line(result: Result, _: Trust | None) -> None:
    _follow(result, stored_lines(result.path))
    (folder,) = line_stores(result.path)
    store = BundleStore(folder)
    for event in store.state().history:
        if event.number and result.digests[event.number - 1] != checksums.digest(
            line_record.entry(event)
        ):
            raise RefusedError(
                f"the record {folder / line_record.FILE} contradicts state.json beside it in "
                f"entry {event.number}",
                ASK,
            )
    for digest in store.digests():
        bundle_format.read_bundle(store.path(digest))
    count = pluralize(len(store.digests()), "bundle")
    result.verified.append(f"the files of {count} in it have the hashes of their manifests")
    result.not_verified.append(_PLAIN)


def _follow(result: Result, lines: Iterator[bytes]) -> None:
    """Follow a chain, and gather what it says."""
    history = result.history
    for entry, head in hash_chain.follow(lines):
        result.digests.append(head.digest)
        result.kind = "record"
        add_entry(history, entry, head.entries, result.path)
        result.kind = _kind_of_record(history)
    newest = len(result.digests)
    if not newest:
        result.kind = "empty record"
    if history.unknown:
        result.not_verified.append(
            f"what {history.unknown} of its entries say: this version does not know their kinds"
        )
    if newest:
        result.verified.append(f"each of {newest} entries follows the one before")
        result.says.append(f"head: entry {newest}, {result.digests[-1]}")
    result.says += list(chain.from_iterable(_describe_run(run) for run in history.runs.values()))
    result.says += _describe_service(history)


def _kind_of_record(history: History) -> str:
    if history.events:
        return "record of a line"
    if history.runs:
        return "record of a coordinator"
    return "record"


def _describe_run(run: Run) -> Iterator[str]:
    begun = run.begun
    spec = run.spec
    ended = run.ended
    end = f"{ended.outcome} {ended.time[:19]}" if ended else "not ended"
    yield (
        f"run {begun.run} of federation {spec.federation}: {spec.method} with {spec.model}, "
        f"aggregated by {spec.aggregation.rule}, edge-node {spec.software}; begun "
        f"{begun.time[:19]}, {len(run.rounds)} of {spec.rounds} rounds closed, {end}"
    )
    for node in sorted(run.contributors):
        yield f"  {node} contributed to rounds {_ranges(run.took_part(node))}"
    if ended and ended.result:
        yield f"  result: {ended.result}"


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers: 1-3, 5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _describe_service(history: History) -> Iterator[str]:
    for bundle, since, until in _periods(history.events):
        yield f"{since} to {until}: bundle {history.bundles.get(bundle, bundle)}"


def _periods(events: Sequence[Event]) -> Iterator[tuple[str, str, str]]:
    """Which bundle a line served from when until when."""
    changes = [(event.serving, event.time) for event in events]
    changes = [each for before, each in pairwise([("", ""), *changes]) if each[0] != before[0]]
    for (bundle, since), (_, until) in pairwise([*changes, ("", "the record's end")]):
        if bundle:
            yield bundle, since, until


# ------------------------------------------------------------ bundles and models


def _look_at_bundle(result: Result, trust: Trust | None) -> None:
    folder = result.path
    content = bundle_format.load_manifest(folder)
    manifest = bundle_format.parse_manifest(folder, content)
    bundle = bundle_format.check_bundle(folder, manifest, content)
    result.kind = "bundle"
    result.bundle = bundle.digest
    result.says.append(f"bundle {manifest.id}, {bundle.digest}, of {manifest.created}")
    result.verified.append("its files have the hashes of its manifest")
    made = manifest.provenance
    head = made.record if made else None
    result.origin = Origin(
        manifest.federation, manifest.run, manifest.round, manifest.node, manifest.broadcast, head
    )
    result.is_signed = (folder / bundle_format.SIGNATURE).exists()
    if not result.is_signed:
        result.not_verified.append(
            "nobody has signed it: whoever could write here could have made it"
        )
    elif trust is None:
        result.not_verified.append(
            f"it says that {manifest.node} has signed it: --trust FILE verifies that"
        )
    else:
        charter, signature = (
            bundle_format.read_small_file(folder, name)
            for name in (bundle_format.CHARTER, bundle_format.SIGNATURE)
        )
        members = member_list.verify_signature(
            charter, trust.authority, f"{folder / bundle_format.CHARTER}"
        )
        try:
            node = members.nodes.get(manifest.node)  # the coordinator makes no bundle
            if node is None:
                raise ForgedError("it is no node")
            _check_federation(manifest.federation, members)
            signing.verify(node.key, bundle_format.CONTEXT, content, signature)
        except ForgedError as error:
            raise RefusedError(f"{folder} is not signed by {manifest.node}: {error}", ASK) from None
        result.signatures.append(Signature(manifest.node, node.key, members, "it"))
        if manifest.broadcast:
            _verify_origin(result, result.origin, members)
    if unlisted := bundle_format.unlisted_files(folder, manifest):
        result.not_verified.append(f"files that do not belong to it: {', '.join(unlisted)}")


def _look_at_model(folder: Path, result: Result, trust: Trust | None) -> None:
    again = "copy the folder again"
    try:
        model = read_json(folder / PERSONAL_MODEL, _Model, "metadata of a personal model", again)
        sums = (
            read_bytes(folder / checksums.SUMS, checksums.SUMS, again)
            if (folder / checksums.SUMS).is_file()
            else b""
        )
        names = [line.partition("  ")[2] for line in sums.decode().splitlines()]
        if strange := [
            name for name in names if Path(name).name != name or not (folder / name).is_file()
        ]:
            raise checksums.DamagedError(f"{strange[0]} is missing")
        checksums.verify(folder, *names)
    except (OSError, ValueError) as error:  # DamagedError and what decoding raises are ValueErrors
        raise RefusedError(f"{folder} is not what was written: {error}", again) from None
    result.kind = "model"
    result.says.append(f"model of {model.node}, federation {model.federation}, run {model.run}")
    if names:
        result.verified.append(
            f"its files have the hashes of {checksums.SUMS}, which nobody has signed"
        )
    else:
        result.not_verified.append(f"its files: there is no {checksums.SUMS}")
    broadcast = model.broadcast
    head = broadcast.record if broadcast else None
    result.origin = Origin(model.federation, model.run, model.round, model.node, broadcast, head)
    if broadcast is None or not broadcast.signature:
        result.not_verified.append("its coordinator has signed nothing of what it was made from")
    elif trust is None:
        result.not_verified.append(
            "it holds its coordinator's signature: --trust FILE verifies that"
        )
    else:
        _verify_origin(result, result.origin, _trusted_list(trust))


class _Model(Struct):
    """What a personal model knows of its origin."""

    federation: str
    run: str
    round: int
    node: str
    broadcast: Manifest | None = None


def _verify_origin(result: Result, origin: Origin, members: MemberList) -> None:
    key = members.coordinator.key
    try:
        _check_federation(origin.federation, members)
        verify_broadcast(origin, members)
        if origin.head:
            message_signing.verify_head(origin.head, key, members.federation, topics.COORDINATOR)
    except ForgedError as error:
        raise RefusedError(
            f"{result.path} was not made from what its coordinator has signed: {error}", ASK
        ) from None
    signed = (
        "the broadcast that it was made from, and the head of its record"
        if origin.head
        else "the broadcast that it was made from"
    )
    result.signatures.append(Signature(topics.COORDINATOR, key, members, signed))


# ------------------------------------------------------------ whose keys they are now


def _trusted_list(trust: Trust) -> MemberList:
    """The members by a trust file."""
    members = member_list.verify_signature(trust.charter, trust.authority, "the trust file")
    if members.federation != trust.federation:
        raise UsageError(
            f"the trust file is of federation {trust.federation!r}, and its charter of "
            f"{members.federation!r}",
            "take it again from whoever provisions the federation",
        )
    return members


def _judge_signatures(results: Sequence[Result], trusted: MemberList) -> None:
    """Tell signatures with keys that hold from those with keys that were revoked or replaced.

    Whoever has a lost key can still sign with it, beside a charter of that time. So the newest
    charter that the authority has signed says which keys count, wherever it was found.
    """
    signatures = chain.from_iterable(result.signatures for result in results)
    newest = max([trusted, *(each.members for each in signatures)], key=lambda each: each.version)
    for result in results:
        for each in result.signatures:
            name = each.name
            if newest.key(name) == each.key:
                result.verified.append(f"{each.who} has signed {each.what}")
                continue
            result.not_verified.append(
                f"who has signed {each.what}: the key is one that {name} has no more by the "
                f"charter of {newest.issued:%Y-%m-%d} (version {newest.version}); {name} before "
                "that day, or whoever has lost or stolen keys, at any time"
            )
        if result.seal and result.signatures:
            result.not_verified += _strangers(result, newest)


def _strangers(record: Result, newest: MemberList) -> Iterator[str]:
    """Contributors of whom no charter says that they are members."""
    known = {*newest.nodes}
    for signature in record.signatures:
        known |= {*signature.members.nodes}
    contributors: set[str] = set()
    for run in record.history.runs.values():
        contributors |= run.contributors
    if strange := sorted(contributors - known):
        yield (
            f"that {', '.join(strange)} could contribute: no node of that name is in the charters "
            "that were given; it was revoked since, or never was one"
        )


# ------------------------------------------------------------ one against another


def _compare_records(records: Sequence[Result]) -> None:
    """Refuse records of one chain or run that differ: one of them was rewritten."""
    for one, other in combinations(records, 2):
        shared = one.history.runs.keys() & other.history.runs.keys()
        if not shared and one.digests[0] != other.digests[0]:
            continue
        entries = zip(one.digests, other.digests, strict=False)
        differing = [number for number, pair in enumerate(entries, 1) if pair[0] != pair[1]]
        if differing:
            error = RefusedError(
                f"the records {one.path} and {other.path} are of the same owner, and differ from "
                f"entry {differing[0]} on: one of them was rewritten",
                f"give a bundle, or a head (--head), that knows which is right; {ASK}",
            )
            one.refused = one.refused or error
            other.refused = other.refused or error


def _tell_uncovered(record: Result) -> None:
    """Tell from which entry on a record rests on its owner's word alone."""
    if record.covered < len(record.digests):
        record.not_verified.append(
            f"from entry {record.covered + 1} on no head that others keep (bundles, models, "
            "--head) was given: its owner could have written that anew"
        )


def _compare_service(record: Result, bundle: Result) -> None:
    """Tell when a line has served a bundle, which must be its own node's."""
    found = list(_service(record.history, bundle.bundle))
    origin = bundle.origin
    seal = record.seal
    counts = bundle.is_signed and not bundle.refused
    if counts and found and seal and seal.name and origin:
        _check_line(record.path, seal, bundle.path, origin)
    bundle.says += [f"served by the line of {record.path} {period}" for period in found]


def _check_line(record: Path, seal: Seal, bundle: Path, origin: Origin) -> None:
    """Raise RefusedError unless the node that signs a line's record has signed its bundle, too."""
    if (seal.federation, seal.name) != (origin.federation, origin.node):
        raise RefusedError(
            f"the record {record} is signed by {seal.name} in federation {seal.federation!r}, and "
            f"its line has served {bundle}, a bundle of {origin.node} in {origin.federation!r}",
            f"have it exported with the --kit of the line's own node, {origin.node}; else {ASK}",
        )


def _compare_origin(result: Result, origin: Origin, records: Sequence[Result]) -> None:
    """Compare what a bundle or a model knows with the records of coordinators."""
    head = origin.head
    having = [each for each in records if origin.run in each.history.runs]
    if head is None:
        result.not_verified.append(
            "it knows no head of its coordinator's record: that was an earlier version, or none, "
            "as in a simulation"
        )
    if not records:
        result.not_verified.append(
            "what its coordinator's record says of it: there is none to compare it with"
        )
    elif not having:
        raise RefusedError(
            f"no record that was given has the run {origin.run} that {result.path} comes from",
            _OTHER,
        )
    for record in having:
        if head and record.digests[head.entries - 1 : head.entries] != [head.digest]:
            raise RefusedError(
                f"the record {record.path} is not the one that {result.path} was made under: of "
                f"its entry {head.entries} that knows another hash",
                f"if the record is an older export, take a newer one; else it was rewritten: {ASK}",
            )
        if head:
            record.covered = max(record.covered, head.entries)
            record.verified.append(f"up to entry {head.entries} it is as {result.path} knows it")
        run = record.history.runs[origin.run]
        broadcast = origin.broadcast
        result_or_none = run.ended.result if run.ended else None
        known = {each.broadcast for each in run.rounds.values()} | {result_or_none}
        if broadcast and broadcast.digest not in known:
            raise RefusedError(
                f"the record {record.path} knows no broadcast {broadcast.digest} of {result.path}",
                ASK,
            )
        rounds = _ranges(run.took_part(origin.node)) or "none"
        broadcast_text = " and its broadcast" if broadcast else ""
        result.verified.append(
            f"the record {record.path} has its run{broadcast_text}; "
            f"{origin.node} contributed to rounds {rounds} there"
        )


def _service(history: History, bundle: str) -> Iterator[str]:
    """When a line served a bundle."""
    for served, since, until in _periods(history.events):
        if history.bundles.get(served) == bundle:
            yield f"from {since} to {until}"
