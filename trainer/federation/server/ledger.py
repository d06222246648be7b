"""Durable state of a coordinator: facts in the journal, tensors in the store,
contributions to the open round.

Tensors kept: the broadcast that the open round started from, and the contributions to it, in full
(so that the sums can be computed again after a restart, and rules other than the mean can read them
when the round closes). The next broadcast replaces them all, and what a kill has left behind. The
first broadcast stays where the method needs it after training. A broadcast's delta lasts as long as
the process.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import msgspec

from broker_config.protocol.codec import COMPRESSED_MARK, encode_tensors, encoded_size, read_tensors
from broker_config.protocol.errors import EdgeNodeError, PeerError, UsageError
from broker_config.protocol.messages import Contribution, RecordHead, Spec, TensorSpec
from broker_config.protocol.round_contents import (
    NO_BASE,
    basis,
    broadcast_tensors,
    contribution_tensors,
    is_statistics_round,
    masked_tensors,
    predates_binding,
)
from broker_config.security.mask_keys import Scope
from broker_config.security.one_time import digest_spec
from broker_config.storage import disk, hash_chain
from broker_config.storage.database import check_not_lost
from broker_config.transfer.blob_transfer import BlobStore
from trainer.federation.server.aggregation import after_training
from trainer.federation.server.coordinator import masking_state, round_state
from trainer.federation.server.coordinator.masking_state import Facts, Masking
from trainer.federation.server.journal import Blob, ContributionTotal, Journal, Run
from trainer.federation.server.journal import Contribution as Recorded
from trainer.federation.server.masked_sums import MaskedContributions
from trainer.federation.server.record_facts import Fact, as_entry
from trainer.federation.server.robust_rules import RULES, InMemory, OnDisk, Source
from trainer.federation.server.round_sums import collect
from trainer.federation.server.unmasking import masks_in_sum
from trainer.federation.update_codec import (
    decode_contribution,
    encode_broadcast,
    encode_start,
    is_coded,
    largest_coded,
)
from trainer.methods import make
from trainer.models.named_tensors import Arrays

_RESULT = "global.safetensors"


class Ledger:
    """One run of a federation on the coordinator's disk.

    All methods return after their effect is safe.

    Use as a context; in it, the state folder is this process's alone.

    Raises:
        EdgeNodeError: the disk fails, or the folder is used by another process.
    """

    def __init__(self, folder: Path):
        self._stack = ExitStack()
        self._stack.enter_context(disk.lock_folder(folder))
        try:
            self._journal = Journal(folder)
            self._stack.callback(self._journal.close)
            self.folder = folder
            self.store = BlobStore(folder / "blobs")
            self.run: Run | None = self._journal.latest()
            self.identities: dict[str, str] = {}  # of members, by name
            self.head: RecordHead | None = None  # of the record of what is settled
            self._record(self._journal.facts())
        except EdgeNodeError:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _record(self, facts: Iterable[Fact]) -> None:
        """Add what is settled to the record's head."""
        for _, head in hash_chain.chain(map(as_entry, facts), self.head):
            self.head = head

    def begin_or_continue(self, spec: Spec, broadcast: Arrays, *, new: bool) -> None:
        """Continue the newest run if it has these settings; begin one if there is none,
        or a `new` one is wanted.

        Raises:
            UsageError: there is a run of other settings or one that was aborted, `new` would throw
                rounds away, or there are tensors of a run that the journal does not know.
        """
        run = self.run
        if run is None and not new:
            check_not_lost(self.folder / Journal.FILE, self.store.folder, self.store.digests())
        if run is None or (new and not has_begun(run)):
            self._begin(spec, broadcast)
            return
        if new:
            raise UsageError(
                f"the run in {self.folder} is in round {run.round} of {run.spec.rounds}",
                "leave out --new to go on with it, or end it first with edge-node abort",
            )
        if run.outcome == "aborted":
            raise UsageError(
                f"the run in {self.folder} was aborted", "begin another one with --new"
            )
        if predates_binding(run.spec):
            raise UsageError(
                f"run {run.spec.run} in {self.folder} began with an earlier version of edge-node, "
                "whose masks and noise could hide two things",
                "end it with edge-node abort, and begin another one with --new",
            )
        if differ := ", ".join(_differences(run.spec, spec)):
            other = (
                "choose another --state folder"
                if has_begun(run)
                else "pass --new or choose another --state folder"
            )
            raise UsageError(
                f"the run in {self.folder} was begun with other settings: {differ}",
                f"give those of its start, or {other} for another run",
            )
        self._restore(run.broadcast.digest, lambda: encode_tensors(broadcast))

    def _begin(self, spec: Spec, broadcast: Arrays) -> None:
        """A new run; the one before is history.

        After a kill in between, the same settings make the same tensors.
        """
        data = encode_tensors(broadcast)
        self._journal.begin(spec, Blob(hashlib.sha256(data).hexdigest(), len(data)))
        self.store.put(data)
        self.run = self._journal.latest()
        self._record(self._journal.facts_since(spec.run, 0))

    def _restore(self, digest: str, make: Callable[[], bytes]) -> None:
        """Write a blob that is missing or was changed again, if `make` makes it."""
        if (
            not self.store.is_intact(digest)
            and hashlib.sha256(data := make()).hexdigest() == digest
        ):
            self.store.put(data)

    def resume(self, gone: Collection[str] = (), *, purge: bool = True) -> round_state.Federation:
        """Go on with the newest run. Returns where it stands.

        Nodes that are `gone` for good have no part in it any more: what they contributed to the
        open round does not count, and a quorum need not be larger than what is left. Contributions
        whose tensors are missing or were changed are dropped, too: their nodes, the `damaged`,
        offer them again. `purge` deletes all other tensors.

        Raises:
            UsageError: too few nodes are left.
            EdgeNodeError: the broadcast is not there or not what it was.
        """
        run = self.run
        assert run is not None
        self.damaged = frozenset(
            each.node for each in run.contributions if not self._is_intact(each)
        )
        contributions = [
            each for each in run.contributions if each.node not in {*gone, *self.damaged}
        ]
        plan = plan_of(run.spec, len(gone))
        self.spec = spec = run.spec
        self.broadcast_blob = run.broadcast
        self.identities.clear()  # others read it, too: it stays the same mapping
        self.identities.update(run.members)
        self.finished = set(run.finished)
        self._method = make(spec.method, spec.training, spec.options, spec.head, spec.privacy)
        self._gone = {*gone}
        self._drawn = {*run.drawn} - {*gone}
        if (result := self.folder / _RESULT).is_file():
            self._restore(run.broadcast.digest, result.read_bytes)
        self._verify(
            run.broadcast.digest,
            f"restore the folder {self.folder} from a copy, or end the run with edge-node abort "
            "and begin another with --new",
        )
        if purge:
            kept = {run.broadcast.digest, *(each.digest for each in contributions if each.digest)}
            kept |= self._kept
            self.store.purge(kept, arriving=True)
        expected = broadcast_tensors(spec, run.round)
        self.broadcast = dict(read_tensors(self.store.path(run.broadcast.digest), expected))
        # what the broadcast is made of: the digest of its base, a blob
        self.delta: tuple[str, Blob] | None = None
        if run.round <= 1 and spec.codec != "none":
            self.delta = NO_BASE, Blob(*self.store.put(encode_start(spec, self.broadcast)))
        self._collect(min(run.round, spec.rounds))
        self._contributed = {each.digest for each in contributions if each.digest}
        for each in contributions:
            self._contributions.add(each.node, self._source(each.digest), each.weight)
        self._journal.resume(spec.run, run.round, {*gone, *self.damaged})
        members = run.members.keys() - self._gone
        return round_state.restore(
            plan, run.round, members, self._drawn, self._contributions.contributors
        )

    def drop(self, node: str) -> round_state.Federation:
        """A node has no part in the run any more, as if it were `gone` when the run is resumed.

        Raises: as `resume`.
        """
        self.run = self._journal.latest()
        # what has arrived may have yet to be added
        return self.resume({*self._gone, node}, purge=False)

    def admit(self, node: str, identity: str) -> None:
        """A node holds a place, under this identity."""
        if self.identities.get(node) != identity:
            self._journal.admit(self.spec.run, node, identity)
            self.identities[node] = identity
            self.finished.discard(node)

    def validate(self, node: str, message: Contribution) -> None:
        """Validate a contribution before its blob is fetched.

        PeerError if it cannot be this node's to its round.
        """
        blob = message.blob
        spec = self.spec
        expected = self._expected()
        try:
            self._contributions.weigh(message.weight)
        except ValueError as error:
            raise PeerError(node, str(error), message.round) from error
        if (blob is None) != (not expected):
            raise PeerError(
                node, "its contribution carries the wrong number of blobs", message.round
            )
        if blob is None:
            return
        if (blob.federation, blob.run, blob.round, blob.node) != (
            spec.federation,
            spec.run,
            message.round,
            node,
        ):
            raise PeerError(
                node,
                "its manifest belongs to another federation, run, round or node",
                message.round,
            )
        largest = encoded_size if self.spec.codec == "none" else largest_coded
        if blob.size > (most := largest(expected)):
            raise PeerError(
                node, f"its manifest promises {blob.size} bytes; {most} are the most", message.round
            )
        statistics = is_statistics_round(spec, message.round)
        if statistics and message.basis != basis(spec, self.broadcast_blob.digest):
            raise PeerError(
                node,
                "its statistics were computed with another encoder or preprocessing",
                message.round,
                "install the coordinator's version of edge-node, remove the node's state folder, "
                "and join again",
            )

    def add_contribution(self, node: str, message: Contribution) -> None:
        """Take in a checked contribution whose blob is in the store.

        PeerError if that does not fit.
        """
        blob = message.blob
        with ExitStack() as reading:
            try:
                digest = self._expand(blob.digest, message.round) if blob else None
                source = self._source(digest)
                reading.enter_context(source.held())
                self._contributions.validate(source)
            except ValueError as error:  # DecodeError is one
                raise PeerError(node, str(error), message.round) from error
            kept = Blob(digest, blob.size) if blob and digest else None
            self._journal.add_contribution(self.spec.run, self._round, node, message.weight, kept)
            self._contributed |= {digest} if digest else set()
            self._contributions.add(node, source, message.weight)
            self._contributions.measure(self.broadcast)

    def masks(self) -> Masking:
        """How far the masks of the open round are, as far as that is a fact.

        Raises:
            EdgeNodeError: its sum cannot be unmasked any more.
        """
        facts = self._mask_facts(self.spec.run, self._round)
        if facts.survivors and {*facts.survivors} != self._contributions.contributors:
            raise EdgeNodeError(
                f"contributions to round {self._round} are missing in {self.folder}, and its "
                "nodes were told that they are in the sum: it cannot be unmasked",
                "restore the folder from a copy, or end the run with edge-node abort and begin "
                "another one with --new",
            )
        return masking_state.restore(
            self.spec.run, self.spec.mask_threshold, self.spec.mask_neighbours, self._round, facts
        )

    def _mask_facts(self, run: str, round_: int) -> Facts:
        found = self._journal.masks(run, round_)
        return msgspec.json.decode(found, type=Facts) if found else Facts()

    @property
    def survivors(self) -> frozenset[str]:
        """Nodes that were told that they are in the open round's sum."""
        assert self.run is not None
        return frozenset(self._mask_facts(self.run.spec.run, self.run.round).survivors)

    def record_masks(self, facts: Facts, drawn: Collection[str]) -> None:
        """How far the masks of the open round are; if it is given,
        who takes part in it from now on.
        """
        self._journal.record_masks(self.spec.run, self._round, msgspec.json.encode(facts), drawn)
        if drawn:
            self._drawn = {*drawn}

    def scope(self, round_: int) -> Scope:
        """What the masks of a round are bound to."""
        return Scope(self.spec.federation, self.spec.run, round_, digest_spec(self.spec))

    def unmask(self, masking: Masking) -> bool:
        """Take the masks from the open round's sum; whether what was revealed of them suffices.

        Raises:
            EdgeNodeError: all is revealed, and it does not.
        """
        assert isinstance(self._contributions, MaskedContributions)
        masks = masks_in_sum(masking, self.scope(self._round), self._mask_secrets)
        if masks is not None:
            self._contributions.unmask(masks)
        return masks is not None

    def _expand(self, digest: str, round_: int) -> str:
        """Make a contribution's blob what one to the open round is in full; return its digest.

        So that a restart needs no other broadcast, and a rule can read it slice by slice.
        """
        if self.spec.codec == "none" or not is_coded(
            self.store.read(digest, 0, len(COMPRESSED_MARK))
        ):
            return digest
        coded = self.store.path(digest).read_bytes()
        tensors = decode_contribution(self.spec, round_, coded, self.broadcast)
        return self.store.put(encode_tensors(tensors))[0]

    def write_broadcast_again(self) -> Path:
        """Replace the open round's broadcast, which was changed on the disk,
        by that in memory; return its path.
        """
        return self.store.path(self.store.put(encode_tensors(self.broadcast))[0])

    def discard(self, digest: str) -> None:
        """Forget a blob that has arrived, unless it is one of the run's own.

        A node may offer the blob of any broadcast as its contribution.
        """
        if digest not in self.served | self._contributed | self._kept:
            self.store.remove(digest)

    def has_counted(self, node: str, round_: int) -> bool:
        """Whether a closed round's mean holds a contribution of this node."""
        return self._journal.has_contributed(self.spec.run, round_, node)

    def newest_contribution(self, node: str) -> int:
        """The newest round that a contribution of this node is recorded to; 0 if there is none."""
        return self._journal.newest_contribution(self.spec.run, node)

    def contribution_totals(self) -> list[ContributionTotal]:
        """The contributions of each node to this run, in total."""
        return self._journal.contribution_totals(self.spec.run)

    @property
    def absent(self) -> set[str]:
        """Members that were to contribute to the open round and have not so far."""
        return (
            self._drawn or self.identities.keys() - self._gone
        ) - self._contributions.contributors

    def aggregate(self) -> Mapping[str, dict[str, float]]:
        """Aggregate the open round into the next broadcast;
        return how much counts of what was limited, by node.

        Not yet a fact: `open_round` or `conclude` follow.

        Raises:
            EdgeNodeError: the disk fails, or a contribution that is read again is not what it was.
        """
        if self.spec.aggregation.rule != "mean":
            for digest in sorted(self._contributed):
                self._verify(
                    digest,
                    "start the coordinator again: it drops what is damaged, and its node sends "
                    "it again",
                )
        before = self.broadcast
        base = self.broadcast_blob.digest
        following = after_training(
            self.spec,
            self._method.settle,
            self._round,
            self._read_first,
            self._contributions.aggregate(before, self.absent | self._gone),
        )
        self.broadcast, blob = encode_broadcast(self.spec, self._round, following, before)
        if is_coded(blob):
            self.delta = base, Blob(*self.store.put(blob))
            blob = encode_tensors(self.broadcast)
        self.broadcast_blob = Blob(*self.store.put(blob))
        return self._contributions.limited

    def open_round(self, round_: int, drawn: Collection[str]) -> None:
        """The round before is closed, and `round_` starts from the broadcast."""
        self._journal.open_round(self.spec.run, round_, self.broadcast_blob, drawn)
        if self._round:
            self._record(self._journal.facts_since(self.spec.run, self._round))
        self._collect(round_)
        self._contributed = set()
        self._drawn = {*drawn}
        self.store.purge(self.served | self._kept)

    def conclude(self) -> None:
        """The last round is closed: the broadcast is the run's result."""
        self._journal.conclude(self.spec.run, self.broadcast_blob)
        self._record(self._journal.facts_since(self.spec.run, self._round))
        self.run = self._journal.latest()
        self.store.purge(self.served)

    def save_result(self) -> Path:
        """Write the last broadcast to `global.safetensors` in the state folder; return its path."""
        path = self.folder / _RESULT
        with disk.writing(self.folder):
            disk.replace_bytes(path, encode_tensors(self.broadcast))
        return path

    def finish(self, node: str) -> None:
        """A node has its model."""
        if node not in self.finished:
            self._journal.finish_node(self.spec.run, node)
            self.finished.add(node)

    def abort(self) -> None:
        """The run ends early."""
        assert self.run is not None
        self._journal.abort(self.run.spec.run)
        self.run = self._journal.latest()

    def _collect(self, round_: int) -> None:
        """Make ready for the contributions to a round."""
        self._round = round_
        self._contributions = collect(self.spec, self._method, round_)
        self._mask_secrets: dict[str, bytes] = {}  # of its nodes, as far as they are known

    def _expected(self) -> Mapping[str, TensorSpec]:
        """What a contribution to the open round holds."""
        if self.spec.mask_threshold:
            return masked_tensors(self.spec, self._round)
        return contribution_tensors(self.spec, self._round)

    @property
    def served(self) -> set[str]:
        """Digests of the blobs that nodes fetch."""
        digest = [self.delta[1].digest] if self.delta else []
        return {self.broadcast_blob.digest, *digest}

    @property
    def _kept(self) -> set[str]:
        """Digests of the blobs that no node fetches, and a later round needs."""
        assert self.run is not None
        return {self.run.first.digest} if self._method.settle else set()

    def _read_first(self) -> Arrays:
        """Read the run's first broadcast."""
        assert self.run is not None
        digest = self.run.first.digest
        self._verify(
            digest,
            f"restore the folder {self.folder} from a copy, or end the run with edge-node abort; "
            "a run that an earlier version began goes on with that version",
        )
        return dict(read_tensors(self.store.path(digest), self.spec.tensors))

    def _source(self, digest: str | None) -> Source:
        return OnDisk(self.store.path(digest), self._expected()) if digest else InMemory({})

    def _is_intact(self, contribution: Recorded) -> bool:
        return contribution.digest is None or self.store.is_intact(contribution.digest)

    def _verify(self, digest: str, remedy: str) -> None:
        if not self.store.is_intact(digest):
            raise EdgeNodeError(
                f"the state folder {self.folder} is damaged: {self.store.path(digest)} is "
                "missing or was changed",
                remedy,
            )


def least_nodes(spec: Spec) -> int:
    """How few nodes can go on with a run."""
    rule = RULES.get(spec.aggregation.rule)
    return rule.least(spec.aggregation.liars) if rule else max(1, spec.mask_threshold)


def plan_of(spec: Spec, gone: int = 0) -> round_state.Plan:
    """The plan of a spec's rounds when so many of its nodes are `gone`.

    Raises:
        UsageError: too few are left.
    """
    left = spec.nodes - gone
    least = least_nodes(spec)
    if left < least:
        rule = "secure aggregation" if spec.mask_threshold else spec.aggregation.rule
        raise UsageError(
            f"{left} of {spec.nodes} nodes are left in the charter, and {rule} needs {least}",
            "end this run with edge-node abort, and begin another one",
        )
    return round_state.Plan(
        left,
        max(min(spec.quorum, left), spec.mask_threshold),
        spec.rounds,
        spec.sample,
        spec.seed,
        of_all=frozenset(
            round_ for round_ in (1, spec.rounds) if is_statistics_round(spec, round_)
        ),
        is_masked=spec.mask_threshold > 0,
    )


def has_begun(run: Run) -> bool:
    """Whether a run has rounds that another one would throw away."""
    return run.outcome is None and run.round > 0


# fields that follow from others, or from the version of edge-node
_FOLLOWING = (
    "run", "software", "tensors", "relays", "statistics", "first_totals", "revision",
)  # fmt: skip


def _differences(old: Spec, new: Spec) -> Iterator[str]:
    """Differences between two specs, in words; values that merely follow from others are left
    out.
    """
    for name in old.__struct_fields__:
        was = getattr(old, name)
        now = getattr(new, name)
        if was != now and name not in _FOLLOWING:
            plain = isinstance(was, int | float | str)
            name_text = f"{name} was {was}, is {now}" if plain else f"{name} differ"
            yield name_text
    if old.tensors != new.tensors and old.nodes == new.nodes:
        yield "tensors differ"
