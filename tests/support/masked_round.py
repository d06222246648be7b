"""One round of masked contributions between a coordinator's and nodes' state machines,
without a broker.

Messages come in any order, but for those of one sender; processes are killed and started again at
any moment.
"""

import random
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from broker_config.protocol.messages import MaskingAnswer, MaskingStep
from broker_config.security.mask_keys import Scope
from broker_config.security.signing import ForgedError, SigningKey, verify
from tests.support.round_events import contributed
from tests.support.wire_messages import RUN, SESSION
from trainer.federation.masking import least_threshold, member_state
from trainer.federation.masking.masks import apply_masks
from trainer.federation.masking.member_state import Answer, Member, Record
from trainer.federation.server.coordinator import (
    events,
    masking_machine,
    masking_state,
    round_machine,
    round_state,
)
from trainer.federation.server.coordinator.admission import Admission, classify
from trainer.federation.server.coordinator.effects import (
    RecordMasks,
    Refuse,
    Say,
    Scarce,
    Unmask,
    Unreadable,
)
from trainer.federation.server.coordinator.masking_state import Facts, Masking
from trainer.federation.server.unmasking import masks_in_sum
from trainer.models.named_tensors import Arrays

SCOPE = Scope("steel", RUN, 1, "e" * 64)


def make_members(
    names: Sequence[str], threshold: int, neighbours: int, classes: Mapping[str, Sequence[int]]
) -> dict[str, Member]:
    """Nodes that know each other's keys; if there are `classes`, the round is one of statistics."""
    keys = {name: SigningKey.generate() for name in names}

    def check(name: str, context: str, statement: bytes, signature: str) -> None:
        if name not in keys:
            raise ForgedError("no member")
        verify(keys[name].public, context, statement, bytes.fromhex(signature))

    return {
        name: Member(
            SCOPE.federation,
            RUN,
            name,
            SCOPE.spec,
            len(names),
            threshold,
            neighbours,
            classes.get(name, ()),
            lambda _: bool(classes),
            lambda context, statement, key=key: key.sign(context, statement).hex(),
            check,
        )
        for name, key in keys.items()
    }


def make_words(names: Sequence[str]) -> dict[str, Arrays]:
    """What each node contributes, before it is masked."""
    return {
        name: {
            "a": np.random.default_rng(number).integers(0, 2**32, 20, np.uint32),
            "b": np.array(number, np.uint32),
        }
        for number, name in enumerate(names)
    }


def add_words(parts: Sequence[Arrays]) -> Arrays:
    """The sum, modulo 2^32."""
    found = {name: np.zeros_like(each) for name, each in parts[0].items()}
    for part in parts:
        for name, words in part.items():
            found[name] += words
    return found


class MaskedRound:
    """A round that is open: its members, what is on their disks, and what is under way."""

    def __init__(
        self,
        nodes: int,
        quorum: int = 0,
        chance: random.Random | None = None,
        classes: Mapping[str, Sequence[int]] = {},
        neighbours: int = 0,
    ):
        self.names = tuple(f"plant-{number}" for number in range(nodes))
        self.threshold, self.neighbours = least_threshold(nodes), neighbours
        self.chance = chance or random.Random(0)
        self.members = make_members(self.names, self.threshold, neighbours, classes)
        self.words = make_words(self.names)
        self.records: dict[str, Record | None] = dict.fromkeys(self.names)
        self.gone: set[str] = set()
        of_all = frozenset({1} if classes else ())
        plan = round_state.Plan(nodes, quorum or nodes, 1, is_masked=True, of_all=of_all)
        self.scarce: list[int] = []  # classes that the coordinator does not sum
        self.unreadable: list[str] = []  # nodes whose secrets it cannot be told any more
        everyone = frozenset(self.names)
        self.federation = round_state.Federation(
            plan, round_state.Status.OPEN, 1, everyone, everyone
        )
        self.masking = Masking(RUN, self.threshold, neighbours)
        self.facts, self.drawn, self.arrived = Facts(), frozenset[str](), dict[str, Arrays]()
        self.found: Arrays | None = None  # the sum without masks
        self.secrets: dict[str, bytes] = {}  # that the coordinator has found
        # by who says it to whom
        self.ways: defaultdict[tuple[str, str], deque[object]] = defaultdict(deque)
        self.settle()
        for name in self.names:
            self.begin(name)

    def run(self) -> Arrays | None:
        """Let all happen that can; return the sum, or None if nobody can read it."""
        while way := self._choose():
            self.deliver(*way)
        return self.found

    def _choose(self) -> tuple[str, str] | None:
        open_ = [way for way, under_way in self.ways.items() if under_way]
        return self.chance.choice(open_) if open_ else None

    def deliver(self, sender: str, receiver: str) -> None:
        """Let the next message of one to another arrive."""
        message = self.ways[sender, receiver].popleft()
        if receiver in self.gone:
            return
        if isinstance(message, MaskingStep):
            self.receive_step(receiver, message)
        elif isinstance(message, MaskingAnswer):
            self.masking, due = masking_machine.hear(self.masking, sender, message)
            self.perform(due)
            self.settle()
        else:
            self.receive_contribution(sender, message)  # type: ignore[arg-type]

    # Nodes

    def begin(self, name: str) -> None:
        """A process of a node begins: it says its keys, and what it has contributed."""
        record = member_state.begin(self.members[name], self.records[name], 1)
        self.records[name] = record
        self.answer(name, Answer(keys=member_state.public_keys(self.members[name], record)))
        self.contribute(name)

    def receive_step(self, name: str, step: MaskingStep) -> None:
        record = self.records[name]
        assert record is not None
        record, answers = member_state.advance(self.members[name], record, step)
        self.records[name] = msgspec.json.decode(msgspec.json.encode(record), type=Record)
        for each in answers:
            self.answer(name, each)
        if step.counted:
            self.contribute(name)

    def contribute(self, name: str) -> None:
        record = self.records[name]
        if record and record.can_mask:
            seeds = member_state.mask_seeds(self.members[name], record)
            self.ways[name, "coordinator"].append(apply_masks(self.words[name], seeds))

    def answer(self, name: str, answer: Answer) -> None:
        message = MaskingAnswer(
            session=SESSION,
            run=RUN,
            round=1,
            keys=answer.keys,
            shares=dict(answer.shares),
            signature=answer.signature,
            revealed=dict(answer.revealed),
        )
        self.ways[name, "coordinator"].append(message)

    def lose(self, name: str) -> None:
        """A node goes for good; what it has said so far arrives."""
        self.gone.add(name)
        self.federation, _ = round_machine.advance(self.federation, events.Left(name))
        self.settle()

    # The coordinator

    def receive_contribution(self, name: str, masked: Arrays) -> None:
        if classify(self.federation, name, 1) is not Admission.DUE:
            return
        self.arrived[name] = masked
        self.federation, _ = round_machine.advance(self.federation, contributed(name))
        self.settle()

    def settle(self) -> None:
        self.masking, due = masking_machine.settle(self.masking, self.federation)
        self.perform(due)

    def perform(self, due: Sequence[masking_machine.MaskingEffect]) -> None:
        for effect in due:
            match effect:
                case RecordMasks(facts, drawn):
                    self.facts = msgspec.json.decode(msgspec.json.encode(facts), type=Facts)
                    self.drawn = frozenset(drawn) or self.drawn
                case events.Narrowed():
                    self.federation, _ = round_machine.advance(self.federation, effect)
                case Say(node, step):
                    self.ways["coordinator", node].append(step)
                case Scarce(found):
                    self.scarce = found
                case Unreadable(nodes):
                    self.unreadable = nodes
                case Unmask(masking):
                    self.unmask(masking)
                case Refuse(error):
                    raise error

    def unmask(self, masking: Masking) -> None:
        masks = masks_in_sum(masking, SCOPE, self.secrets)
        if masks is not None:
            self.found = apply_masks(add_words([*self.arrived.values()]), masks)

    def restart_coordinator(self) -> None:
        """Its process is killed: what it knows is what is on its disk.

        Nodes say again what they have said last.
        """
        plan = self.federation.plan
        self.federation = round_state.restore(plan, 1, self.names, self.drawn, self.arrived)
        if self.facts.survivors:
            self.federation = self.federation._replace(status=round_state.Status.UNMASKING)
        self.secrets = {}
        self.masking = masking_state.restore(RUN, self.threshold, self.neighbours, 1, self.facts)
        for name in sorted(self.gone):
            self.federation, _ = round_machine.advance(self.federation, events.Left(name))
        for name in self.names:
            if name not in self.gone:
                self.ways["coordinator", name].clear()
                self.begin(name)
        self.settle()

    def restart_node(self, name: str) -> None:
        """Its process is killed: what was under way to it is said again by who is asked."""
        if name not in self.gone:
            self.ways["coordinator", name].clear()
            self.begin(name)


def sum_of(round_: MaskedRound, names: Sequence[str]) -> Mapping[str, bytes]:
    """What these nodes contribute together, in the open."""
    return {
        name: words.tobytes()
        for name, words in add_words([round_.words[each] for each in names]).items()
    }
