"""A node's masks on its disk, and its contributions behind them."""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from broker_config.protocol.codec import encode_tensors, read_tensors
from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.protocol.messages import Manifest, MaskingAnswer, MaskingStep, Spec
from broker_config.protocol.round_contents import (
    broadcast_tensors,
    contribution_tensors,
    is_statistics_round,
)
from broker_config.security.message_signing import MessageSigner
from broker_config.security.one_time import digest_spec
from broker_config.transfer.blob_store import BlobStore
from trainer.federation import masking
from trainer.federation.client import checkpoint
from trainer.federation.client.checkpoint import Progress
from trainer.federation.masking import member_state
from trainer.federation.masking.grid import contribution_words
from trainer.federation.masking.masks import apply_masks
from trainer.federation.masking.member_state import Answer, Member
from trainer.federation.masking.step_parts import StepParts
from trainer.methods.base import Method


class MaskedContributions:
    """What a node masks, and says of its masks.

    All methods return after their effect is on the disk.

    Args:
        spec: the federation.
        name: of the node.
        session: of this process.
        signer: of the node's kit; None where it has none.
        folder: the node's state folder.
        classes: of its images.

    Raises:
        UsageError: the node has no kit, or the spec's threshold promises nothing.
        EdgeNodeError: what the folder knows of masks is damaged.
    """

    def __init__(
        self,
        spec: Spec,
        name: str,
        session: str,
        signer: MessageSigner | None,
        folder: Path,
        classes: Sequence[int] = (),
    ):
        if signer is None:
            raise UsageError(
                f"federation {spec.federation!r} masks what its nodes contribute, with keys that "
                "this node lacks",
                "take a kit (--kit)",
            )
        if not _protects(spec):
            raise UsageError(
                f"federation {spec.federation!r} lets {spec.mask_threshold} of {spec.nodes} "
                f"nodes unmask a sum, each with shares for {spec.mask_neighbours or 'all'} "
                "others, which protects nobody",
                "ask its operator for a run with another version of edge-node",
            )
        self._spec = spec
        self._session = session
        self._folder = folder
        told = tuple(classes) if spec.statistics else ()
        self._member = Member(
            spec.federation,
            spec.run,
            name,
            digest_spec(spec),
            spec.nodes,
            spec.mask_threshold,
            spec.mask_neighbours,
            told,
            lambda round_: is_statistics_round(spec, round_),
            signer.sign_statement,
            signer.verify_statement,
        )
        self._record = checkpoint.load_masks(folder)
        if self._record is not None:
            checkpoint.save_masks(folder, self._record)  # one of the two copies may be damaged
        self._parts = StepParts()

    def begin(self, round_: int) -> MaskingAnswer:
        """Our keys of a round. EdgeNodeError if it is an earlier one than this node has been in."""
        self._keep(member_state.begin(self._member, self._record, round_))
        assert self._record is not None
        return self._say(Answer(keys=member_state.public_keys(self._member, self._record)))

    def advance(self, step: MaskingStep) -> list[MaskingAnswer]:
        """What is answered to a step, or to its last part.

        EdgeNodeError if an honest coordinator does not say it.
        """
        whole = self._parts.add(step)
        if self._record is None or whole is None:
            return []
        record, answers = member_state.advance(self._member, self._record, whole)
        self._keep(record)
        return [self._say(each) for each in answers]

    def can_mask(self, round_: int) -> bool:
        """Whether the masks of a round are known."""
        return self._record is not None and self._record.round == round_ and self._record.can_mask

    def mask(self, store: BlobStore, method: Method, contributed: Progress) -> Manifest | None:
        """A contribution behind masks, in the store;
        None if what it is made from is not there any more.

        Raises:
            EdgeNodeError: another one was masked in its round.
        """
        assert contributed.blob is not None
        assert self._record is not None
        round_ = contributed.round
        own = contributed.blob
        received = contributed.broadcast
        if not (store.is_intact(own.digest) and store.is_intact(received.digest)):
            return None
        with self._naming_folder():
            self._keep(member_state.use_masks(self._record, own.digest))
        tensors = dict(
            read_tensors(store.path(own.digest), contribution_tensors(self._spec, round_))
        )
        broadcast = dict(
            read_tensors(store.path(received.digest), broadcast_tensors(self._spec, round_))
        )
        words = contribution_words(
            self._spec, method, round_, tensors, broadcast, contributed.weight
        )
        masked = apply_masks(words, member_state.mask_seeds(self._member, self._record))
        encoded = encode_tensors(masked)
        digest = hashlib.sha256(encoded).hexdigest()
        with self._naming_folder():
            self._keep(member_state.release(self._record, digest))
        digest, size = store.put(encoded)
        return msgspec.structs.replace(own, digest=digest, size=size)

    @contextlib.contextmanager
    def _naming_folder(self) -> Iterator[None]:
        """Say which folder does not agree with what has left."""
        try:
            yield
        except EdgeNodeError as error:
            raise EdgeNodeError(
                f"{error.what}; {self._folder} may be an older copy in part",
                f"put the newer {self._folder} back, and join again. If there is none: "
                f"{error.remedy}",
            ) from error

    def _keep(self, record: member_state.Record) -> None:
        if record != self._record:
            before = self._record.writes if self._record else 0
            record = msgspec.structs.replace(record, writes=before + 1)
            checkpoint.save_masks(self._folder, record)
            self._record = record

    def _say(self, answer: Answer) -> MaskingAnswer:
        assert self._record is not None
        return MaskingAnswer(
            session=self._session,
            run=self._spec.run,
            round=self._record.round,
            keys=answer.keys,
            shares=dict(answer.shares),
            signature=answer.signature,
            revealed=dict(answer.revealed),
        )


def _protects(spec: Spec) -> bool:
    """Whether nobody can unmask a sum with fewer nodes than we promise."""
    nodes = spec.nodes
    return (
        masking.LEAST_NODES <= nodes <= masking.MOST_NODES
        and spec.mask_threshold >= masking.least_threshold(nodes)
        and masking.least_neighbours(nodes)
        <= spec.mask_neighbours
        <= masking.most_neighbours(nodes)
    )
