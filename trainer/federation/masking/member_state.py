"""State machine of a node's part in the masks of a round: (record, step) -> (record, answers).

Pure.

A record is on disk before an answer leaves the node, and all that a node says follows from it: who
is killed says the same again. A node is in one cohort of a round, and lets one list of survivors be
unmasked: its coordinator cannot have two sums of one round, whatever it tells whom.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from broker_config.protocol.errors import EdgeNodeError
from broker_config.protocol.messages import MaskingStep, Name, PublicKeys
from broker_config.security import mask_keys
from broker_config.security.mask_keys import RoundSecrets, Scope
from broker_config.security.signing import ForgedError
from edge.terminal.formatting import format_names
from trainer.federation.masking import LEAST_NODES, count_neighbours, scarce_classes, shares_needed


class Member(NamedTuple):
    """What does not change while a node takes part in a run.

    Args:
        federation, run, name: of the node.
        spec: digest of the spec.
        nodes, threshold, neighbours: of the spec.
        classes: that the node tells with its keys.
        sums: whether a round is one of statistics.
        sign: statement, by its context -> our signature, hexadecimal.
        verify: node, context, statement, signature -> nothing; ForgedError unless it is that
            node's. A coordinator is none: with keys of its own in a cohort it would be one more
            that sides with it.
    """

    federation: str
    run: str
    name: str
    spec: str
    nodes: int
    threshold: int
    neighbours: int
    classes: Sequence[int]
    sums: Callable[[int], bool]
    sign: Callable[[str, bytes], str]
    verify: Callable[[str, str, bytes, str], None]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a node must not forget of the newest round that it has masks for."""

    run: str
    round: int
    root: str  # hexadecimal
    spec: str = ""  # digest of the spec under which it was begun; "" by version 0.1
    cohort: dict[Name, PublicKeys] = {}
    counted: tuple[Name, ...] = ()  # the members whose masks count
    shares: dict[Name, str] = {}  # encrypted for us, of those of the other ones that share with us
    survivors: tuple[Name, ...] = ()
    masked: str = ""  # digest of the contribution that its masks were used for
    released: str = ""  # digest of that contribution behind them: no other bytes leave the node
    # how often the node has written a record: of two copies the one with more is the newer
    writes: int = 0
    # the newest round with masks of each run that the node was in before this one
    earlier: dict[str, int] = {}
    # whose sums were counted in the first round of sums of each run
    summed: dict[str, tuple[Name, ...]] = {}

    @property
    def can_mask(self) -> bool:
        """Whether the masks of this round are known."""
        return bool(self.counted)


class Answer(NamedTuple):
    """What is sent: one of these."""

    keys: PublicKeys | None = None
    shares: Mapping[str, str] = {}
    signature: str = ""
    revealed: Mapping[str, str] = {}


def begin(member: Member, record: Record | None, round_: int) -> Record:
    """The record with which a node is in a round: a new one, unless it has begun that before.

    Raises:
        EdgeNodeError: the round is an earlier one than it has been in, or its spec is another one.
    """
    if record is None or record.run != member.run or record.round < round_:
        root = mask_keys.draw_root().hex()
        earlier = {} if record is None else {**record.earlier, record.run: record.round}
        summed = {} if record is None else record.summed
        reached = earlier.pop(member.run, 0)
        if round_ <= reached:
            raise went_back(round_, reached)
        return Record(
            run=member.run,
            round=round_,
            root=root,
            spec=member.spec,
            earlier=earlier,
            summed=summed,
        )
    if record.spec != member.spec:
        raise EdgeNodeError(
            f"round {record.round} was begun under another spec of this run: masks are used once",
            "ask the coordinator's operator to end this run and begin another one",
        )
    if record.round > round_:
        raise went_back(round_, record.round)
    return record


def went_back(to: int, reached: int) -> EdgeNodeError:
    """The error of a coordinator that has gone back, or says so."""
    return EdgeNodeError(
        f"the coordinator is in round {to} again, and this node has been in round {reached}: "
        "with secure aggregation nobody goes back, since another sum of a round would tell what "
        "single nodes have sent",
        "ask its operator to put the newer state folder back, or to end this run and begin "
        "another one",
    )


def public_keys(member: Member, record: Record) -> PublicKeys:
    """Our keys of the round, signed."""
    keys = _secrets(member, record).public(member.classes)
    statement = mask_keys.keys_statement(_scope(member, record), member.name, keys)
    return replace(keys, signature=member.sign(mask_keys.KEYS, statement))


def use_masks(record: Record, contribution: str) -> Record:
    """The record that has to be on disk before the contribution of this digest is masked.

    Raises:
        EdgeNodeError: the masks were used for another one. Who has both could take one from the
            other.
    """
    assert record.can_mask
    if record.masked not in ("", contribution):
        raise EdgeNodeError(
            f"round {record.round} was trained again by this node, and came out otherwise: "
            "behind the same masks both together would tell their difference",
            "ask the coordinator's operator to close the round without this node, then join again",
        )
    return replace(record, masked=contribution)


def release(record: Record, digest: str) -> Record:
    """Return the record to store before the masked contribution of this digest leaves.

    Raises:
        EdgeNodeError: another one has left, or may have.
    """
    if record.released not in ("", digest):
        raise EdgeNodeError(
            f"this node cannot rebuild the contribution to round {record.round} that it may have "
            "sent",
            "ask the coordinator's operator to close the round without this node, then join again",
        )
    return replace(record, released=digest)


def mask_seeds(member: Member, record: Record) -> list[tuple[bytes, int]]:
    """Seed and sign of each mask of our contribution to a round whose shares we have.

    We have one with each node that shares with us, or we with it.
    """
    assert record.can_mask
    partners = {*record.counted}.intersection(_neighbours(member, record)) | record.shares.keys()
    return _secrets(member, record).seeds(record.cohort, sorted(partners))


def advance(member: Member, record: Record, step: MaskingStep) -> tuple[Record, list[Answer]]:
    """The record that has to be on disk, and then what is answered.

    A step of another round has no effect.

    Raises:
        EdgeNodeError: the coordinator, or who speaks for it, says what an honest one does not.
    """
    answers: list[Answer] = []
    if (step.run, step.round) != (record.run, record.round):
        return record, answers
    if step.members and member.name in step.members:
        record = _join_cohort(member, record, step.members)
        answers += [] if record.can_mask else [Answer(shares=_share(member, record))]
    if step.counted and record.cohort:
        record = _take_shares(member, record, step.counted, step.shares)
    if step.survivors and record.can_mask:
        record = _take_survivors(member, record, step.survivors)
        answers.append(
            Answer(signature=member.sign(mask_keys.SURVIVORS, _survivors_statement(member, record)))
        )
    if step.signatures and record.survivors:
        _check_agreement(member, record, step.signatures)
        answers.append(Answer(revealed=dict(_reveal(member, record))))
    return record, answers


def _join_cohort(member: Member, record: Record, cohort: Mapping[str, PublicKeys]) -> Record:
    if record.cohort:
        if record.cohort != cohort:
            raise _lie(record, "names another cohort for it than before")
        return record
    if cohort[member.name] != public_keys(member, record):
        raise _lie(record, "has told other keys of this node than it has sent")
    if len(cohort) < member.threshold:
        raise _lie(
            record, f"names a cohort of {len(cohort)}, below the threshold of {member.threshold}"
        )
    # two lists of survivors could then have the threshold of signatures each
    if len(cohort) > member.nodes:
        raise _lie(
            record, f"names a cohort of {len(cohort)}, and the federation has {member.nodes} nodes"
        )
    scope = _scope(member, record)
    for name, keys in cohort.items():
        try:
            member.verify(
                name, mask_keys.KEYS, mask_keys.keys_statement(scope, name, keys), keys.signature
            )
            mask_keys.check(keys)
        except ForgedError as error:
            raise _lie(
                record, f"has told keys of {name} that are not {name}'s ({error})"
            ) from error
    return replace(record, cohort=dict(cohort))


def _share(member: Member, record: Record) -> dict[str, str]:
    """Our secrets' shares for our neighbours, encrypted."""
    shares = _shares_for(member, record, _neighbours(member, record))
    return _secrets(member, record).encrypt_shares(record.cohort, shares)


def _neighbours(member: Member, record: Record) -> list[str]:
    count = count_neighbours(member.neighbours, len(record.cohort))
    return _secrets(member, record).neighbours(record.cohort, count)


def _shares_for(member: Member, record: Record, names: Sequence[str]) -> dict[str, bytes]:
    needed = shares_needed(member.threshold, member.neighbours, len(record.cohort))
    return _secrets(member, record).shares_for(names, record.cohort, needed)


def _take_shares(
    member: Member, record: Record, counted: tuple[str, ...], shares: Mapping[str, str]
) -> Record:
    if record.counted:
        if (record.counted, record.shares.keys()) != (counted, shares.keys()):
            raise _lie(record, "names other nodes whose masks count than before")
        return record
    known = {*counted}
    if not known <= record.cohort.keys() or member.name not in known or len(known) != len(counted):
        raise _lie(
            record,
            "lets masks count of nodes that are none of its cohort, or not those of this one",
        )
    if not shares.keys() <= known - {member.name}:
        raise _lie(record, "passes on shares of nodes whose masks do not count")
    if len(known) < member.threshold:
        raise _lie(
            record,
            f"lets masks of {len(known)} nodes count; {member.threshold} of its cohort are the "
            "least",
        )
    _check_holders(member, record, counted)
    summed = record.summed
    if member.sums(record.round):
        _check_same_sums(record, known)
        summed = {record.run: counted, **summed}
    return replace(record, counted=counted, shares=dict(shares), summed=summed)


def _check_same_sums(record: Record, nodes: set[str]) -> None:
    """Check that a later round of sums is of the nodes of the first one.

    A coordinator can serve the first encoder again, whose sums are the same: those of a node that
    is in one of the two rounds alone would be their difference.
    """
    first = {*record.summed.get(record.run, nodes)}
    if first != nodes:
        raise EdgeNodeError(
            f"round {record.round} sums other nodes than the first round of sums: "
            f"{format_names(sorted(first ^ nodes))} would be told from the difference",
            "have the coordinator's operator end this run; this node keeps the model of its first "
            "sums",
        )


def _take_survivors(member: Member, record: Record, survivors: tuple[str, ...]) -> Record:
    if record.survivors:
        if record.survivors != survivors:
            raise _lie(
                record,
                "has named other survivors of it before, and two sums would tell what single "
                "nodes sent",
            )
        return record
    there = set(survivors)
    if not there <= set(record.counted) or len(there) != len(survivors) or member.name not in there:
        raise _lie(record, "names survivors that are none of its nodes, or not this one")
    if len(survivors) < member.threshold:
        raise _lie(
            record, f"names {len(survivors)} survivors, below the threshold of {member.threshold}"
        )
    _check_neighbours(member, record, there)
    _check_holders(member, record, survivors)
    if member.sums(record.round) and there != set(record.counted):
        # the same sums come again in another round of the run, and both would tell those left out
        raise _lie(record, "leaves nodes out of sums that all of them have to be in")
    return replace(record, survivors=survivors)


def _check_neighbours(member: Member, record: Record, survivors: set[str]) -> None:
    """Check that nobody is cut off from the others: a sum of few would be read by itself."""
    chosen = _neighbours(member, record)
    if len(chosen) < len(record.cohort) - 1 and 2 * len(survivors.intersection(chosen)) < len(
        chosen
    ):
        raise _lie(record, "names survivors among whom too few share secrets of this node")


def _check_holders(member: Member, record: Record, nodes: Sequence[str]) -> None:
    """Check that no class's sum would tell of one plant or two."""
    if member.sums(record.round) and (
        scarce := scarce_classes(record.cohort[name].classes for name in nodes)
    ):
        raise _lie(
            record, f"sums class {scarce[0]} over fewer than {LEAST_NODES} nodes that have it"
        )


def _check_agreement(member: Member, record: Record, signatures: Mapping[str, str]) -> None:
    statement = _survivors_statement(member, record)
    for name, signature in signatures.items():
        try:
            member.verify(name, mask_keys.SURVIVORS, statement, signature)
        except ForgedError as error:
            raise _lie(
                record, f"has told {name} other survivors than this node, or says so falsely"
            ) from error
    if len(signatures.keys() & set(record.survivors)) < member.threshold:
        raise _lie(
            record, f"shows fewer than {member.threshold} survivors' signatures under their list"
        )


def _reveal(member: Member, record: Record) -> Iterator[tuple[str, str]]:
    """Our share of one secret of each member: that of its own mask if it has contributed,
    else that of its pairs'.
    """
    own = _secrets(member, record)
    survivors = set(record.survivors)
    # others have those of whoever has lied to us
    known = own.decrypt_shares(record.cohort, record.shares)
    known |= _shares_for(member, record, [member.name])
    for name in sorted(known):
        try:
            of_pairs, of_own = mask_keys.split_pair(known[name])
        except ForgedError:
            continue
        pairs = of_own if name in survivors else of_pairs
        yield name, pairs.hex()


def _survivors_statement(member: Member, record: Record) -> bytes:
    return mask_keys.survivors_statement(
        _scope(member, record), record.cohort, record.counted, record.survivors
    )


def _scope(member: Member, record: Record) -> Scope:
    return Scope(member.federation, member.run, record.round, member.spec)


def _secrets(member: Member, record: Record) -> RoundSecrets:
    return RoundSecrets(bytes.fromhex(record.root), _scope(member, record), member.name)


def _lie(record: Record, what: str) -> EdgeNodeError:
    return EdgeNodeError(
        f"round {record.round} is not unmasked by this node: the coordinator {what}",
        "do not join this run again before its operator has explained that; what was said does "
        "not unmask this plant",
    )
