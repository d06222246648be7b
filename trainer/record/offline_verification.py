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
from itertools import chain, pairwise
from pathlib import Path

import msgspec
from msgspec import Struct

from broker_config.protocol import topics
from broker_config.protocol.errors import EdgeNodeError, UsageError, replace_unprintable
from broker_config.protocol.messages import Manifest, RecordHead, Spec
from broker_config.security import member_list, message_signing, signing
from broker_config.security.member_list import MemberList
from broker_config.security.received_file import read_bytes, read_json
from broker_config.security.signing import ForgedError
from broker_config.security.trust import Trust
from broker_config.storage import checksums, hash_chain
from broker_config.storage.hash_chain import ChainError, Entry
from edge.bundle import bundle_format
from edge.bundle.bundle_format import PERSONAL_MODEL
from edge.bundle.verification import verify_broadcast
from edge.registry import line_record
from edge.registry.bundle_store import BundleStore
from edge.registry.line_record import Event
from edge.terminal.formatting import pluralize
from trainer.federation.server.record_facts import Fact, RoundClosed, RunBegun, RunEnded
from trainer.record.record_file import (
    ASK,
    RecordFile,
    RefusedError,
    Seal,
    is_coordinator,
    line_stores,
    stored_lines,
)

_OTHER = f"give the record of that run; if it should be in one of these, it was removed: {ASK}"
_PLAIN = (
    "no signature was looked at: its owner could have written all of it anew; compare it with "
    "heads that others keep (bundles, models, --head)"
)
_FACTS = {"run begun", "round closed", "run ended"}
_EVENTS = {"added", "activated", "refused", "confirmed", "rolled back", "kept"}


@dataclass
class Run:
    """A run as a record has it."""

    begun: RunBegun
    spec: Spec
    rounds: dict[int, RoundClosed] = field(default_factory=dict)
    ended: RunEnded | None = None

    def took_part(self, node: str) -> list[int]:
        """The rounds to which a member contributed."""
        return [round_ for round_, closed in self.rounds.items() if node in closed.contributions]


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
    # Of records:
    digests: list[str] = field(default_factory=list)  # of its entries
    runs: dict[str, Run] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    # Of bundles and models:
    origin: Origin | None = None
    bundle: str = ""  # digest

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
            "refused": refused,
        }


def verify(
    paths: Sequence[Path], trust: Trust | None = None, heads: Sequence[str] = ()
) -> list[Result]:
    """Verify each, and all of them against one another. `heads` are digests that somebody has kept.

    Raises:
        UsageError: one is nothing that can be verified.
    """
    kinds = [_kind_of(path) for path in paths]
    results = [_verified(path, look, trust) for path, look in zip(paths, kinds, strict=True)]
    records = [each for each in results if each.digests and not each.refused]
    for result in results:
        with _refusing(result):
            if result.origin and not result.refused:
                _compare_origin(result, result.origin, [each for each in records if each.runs])
            if result.bundle:
                result.says += list(
                    chain.from_iterable(_service(record, result.bundle) for record in records)
                )
    for head in heads:
        found = [each for each in records if head in each.digests]
        for record in found:
            number = record.digests.index(head) + 1
            record.verified.append(
                f"the head {head} is its entry {number}: up to there it is as it was then"
            )
        if not found and results:
            results[-1].refused = results[-1].refused or RefusedError(
                f"the head {head} is that of no record that was given: an entry up to it was "
                "changed or removed",
                f"give the record that it is of; else {ASK}",
            )
    return results


Look = Callable[[Result, Trust | None], None]


def _kind_of(path: Path) -> Look:
    if path.is_file():
        return _look_at_file
    if (path / bundle_format.MANIFEST).is_file():
        if role := _vfl_role(path):
            raise UsageError(
                f"{path} is the bundle of a {role}, and records are of horizontal federations",
                "leave it out",
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


def _vfl_role(folder: Path) -> str:
    """That of a member of vertical federated learning, if the bundle is one's."""
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
    if not seal.name:
        result.not_verified.append(_PLAIN)
    elif trust is None:
        result.not_verified.append(
            f"it says that {seal.name} has signed it: --trust FILE verifies that"
        )
    else:
        _verify_seal(result, seal, trust)


def _verify_seal(result: Result, seal: Seal, trust: Trust) -> None:
    members = member_list.verify_signature(seal.charter, trust.authority, str(result.path))
    key = members.key(seal.name)
    try:
        if key is None:
            raise ForgedError("it is no member")
        message_signing.verify_head(seal.head, key, members.federation, seal.name)
    except ForgedError as error:
        raise RefusedError(f"{result.path} is not signed by {seal.name}: {error}", ASK) from None
    result.verified.append(
        f"{seal.name}, a member of federation {members.federation}, has signed its head"
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
    unknown = 0
    for entry, head in hash_chain.follow(lines):
        result.digests.append(head.digest)
        try:
            unknown += not _gather(result, entry)
        except (msgspec.ValidationError, KeyError) as error:
            raise ChainError(
                f"entry {head.entries} contradicts itself or earlier ones: {error}"
            ) from None
    newest = len(result.digests)
    if newest:
        owner = "a line" if result.events else "a coordinator"
        result.kind = f"record of {owner}"
    else:
        result.kind = "empty record"
    if unknown:
        result.not_verified.append(
            f"what {unknown} of its entries say: this version does not know their kinds"
        )
    if newest:
        result.verified.append(f"each of {newest} entries follows the one before")
        result.says.append(f"head: entry {newest}, {result.digests[-1]}")
    result.says += list(chain.from_iterable(_describe_run(run) for run in result.runs.values()))
    result.says += _describe_service(result)


def _gather(result: Result, entry: Entry) -> bool:
    """Take in what an entry says; whether its kind is known."""
    what = entry.get("what")
    if not isinstance(what, str):
        raise KeyError("what")
    if what in _EVENTS:
        result.events.append(msgspec.convert(entry, Event))
        return True
    if what not in _FACTS:
        return False
    fact: Fact = msgspec.convert(entry, Fact)
    match fact:
        case RunBegun():
            result.runs[fact.run] = Run(fact, msgspec.convert(fact.spec, Spec))
        case RoundClosed():
            result.runs[fact.run].rounds[fact.round] = fact
        case RunEnded():
            result.runs[fact.run].ended = fact
    return True


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
    for node in sorted(
        set(chain.from_iterable(closed.contributions for closed in run.rounds.values()))
    ):
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


def _describe_service(record: Result) -> Iterator[str]:
    full = {event.bundle: event.sha256 for event in record.events if event.sha256}
    for bundle, since, until in _periods(record.events):
        yield f"{since} to {until}: bundle {full.get(bundle, bundle)}"


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
    if not (folder / bundle_format.SIGNATURE).exists():
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
            signing.verify(
                members.key(manifest.node) or "", bundle_format.CONTEXT, content, signature
            )
        except ForgedError as error:
            raise RefusedError(f"{folder} is not signed by {manifest.node}: {error}", ASK) from None
        result.verified.append(
            f"{manifest.node}, a member of federation {members.federation}, has signed it"
        )
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
        members = member_list.verify_signature(trust.charter, trust.authority, "the trust file")
        _verify_origin(result, result.origin, members)


class _Model(Struct):
    """What a personal model knows of its origin."""

    federation: str
    run: str
    round: int
    node: str
    broadcast: Manifest | None = None


def _verify_origin(result: Result, origin: Origin, members: MemberList) -> None:
    try:
        verify_broadcast(origin, members)
        if origin.head:
            key = members.coordinator.key
            message_signing.verify_head(origin.head, key, members.federation, topics.COORDINATOR)
    except ForgedError as error:
        raise RefusedError(
            f"{result.path} was not made from what its coordinator has signed: {error}", ASK
        ) from None
    signed = (
        "the broadcast that it was made from, and the head of its record"
        if origin.head
        else "its broadcast"
    )
    result.verified.append(f"the coordinator has signed {signed}")


# ------------------------------------------------------------ one against another


def _compare_origin(result: Result, origin: Origin, records: Sequence[Result]) -> None:
    """Compare what a bundle or a model knows with the records of coordinators."""
    head = origin.head
    having = [each for each in records if origin.run in each.runs]
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
            record.verified.append(f"up to entry {head.entries} it is as {result.path} knows it")
        run = record.runs[origin.run]
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


def _service(record: Result, bundle: str) -> Iterator[str]:
    """When a line served a bundle."""
    digits = {event.bundle for event in record.events if event.sha256 == bundle}
    for served, since, until in _periods(record.events):
        if served in digits:
            yield f"served by the line of {record.path} from {since} to {until}"
