"""A node's session without network, disk and training:
what the shell around its state machine does, as a model.
"""

import hashlib
from collections import deque
from pathlib import Path
from typing import NamedTuple

import msgspec

from broker_config.protocol.codec import encoded_size
from broker_config.protocol.messages import (
    Delta,
    Manifest,
    Preprocessing,
    Spec,
    TensorSpec,
    Training,
)
from broker_config.protocol.round_contents import NO_BASE, broadcast_tensors
from broker_config.transfer.blob_transfer import Fetched
from trainer.federation.client.checkpoint import KEPT, Progress
from trainer.federation.client.session_events import (
    Announce,
    Answer,
    AnswerStep,
    Applied,
    Apply,
    CanMask,
    Contributed,
    Deploy,
    Deployed,
    Effect,
    Event,
    Fail,
    Fetch,
    GoBack,
    Look,
    Looked,
    Mask,
    Masked,
    Purge,
    Refined,
    Send,
    Serve,
    Served,
    Started,
    TellFinished,
    Train,
    WentBack,
)
from trainer.federation.client.session_state import Plan, Session, advance

FOLDER = Path("node-state")
NAME, RUN = "plant-a", "0123456789abcdef"
SESSION = "00000000000000a1"
ASKING = Look | Serve | GoBack | Apply | AnswerStep | Mask


def make_spec(rounds: int = 3, *, statistics: bool = False, deadline: float = 0.0) -> Spec:
    """A federation of this node and others; with `statistics`,
    nodes contribute sums to its last round.
    """
    return Spec(
        federation="steel",
        run=RUN,
        software="1",
        method="fedavg",
        options={},
        model="small",
        classes=("good", "scratch"),
        preprocessing=Preprocessing(size=32),
        training=Training(),
        rounds=rounds,
        nodes=2,
        quorum=2,
        seed=0,
        deadline=deadline,
        tensors={"encoder.weight": TensorSpec(shape=(2, 2), scale=10)},
        sends=("encoder",),
        statistics={"sums": TensorSpec(shape=(2,), scale=0, dtype="int64")} if statistics else {},
    )


def make_broadcast(spec: Spec, round_: int, content: str = "") -> Manifest:
    """What a round starts from; the one of round `spec.rounds` + 1 is the result."""
    return Manifest(
        federation=spec.federation,
        run=spec.run,
        round=min(round_, spec.rounds),
        node="coordinator",
        digest=hashlib.sha256(f"broadcast {content or round_}".encode()).hexdigest(),
        size=encoded_size(broadcast_tensors(spec, round_)),
        chunk_size=1024,
    )


def make_delta(spec: Spec, round_: int) -> Delta:
    """What a round's broadcast, or the result, is made of: that of the round before or,
    in the first round, nothing.
    """
    broadcast = make_broadcast(spec, round_)
    coded = msgspec.structs.replace(
        broadcast, digest=hashlib.sha256(f"delta {round_}".encode()).hexdigest(), size=9
    )
    return Delta(
        base=make_broadcast(spec, round_ - 1).digest if round_ > 1 else NO_BASE, blob=coded
    )


def make_contribution(broadcast: Manifest, node: str = NAME) -> Manifest:
    """What a node contributes to the round that starts from a broadcast."""
    digest = hashlib.sha256(f"{node} {broadcast.digest}".encode()).hexdigest()
    return msgspec.structs.replace(broadcast, node=node, digest=digest)


def make_masked(contribution: Manifest) -> Manifest:
    """What others may see of a contribution."""
    digest = hashlib.sha256(f"masked {contribution.digest}".encode()).hexdigest()
    return msgspec.structs.replace(contribution, digest=digest)


class Job(NamedTuple):
    """What the training thread does; `stage`: of the round, 0 for the model."""

    manifest: Manifest
    stage: int


class NodeModel:
    """A node's machine, its disk, its training thread, and what it has sent.

    Args:
        plan: of its first process.
        sends: whether contributions bear a blob.
        first_session: before the first one.
    """

    def __init__(self, plan: Plan, *, sends: bool = True, first_session: int = 0):
        self.plan, self._sends = plan, sends
        self.disk: dict[str, bool] = {}  # whether a blob is intact, by digest
        self.deltas_fit = True  # whether they make the broadcasts that they are for
        self.durable: Progress | None = None
        self.ends: list[Progress] = []
        self.trained: list[tuple[int, int]] = []  # rounds and stages, as they were begun
        self.session = first_session  # of the processes, which are counted
        self.lost: Manifest | None = None  # broadcast of the round whose state is damaged
        self.start()

    def start(self) -> None:
        """A process of the node begins, with what is on the disk."""
        self.session += 1
        self.plan = self.plan._replace(session=f"{self.session:016x}")
        self.state = Session(self.plan, self.durable, self.lost)
        self.job: Job | None = None
        self.fetching: Manifest | None = None
        self.outbox: deque[Announce | Send | TellFinished] = deque()
        self.error: Exception | None = None
        self.now = 0.0
        self.advance(Started())

    def advance(self, event: Event) -> list[Effect]:
        """Feed an event to the machine, perform what it wants, and return that."""
        pending, done = deque([event]), list[Effect]()
        while pending and not self.error:
            self.state, effects = advance(self.state, pending.popleft())
            asking = [each for each in effects if isinstance(each, ASKING)]
            assert len(asking) <= 1, "two questions at a time: the second one may be asked in vain"
            assert not asking or effects[-1] is asking[0], (
                "what follows a question was decided without its answer"
            )
            for effect in effects:
                done.append(effect)
                answer = self._perform(effect)
                if answer is not None:
                    pending.append(answer)
        return done

    def _perform(self, effect: Effect) -> Answer | None:
        match effect:
            case Look(digest):
                return Looked(digest, self.disk.get(digest, False), FOLDER / digest)
            case Serve(blob):
                return Served(blob, self.disk.get(blob.digest, False), FOLDER / blob.digest)
            case GoBack(round_):
                return WentBack(effect, *self._go_back(round_))
            case Apply(delta, broadcast):
                assert delta.base == NO_BASE or self.disk.get(delta.base), (
                    "there is nothing to apply it to"
                )
                assert self.disk.pop(delta.blob.digest), "it has not arrived"
                self.disk |= {broadcast.digest: True} if self.deltas_fit else {}
                return Applied(delta, self.deltas_fit)
            case AnswerStep() | Mask():
                return self._answer(effect)
            case Fetch(manifest):
                self.disk.pop(manifest.digest, None)
                self.fetching = manifest
            case Purge(kept):
                self.disk = {
                    digest: intact for digest, intact in self.disk.items() if digest in kept
                }
            case Train(broadcast):
                self._begin(broadcast)
            case Deploy(final):
                assert self.job is None, "it is busy"
                self.job = Job(final, 0)
            case Announce() | Send() | TellFinished():
                self.outbox.append(effect)
            case Fail(error):
                self.error = error
            case _:
                pass
        return None

    def _begin(self, broadcast: Manifest) -> None:
        assert self.job is None, "it is busy"
        assert self.disk.get(broadcast.digest), "it would train from what is not there"
        durable = self.durable
        resumed = durable is not None and (durable.round, durable.stage) == (
            broadcast.round,
            "contributed",
        )
        reached = durable.round if durable else 0
        assert resumed or broadcast.round > reached, (
            "it has trained this round, and has not gone back"
        )
        self.job = Job(broadcast, 2 if resumed else 1)
        self.trained.append((broadcast.round, self.job.stage))

    def _go_back(self, round_: int) -> tuple[Progress | None, bool]:
        assert self.job is None, "what it trains would be on the disk afterwards"
        assert self.durable is not None
        history = tuple(each for each in self.durable.history if each["round"] < round_)
        if not history:
            self.durable, self.ends = None, []
            return None, True
        earlier = [each for each in self.ends if each.round < round_]
        end = earlier[-1] if earlier else self.ends[0] if self.ends else self.durable
        is_exact = end.round == history[-1]["round"]
        self.durable = msgspec.structs.replace(
            end,
            round=round_ - 1,
            stage="refined",
            blob=end.blob if is_exact else None,
            history=history,
            counted=None,
        )
        self.ends = [each for each in self.ends if each.round < round_]
        return self.durable, is_exact

    # What comes to an end

    def arrive(self) -> None:
        """The blob that is being fetched is here."""
        assert self.fetching is not None
        manifest, self.fetching = self.fetching, None
        self.disk[manifest.digest] = True
        self.advance(Fetched(manifest))

    def finish_stage(self) -> None:
        """The training thread has done its job, and its result is on the disk."""
        assert self.job is not None
        (manifest, stage), self.job = self.job, None
        if stage == 0:
            self.advance(Deployed(FOLDER / "model", ("the mean is best",), {}))
        elif stage == 1:
            self.durable, self.lost = self._contributed(manifest), None
            self.job = Job(manifest, 2)
            self.advance(Contributed(self.durable))
        else:
            assert self.durable is not None
            self.durable = msgspec.structs.replace(self.durable, stage="refined")
            self.ends = [*self.ends, self.durable][-KEPT:]
            self.advance(Refined(self.durable))

    def _answer(self, effect: AnswerStep | Mask) -> Answer | None:
        """What the node knows of masks, or has made with them."""
        if isinstance(effect, AnswerStep):
            return CanMask(effect.step.round) if effect.step.shares else None
        own, received = effect.progress.blob, effect.progress.broadcast
        assert own is not None
        is_there = self.disk.get(own.digest) and self.disk.get(received.digest)
        masked = make_masked(own) if is_there else None
        self.disk |= {masked.digest: True} if masked else {}
        return Masked(masked, FOLDER / "contribution")

    def _contributed(self, manifest: Manifest) -> Progress:
        blob = make_contribution(manifest, self.plan.name) if self._sends else None
        if blob:
            self.disk[blob.digest] = True
        past = self.durable.history if self.durable else ()
        return Progress(
            run=RUN,
            round=manifest.round,
            stage="contributed",
            state=f"state-{manifest.round}",
            digest=manifest.digest,
            broadcast=manifest,
            weight=1.0,
            blob=blob,
            history=(*past, {"round": float(manifest.round)}),
        )

    def restart(self, *, loses_its_state: bool) -> None:
        """The process is killed, and another one begins;
        it may find the newest state damaged, if it has that still.
        """
        if loses_its_state and self.durable is not None and self.lost is None:
            self.lost = self.durable.broadcast
            if self.durable.stage == "refined" and self.ends:
                self.ends.pop()
            self.durable = self.ends[-1] if self.ends else None
        self.start()
