"""State machine of a node's session: (state, event) -> (state, effects).

Pure: no MQTT, clock, files or training.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, get_args

from broker_config.protocol.codec import encoded_size
from broker_config.protocol.errors import EdgeNodeError, PeerError
from broker_config.protocol.messages import (
    Accepted,
    AnyMessage,
    Contribution,
    Delta,
    Manifest,
    MaskingStep,
    Presence,
    Refusal,
    RoundState,
    Spec,
    Stage,
    Welcome,
)
from broker_config.protocol.round_contents import (
    NO_BASE,
    basis,
    broadcast_tensors,
    is_statistics_round,
)
from broker_config.transfer.blob_transfer import Damaged, Fetched, FetchFailed
from trainer import progress as reports
from trainer.federation.client.checkpoint import Progress
from trainer.federation.client.discovery import ended_early
from trainer.federation.client.session_events import (
    Announce,
    Answer,
    AnswerStep,
    Applied,
    Apply,
    Begin,
    Begun,
    Cancel,
    CanMask,
    CheckRun,
    CloseRound,
    Connected,
    Contributed,
    Deploy,
    Deployed,
    Effect,
    End,
    Event,
    Fail,
    Fetch,
    GoBack,
    Look,
    Looked,
    Mask,
    Masked,
    OpenRound,
    Purge,
    Received,
    Refined,
    Report,
    Send,
    Serve,
    Served,
    Started,
    TellFinished,
    TellKeys,
    TellMetrics,
    TellOutcome,
    Tick,
    Train,
    WentBack,
    Withdraw,
)
from trainer.federation.masking.member_state import went_back
from trainer.progress.events import AnyEvent
from trainer.progress.timeline import Activity

MIN_INTERVAL = 1.0  # seconds between two answers to roll calls; more would pile up at the broker
SILENCE = 20.0  # seconds without an answer to Hello after which that is reported
_STAGES = get_args(Stage)


class Plan(NamedTuple):
    """What does not change while the session lasts."""

    spec: Spec
    name: str
    session: str  # of this process: messages for an earlier one have another
    folder: Path
    # the personal model is made of the run's result, and not of the last broadcast
    deploys_final: bool = True
    needs_final: bool = True  # or is compared with it
    has_images: bool = True
    previews: bool = False  # the node wants to know what joining would give, and no model
    # the session goes on after that, until the federation's next run
    awaits_next: bool = False
    # The run had ended when the node looked at it: what its plant demands of rounds was not
    # checked, and it was told that nothing of its images leaves it.
    was_over: bool = False


class NewRunError(EdgeNodeError):
    """The coordinator has begun another run since this node read the spec, or opened this one
    again.
    """


class Contact(NamedTuple):
    """What is known of the coordinator's process."""

    server: str = ""  # the process that has welcomed this one last
    is_admitted: bool = False  # whether one has
    is_away: bool = False  # it was said to be
    silence_noted: bool = False
    expects_hello: bool = False
    announced: float = float("-inf")  # when this node was, in seconds


class Sent(NamedTuple):
    """Rounds whose contribution has come so far; 0: none."""

    offered: int = 0  # it was offered
    accepted: int = 0  # the coordinator has it, or no longer wants it
    counted: int = 0  # the coordinator has it
    # the newest that the coordinator has of this node, as it said last; it may have been restored
    contributed: int = 0


class Masks(NamedTuple):
    """What is known of the masks of contributions, where they have some."""

    round: int = 0  # whose masks are known
    blob: Manifest | None = None  # the newest contribution behind them


class Session(NamedTuple):
    """The state."""

    plan: Plan
    progress: Progress | None = None  # of the last stage that is on disk
    # broadcast of a round that is to be trained again, until it has been
    lost: Manifest | None = None
    is_busy: bool = False  # the worker has a job whose result has not been handled yet
    contact: Contact = Contact()
    sent: Sent = Sent()
    masks: Masks = Masks()
    # the newest of each process of the coordinator
    told: Mapping[str, RoundState] = MappingProxyType({})
    fetching: Manifest | None = None
    void: Delta | None = None  # has not made the broadcast that it is for
    # by digest, since the last event from outside
    looked: Mapping[str, Looked] = MappingProxyType({})
    open_round: int = 0  # as reported; 0 when none is
    is_served: bool = False  # a newcomer has all that it needs of the coordinator
    # what the coordinator is told in a choosing run, once it is known
    losses: Mapping[str, float] = MappingProxyType({})
    result: Path | None = None  # the personal model, or the preview: the session is over

    @property
    def target(self) -> RoundState | None:
        """The round state to reach: of the coordinator's process that has welcomed us,
        or else the newest.

        A run that was aborted is so for good, whoever says it.
        """
        aborted = [each for each in self.told.values() if each.status == "aborted"]
        if aborted or self.contact.server in self.told:
            return aborted[0] if aborted else self.told[self.contact.server]
        return max(self.told.values(), key=_order, default=None)

    @property
    def offered(self) -> Manifest | None:
        """The blob of the newest contribution, as the coordinator may fetch it."""
        if self.plan.spec.mask_threshold:
            return self.masks.blob
        return self.progress.blob if self.progress else None

    @property
    def rounds_done(self) -> int:
        """The last round that is trained to its end."""
        if self.progress is None:
            return 0
        return self.progress.round if self.progress.stage == "refined" else self.progress.round - 1

    @property
    def left(self) -> Manifest | None:
        """Broadcast of a round that is begun, and to be trained to its end:
        one that was lost, or its stage 2.
        """
        if self.lost or self.progress is None or self.rounds_done == self.progress.round:
            return self.lost
        return self.progress.broadcast


Effects = tuple[Effect, ...]
Step = tuple[Session, Effects]


def advance(state: Session, event: Event) -> Step:
    """The next state and what has to be done, in order;
    at most the last effect is one that is answered at once.
    """
    if isinstance(event, Answer):
        return _take_answer(state, event)
    state = state._replace(looked=MappingProxyType({}))
    match event:
        case Tick(now):
            return _tick(state, now)
        case Connected():
            return _expect_hello(
                state._replace(contact=state.contact._replace(announced=float("-inf")))
            ), ()
        case Received(message, topic):
            return _receive(state, message, topic)
        case Deployed(_, lines, metrics) if state.plan.awaits_next:
            state = state._replace(losses=metrics, is_busy=False)
            shown = (*lines, "waiting for the federation's next run")
            return state, (TellOutcome(metrics), *map(_note, shown))
        case Deployed(path, lines, metrics):
            told = (TellOutcome(metrics),) if metrics else ()
            return state._replace(result=path), (*told, *map(_note, lines))
        case Begun(ready, lines):
            return state, (Report(ready), *map(_note, lines))
        case Fetched() | FetchFailed() | Damaged():
            return _handle_blob(state, event)
        case Started(damaged):
            notes = (
                _note(
                    f"{path} is damaged: going on from the end of the round before, and training "
                    "the next one again"
                )
                for path in damaged
            )
            return state, (Begin("waiting", state.rounds_done + 1), *notes)
        case Contributed(progress):
            old = state.offered
            kept = frozenset(each.digest for each in (progress.broadcast, progress.blob) if each)
            withdraw = [Withdraw(old.digest)] if old else []
            dropped: list[Effect] = [*withdraw, Purge(kept)]
            state = state._replace(
                progress=progress, lost=None, masks=state.masks._replace(blob=None)
            )
            return _then(
                [*dropped, End("training"), Begin("refining", progress.round)], _offer(state)
            )
        case Refined(progress):
            state = state._replace(progress=progress, is_busy=False)
            ended = (End("refining"), Begin("waiting", progress.round + 1), TellMetrics(progress))
            return _then(ended, _offer(state))


def _take_answer(state: Session, event: Answer) -> Step:
    match event:
        case Looked():
            return _proceed(state._replace(looked={**state.looked, event.digest: event}))
        case Served():
            return _offer_served(state, event)
        case CanMask(round_):
            return _offer(state._replace(masks=state.masks._replace(round=round_)))
        case Masked(blob, path):
            return _offer_masked(state, blob, path)
        case WentBack(effect, progress, is_exact):
            before = effect.round - 1
            withdrawn = state.offered
            sent = state.sent._replace(accepted=before, counted=min(state.sent.counted, before))
            state = state._replace(progress=progress, sent=sent, lost=effect.again)
            done: list[Effect] = [Withdraw(withdrawn.digest)] if withdrawn else []
            if not is_exact:
                done.append(
                    _note(
                        f"the state at the end of round {before} is not kept any more: what this "
                        "node alone has learnt is that of a later round"
                    )
                )
            return _then(done, _proceed(state))
        case Applied(delta, is_made):
            remembered = state if is_made else state._replace(void=delta)
            return _proceed(remembered)


# The coordinator


def _tick(state: Session, now: float) -> Step:
    contact = state.contact
    effects = list[Effect]()
    if not (contact.is_admitted or contact.silence_noted) and now > SILENCE:
        contact = contact._replace(silence_noted=True)
        effects.append(_note("the coordinator has not let us in so far; waiting for it"))
    if contact.expects_hello and now - contact.announced > MIN_INTERVAL:
        contact = contact._replace(expects_hello=False, announced=now)
        known = state.lost or state.progress
        round_ = known.round if known else 0
        effects.append(Announce(round_, state.is_served))
    return state._replace(contact=contact), tuple(effects)


def _expect_hello(state: Session) -> Session:
    """What may have been lost is offered again once the coordinator has answered."""
    return state._replace(contact=state.contact._replace(expects_hello=True))


def _receive(state: Session, message: AnyMessage, topic: str) -> Step:
    plan = state.plan
    contact = state.contact
    match message:
        case Refusal():
            return state, (CheckRun(message),)
        case Accepted(session=session, run=run) if (session, run) == (plan.session, plan.spec.run):
            return _handle_accepted(state, message)
        case RoundState(run=run) if run != plan.spec.run:
            return state, (CheckRun(),)
        case RoundState():
            return _handle_round_state(state, message)
        case MaskingStep() if plan.spec.mask_threshold:
            return state, (AnswerStep(message),)
        case Presence(online=True):
            return _expect_hello(state), ()  # it has come back, and may have missed messages
        case Presence():
            if state.target is None or state.target.status not in ("gathering", "open"):
                return state, ()
            state = state._replace(contact=contact._replace(is_away=True))
            return state, (_note("the coordinator is not connected; waiting for it"),)
        case Welcome(session=session) if session == plan.session:
            notes: list[Effect] = (
                [_note("the coordinator is back; going on")] if contact.is_away else []
            )
            contact = contact._replace(is_admitted=True, is_away=False, server=message.server)
            notes += _compare_progress(state, message)
            sent = state.sent._replace(contributed=message.contributed)
            state = state._replace(contact=contact, sent=sent)
            if state.losses:  # the coordinator may have been killed before it wrote them down
                notes.append(TellOutcome(state.losses))
            return _then([*notes, *_tell_keys(state)], _offer(state))
        case Welcome() | Accepted():
            return state, ()  # nothing to do, or meant for an earlier process of this node
        case _:
            return state, (_note(f"ignored an unexpected {type(message).__name__} on {topic}"),)


def _compare_progress(state: Session, welcome: Welcome) -> list[Effect]:
    """Note what the coordinator has of us that we have not:
    our folder may have been restored from a copy.
    """
    reached = state.progress.round if state.progress else 0
    if not 0 < reached < welcome.contributed > state.sent.contributed:
        return []
    return [
        _note(
            f"the coordinator has this node's contribution to round {welcome.contributed}, and "
            f"{state.plan.folder} knows of round {reached}: it is an older copy. Going on from "
            "there; to lose nothing, stop this node, put the newer folder back, and join again"
        )
    ]


def _handle_accepted(state: Session, message: Accepted) -> Step:
    progress = state.progress
    round_ = message.round
    sent = state.sent
    if message.counted:
        sent = sent._replace(contributed=max(sent.contributed, round_))
    if progress is None or progress.round != round_ or sent.accepted >= round_:
        return state._replace(sent=sent), ()
    sent = sent._replace(accepted=round_)
    blob = state.offered
    name = state.plan.name
    told: AnyEvent = reports.Late(node=name, round=round_)
    if message.counted:
        sent = sent._replace(counted=round_)
        size = blob.size if blob else 0
        told = reports.Contribution(node=name, round=round_, weight=progress.weight, bytes=size)
    withdrawn = [Withdraw(blob.digest)] if blob else []
    # the model may have waited to know
    return _then((End("sending"), *withdrawn, Report(told)), _proceed(state._replace(sent=sent)))


def _handle_round_state(state: Session, target: RoundState) -> Step:
    """Make the newest round state the one to reach."""
    before = state.told.get(target.server)
    if before is not None and _order(target) < _order(before):
        return state, ()  # it was delayed
    expected = broadcast_tensors(state.plan.spec, target.round + (target.status == "finished"))
    promised = target.broadcast.size if target.broadcast else 0
    most = encoded_size(expected)
    if promised > most:
        return state, (
            Fail(
                EdgeNodeError(
                    f"the broadcast of round {target.round} promises {promised} bytes; {most} "
                    "are the most",
                    "somebody else writes to the federation's topics, or its coordinator is "
                    "broken: ask its operator",
                )
            ),
        )
    state = state._replace(told={**state.told, target.server: target})
    if target is not state.target:
        # of an earlier process of the coordinator, or of one that has not welcomed us so far
        return state, ()
    notes = list[Effect]()
    reason_before = "" if before is None else before.reason
    if target.status == "open" and target.reason != reason_before:
        outcome = f"is {target.reason}" if target.reason else "goes on"
        notes += [_note(f"round {target.round} {outcome}")]
    notes += _tell_keys(state) if before is None or before.round < target.round else []
    step = _offer(state) if before is None else _proceed(state)
    return _then(notes, step)


def _tell_keys(state: Session) -> list[Effect]:
    """Take part in the masks of the open round, while it is trained;
    or ask for what was missed of them.
    """
    plan = state.plan
    target = state.target
    contact = state.contact
    if not (
        plan.spec.mask_threshold
        and target
        and contact.is_admitted
        and target.server == contact.server
    ):
        return []
    takes_part = not target.participants or plan.name in target.participants
    return [TellKeys(target.round)] if target.status == "open" and takes_part else []


def _handle_blob(state: Session, event: Fetched | FetchFailed | Damaged) -> Step:
    match event:
        case Damaged():
            return _offer(state)  # which finds out
        case Fetched(manifest) | FetchFailed(manifest) if manifest != state.fetching:
            return state, ()  # a newer round has begun meanwhile
        case Fetched(manifest):
            received = reports.Received(
                node=state.plan.name, round=manifest.round, bytes=manifest.size
            )
            done = (End("receiving"), Report(received))
            return _then(done, _use(state._replace(fetching=None), manifest))
        case FetchFailed(manifest, PeerError()) if (
            delta := _delta_of(state, manifest)
        ) is not None:
            return _proceed(state._replace(fetching=None, void=delta))
        case FetchFailed(manifest, error):
            raised = event.ours("then join again: the node goes on where it was") or EdgeNodeError(
                f"the broadcast of round {manifest.round} did not arrive: {error}",
                "check the coordinator's log and the broker's packet limits, then join again",
            )
            return state, (Fail(raised, error),)


# Towards the newest round


def _proceed(state: Session) -> Step:
    """Take the next step towards the newest round state; called whenever something has changed."""
    target = state.target
    progress = state.progress
    if target is None or state.is_busy:
        return state, ()
    if (error := _find_end(state, target)) is not None:
        return state, (Fail(error),)
    if target.broadcast is None:
        return state, ()
    if target.status == "open" and state.losses:
        # the coordinator has gone back, and the run's result may be another one
        state = state._replace(losses=MappingProxyType({}))
    if progress and progress.round > target.round and state.contact.server == target.server != "":
        if state.plan.spec.mask_threshold:
            return state, (Fail(went_back(target.round, progress.round)),)
        text = (
            f"the coordinator is in round {target.round} again, and this node has been in round "
            f"{progress.round}: its state was restored from an older copy; going back with it"
        )
        # and may close before this node had trained it again
        has_ours = state.sent.contributed == target.round
        return state, (_note(text), GoBack(max(1, target.round + has_ours)))
    if state.left:
        return _train_what_is_left(state, state.left, target.broadcast)
    # the personal model needs it
    if progress and progress.broadcast.digest == target.broadcast.digest:
        is_here, state, effects = _obtain(state, target.broadcast)
        if not is_here:
            return state, effects
    if target.status == "finished":
        return (state, ()) if state.losses else _finish(state, target.broadcast)
    if not state.contact.is_admitted:
        # what is retained may be old or replayed; a coordinator that has answered is there now
        return state, ()
    if target.round <= state.rounds_done or (
        target.participants and state.plan.name not in target.participants
    ):
        return state, ()
    opened = [OpenRound(target.round)] if state.open_round != target.round else []
    is_here, state, effects = _obtain(state._replace(open_round=target.round), target.broadcast)
    step = _train(state, target.broadcast) if is_here else (state, effects)
    return _then(opened, step)


def _find_end(state: Session, target: RoundState) -> EdgeNodeError | None:
    """Return why the session ends with this round state; None if it goes on."""
    if target.status == "aborted":
        return ended_early(target)
    if target.status == "open" and state.plan.was_over:
        return NewRunError(
            "the run had finished, and its coordinator has opened it again",
            "run edge-node join again: what this plant demands is checked first",
        )
    return None


def _train_what_is_left(state: Session, left: Manifest, served: Manifest) -> Step:
    """Train what is left: a round that was lost, or stage 2, in which a process was killed."""
    looked = state.looked.get(left.digest)
    if looked is None:
        return state, (Look(left.digest),)
    if looked.is_intact:
        return _train(state, left)
    if left == served:
        _, state, effects = _obtain(state, left)
        return state, effects
    noted = _note(
        f"{looked.path} is damaged, and the coordinator has it no more: round {left.round} is "
        "not trained to its end"
    )
    if state.lost:
        return _then((noted,), _proceed(state._replace(lost=None)))
    return state, (noted, GoBack(left.round))


def _train(state: Session, broadcast: Manifest) -> Step:
    is_resumed = state.progress is not None and state.progress.round == broadcast.round
    activity: Activity = "refining" if is_resumed else "training"
    begun = Begin(activity, broadcast.round)
    counted = state.sent.contributed >= broadcast.round - 1
    return state._replace(is_busy=True), (End("waiting"), begun, Train(broadcast, counted))


def _obtain(state: Session, manifest: Manifest) -> tuple[bool, Session, Effects]:
    """Whether a blob is here; and if not, or if that is not known, what is to be done about it."""
    looked = state.looked.get(manifest.digest)
    former = state.fetching
    if looked is None:
        return False, state, (Look(manifest.digest),)
    if looked.is_intact:
        return True, state, ()
    target = state.target
    wanted = manifest
    delta = target.delta if target and target.broadcast == manifest else None
    if delta and delta != state.void and delta.blob.size < manifest.size:
        base = state.looked.get(delta.base)
        if base is None and delta.base != NO_BASE:
            return False, state, (Look(delta.base),)
        wanted = delta.blob if base is None or base.is_intact else manifest
    cancelled = [Cancel(former)] if former and former.digest != wanted.digest else []
    effects: Effects = (
        End("waiting"),
        Begin("receiving", manifest.round),
        *cancelled,
        Fetch(wanted),
    )
    return False, state._replace(fetching=wanted), effects


def _use(state: Session, arrived: Manifest) -> Step:
    """Go on with a blob that has arrived: a delta first makes the broadcast."""
    delta = _delta_of(state, arrived)
    target = state.target
    if delta is None or target is None or target.broadcast is None:
        return _proceed(state)
    return state, (Apply(delta, target.broadcast, target.status == "finished"),)


def _delta_of(state: Session, blob: Manifest) -> Delta | None:
    """The delta of the round state to reach, if this is its blob."""
    delta = state.target.delta if state.target else None
    return delta if delta and delta.blob == blob else None


def _finish(state: Session, final: Manifest) -> Step:
    plan = state.plan
    progress = state.progress
    if progress is None and plan.spec.chooses:
        return state, ()  # it came too late to be asked, and waits for the next run
    if progress is None and not plan.spec.statistics:
        error = EdgeNodeError(
            "the federation ended before this node trained a round",
            "join the next one from its start",
        )
        return state, (Fail(error),)
    if progress is None and not state.contact.is_admitted:
        return state, ()
    counted = _is_counted(state, progress) if progress else False
    if plan.spec.statistics and counted is None:
        return state, ()  # the coordinator is about to say it
    lacking = None
    if progress and not plan.deploys_final:  # the model is made of what the last round began with
        looked = state.looked.get(progress.broadcast.digest)
        if looked is None:
            return state, (Look(progress.broadcast.digest),)
        lacking = None if looked.is_intact else looked.path
    if plan.needs_final or lacking:
        is_here, state, effects = _obtain(state, final)
        if not is_here:
            return state, effects
    done: list[Effect] = [End("waiting"), CloseRound()]
    if plan.previews:
        done.append(
            _note("all sums are here; leaving out this plant's images, one after the other")
        )
    elif plan.has_images:
        done.append(_note("the federation has finished; comparing its model with training alone"))
    if lacking:
        done.append(
            _note(
                f"{lacking} is damaged, and the coordinator has it no more: the model is made "
                "with the result of the last round in its place"
            )
        )
    if progress is None:  # it trains alone for minutes, in which nobody need wait for it
        done.append(TellFinished())
    state = state._replace(is_busy=True, open_round=0, is_served=progress is None)
    return state, (*done, Deploy(final, bool(counted)))


def _is_counted(state: Session, progress: Progress) -> bool | None:
    """Whether the run's result holds this node's part of the last round;
    None if that is not known yet.
    """
    if progress.round < state.plan.spec.rounds:
        # what it knew of that round may be damaged
        return state.sent.contributed == state.plan.spec.rounds
    return (
        state.sent.counted == progress.round
        if state.sent.accepted == progress.round
        else progress.counted
    )


# The contribution


def _offer(state: Session) -> Step:
    """Offer the contribution to the open round, again if necessary: the coordinator counts it once.

    Then go on.
    """
    progress = state.progress
    target = state.target
    sent = state.sent
    contact = state.contact
    if (
        progress is None
        or target is None
        or not contact.is_admitted
        or target.server != contact.server
    ):
        return _proceed(state)  # where the coordinator stands is not known yet
    is_lost = sent.contributed < progress.round == target.round and target.status == "open"
    if target.round < progress.round or (progress.round <= sent.accepted and not is_lost):
        return _proceed(state)
    if state.plan.spec.mask_threshold and progress.blob and state.masks.blob is None:
        is_due = state.masks.round == progress.round == target.round
        return (state, (Mask(progress),)) if is_due else _proceed(state)
    if state.offered:
        return state, (Serve(state.offered),)
    if target.round > progress.round:
        return _proceed(state)  # a newer round has begun
    # it has gone back to what was left of a later round
    if progress.broadcast.round != progress.round:
        go_back = () if state.is_busy else (GoBack(progress.round),)
        return state, go_back
    return _contribute(state, progress, None)


def _offer_masked(state: Session, blob: Manifest | None, path: Path) -> Step:
    if blob is None:
        return _make_again(state, path)
    return _offer(state._replace(masks=state.masks._replace(blob=blob)))


def _make_again(state: Session, damaged: Path) -> Step:
    """Train the round again whose contribution cannot be made, or offered, any more."""
    progress = state.progress
    assert progress is not None
    if state.is_busy:
        return state, ()  # it is looked at again then
    text = f"{damaged} is damaged: training round {progress.round} again"
    return state, (_note(text), GoBack(progress.round, progress.broadcast))


def _offer_served(state: Session, served: Served) -> Step:
    progress = state.progress
    target = state.target
    assert progress is not None
    assert target is not None
    if not served.is_intact and target.round > progress.round:
        return _proceed(state)  # a newer round has begun
    if not served.is_intact and state.sent.contributed < progress.round:
        if state.plan.spec.mask_threshold:
            return _offer(state._replace(masks=state.masks._replace(blob=None)))
        return _make_again(state, served.path)
    return _then((Begin("sending", progress.round),), _contribute(state, progress, served.blob))


def _contribute(state: Session, progress: Progress, blob: Manifest | None) -> Step:
    spec = state.plan.spec
    sent = state.sent._replace(offered=progress.round)
    weight = 1.0 if spec.mask_threshold else progress.weight
    basis_digest = (
        basis(spec, progress.broadcast.digest) if is_statistics_round(spec, progress.round) else ""
    )
    message = Contribution(
        session=state.plan.session,
        run=progress.run,
        round=progress.round,
        weight=weight,
        blob=blob,
        basis=basis_digest,
        server=state.contact.server,
    )
    return _then((Send(message),), _proceed(state._replace(sent=sent)))


def current_activity(state: Session) -> reports.ActivityKind:
    """What the node does: sending, while it also trains stage 2,
    since others wait for the upload.
    """
    target = state.target
    progress = state.progress
    if target is None or target.broadcast is None:
        return "waiting"
    if progress and state.sent.offered > state.sent.accepted:
        return "sending"
    if state.is_busy:
        is_over = target.status == "finished" and (progress is None or progress.stage == "refined")
        return "judging" if is_over else "training"
    return "receiving" if state.fetching else "waiting"


def _then(effects: Sequence[Effect], step: Step) -> Step:
    """The step, with these effects before its own."""
    state, more = step
    return state, (*effects, *more)


def _note(text: str) -> Report:
    return Report(reports.Note(text=text))


def _order(state: RoundState) -> tuple[int, int]:
    """The order in which round states of a run are published."""
    return state.round, _STAGES.index(state.status)
