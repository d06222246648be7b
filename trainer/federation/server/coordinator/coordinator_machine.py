"""State machine of a federation's coordinator: (state, event) -> (state, effects).

Pure: no MQTT, clock or files.

Around the rounds (`round_machine`) and their masks (`masking_machine`) it has who may take part,
who is told what, and when the coordinator may go.
"""

from collections.abc import Collection, Sequence

from broker_config.protocol.errors import EdgeNodeError, PeerError
from broker_config.protocol.messages import (
    Accepted,
    Contribution,
    Finished,
    MaskingAnswer,
    Refusal,
    Spec,
    Telemetry,
)
from broker_config.protocol.round_contents import is_statistics_round
from trainer import progress
from trainer.federation.server.coordinator import masking_machine, round_machine
from trainer.federation.server.coordinator.admission import Admission, classify
from trainer.federation.server.coordinator.coordinator_state import Coordination
from trainer.federation.server.coordinator.effects import (
    Abort,
    Accept,
    Admit,
    Cancel,
    Collect,
    Drop,
    Effect,
    Fail,
    Forget,
    Forgotten,
    Open,
    Pause,
    Publish,
    RecordFinished,
    Refuse,
    Reject,
    Report,
    Resume,
    Scarce,
    Show,
    ShowRound,
    Unmask,
    Unreadable,
    WelcomeNewcomer,
)
from trainer.federation.server.coordinator.events import (
    Acted,
    Contributed,
    Dropped,
    Event,
    Expired,
    Joined,
    Left,
    Narrowed,
    Opened,
    Refused,
    RoundEvent,
    Started,
    Tick,
    Told,
    Unmasked,
)
from trainer.federation.server.coordinator.masking_machine import MaskingEffect
from trainer.federation.server.coordinator.masking_state import Masking
from trainer.federation.server.coordinator.round_state import Status
from trainer.federation.server.masked_sums import scarce_error
from trainer.federation.server.membership import GRACE
from trainer.federation.server.operator_actions import Action
from trainer.federation.server.robust_rules import RULES

Step = tuple[Coordination, tuple[Effect, ...]]


def advance(state: Coordination, event: Event) -> Step:
    """The next state and what has to be done, in order."""
    state, effects = _react(state, event)
    if state.masking is None:
        return state, effects
    masking, more = masking_machine.settle(state.masking, state.rounds)
    state, told = _mask(state._replace(masking=masking), more)
    # what comes of it is not known here
    is_tried = any(isinstance(each, Unmask) for each in more)
    unread = [] if is_tried else _tell_unread(state, masking)
    return state, (*effects, *told, *unread)


def _tell_unread(state: Coordination, masking: Masking) -> list[Effect]:
    """Say that a sum is there, and for whom it waits to be unmasked."""
    if state.rounds.status is not Status.UNMASKING:
        return []
    known = masking.revealed.keys()
    here = state.rounds.contributed & (state.rounds.present | known)
    if len(here) < masking.threshold:
        text = (
            f"round {masking.round} waits for {masking.threshold} of its nodes to unmask its "
            f"sum, and {len(here)} are there: nobody else can"
        )
        return [Report(progress.Note(text=text), ("unmasking", masking.round, len(here)))]
    if lonely := masking_machine.find_unreadable(masking, here):
        text = (
            f"round {masking.round} waits for nodes that hold shares of {lonely[0]}'s secrets to "
            "unmask its sum: too few of them are there"
        )
        return [Report(progress.Note(text=text), ("shares", masking.round, lonely[0]))]
    if len(known) < masking.threshold or masking_machine.find_unreadable(masking, known):
        return []
    awaited = ", ".join(sorted({*masking.survivors} - known))
    text = (
        f"round {masking.round} is not unmasked by what {len(known)} nodes have revealed: some "
        f"lie; waits for {awaited}"
    )
    return [Report(progress.Note(text=text), ("liars", masking.round))]


def _react(state: Coordination, event: Event) -> Step:
    match event:
        case Tick():
            return _tick(state, event)
        case Joined():
            return _admit(state, event)
        case Told(node, message, was_counted):
            return _hear(state, node, message, was_counted=was_counted)
        case Contributed(node, message):
            size = message.blob.size if message.blob else 0
            counted = progress.Contribution(
                node=node, round=message.round, weight=message.weight, bytes=size
            )
            told = (
                _accept(node, message),
                Report(counted),
                Show(node, "waiting", state.rounds.round),
            )
            return _then(told, _turn(state, event))
        case Left(node, has_model):
            is_news = node in state.rounds.present and not has_model
            lost = (
                [Report(progress.NodeLost(node=node, round=state.rounds.round))] if is_news else []
            )
            return _then(lost, _leave(state, event))
        case Acted():
            return (state, ()) if state.is_finished else _act(state, event)
        case Dropped(node):
            masking = masking_machine.forget(state.masking, node) if state.masking else None
            state = state._replace(
                excluded=state.excluded | {node}, dropped=state.dropped | {node}, masking=masking
            )
            return _then([Forget(node), Cancel(node)], _turn(state, event))
        case Refused(node):
            state = state._replace(excluded=state.excluded | {node})
            return _then([Cancel(node)], _leave(state, event))
        case Unmasked() | Narrowed() | Expired():
            return _turn(state, event)
        case Opened(now):
            return state._replace(opened=now), ()
        case Started(damaged):
            return _then(_tell_start(state, damaged), _turn(state, event))


def _turn(state: Coordination, event: RoundEvent) -> Step:
    """Let the rounds go on."""
    federation, effects = round_machine.advance(state.rounds, event)
    state = state._replace(rounds=federation)
    done = list[Effect]()
    for effect in effects:
        match effect:
            case Pause(round_):
                absent = sorted(federation.members - federation.present - federation.contributed)
                done += [Report(progress.Paused(round=round_, waiting_for=absent)), Publish()]
            case Resume(round_):
                done += [_note(f"enough nodes are there again: round {round_} goes on"), Publish()]
            case Open():
                done += [
                    effect,
                    *(
                        Show(node, "training", federation.round)
                        for node in sorted(federation.missing)
                    ),
                ]
            case _:
                done.append(effect)
    return state, tuple(done)


def _mask(state: Coordination, effects: Sequence[MaskingEffect]) -> Step:
    """Let the masks of the open round go on."""
    done = list[Effect]()
    for effect in effects:
        match effect:
            case Narrowed():
                state, more = _turn(state, effect)
                done += more
            case Scarce(classes):
                done.append(_warn_of_scarce(state, classes))
            case Unreadable(nodes):
                done.append(Fail(_unreadable(state.rounds.round, nodes)))
            case Forgotten(node):
                round_ = state.rounds.round
                text = (
                    f"{node} has lost its secrets of round {round_}, which needs a quorum "
                    "without it: have its state folder restored, or drop it"
                )
                done.append(Report(progress.Note(text=text), ("forgotten", node, round_)))
            case _:
                done.append(effect)
    return state, tuple(done)


def _unreadable(round_: int, nodes: Sequence[str]) -> EdgeNodeError:
    return EdgeNodeError(
        f"the sum of round {round_} cannot be read: of the nodes that hold shares of "
        f"{nodes[0]}'s secrets too few have contributed",
        "end this run with edge-node abort and begin another one with --new: of so many nodes "
        "fewer may be lost",
    )


def _warn_of_scarce(state: Coordination, classes: Sequence[int]) -> Effect:
    """End the run where these classes would be summed now; before, say that they will not be."""
    spec = state.plan.spec
    round_ = state.rounds.round
    error = scarce_error([spec.classes[label] for label in classes])
    if is_statistics_round(spec, round_):
        return Fail(error)
    return Report(
        progress.Note(text=f"statistics will not be summed as it is: {error.what}"),
        ("scarce", *classes),
    )


def _tell_start(state: Coordination, damaged: Collection[str]) -> list[Effect]:
    """How contributions are aggregated, and where an earlier process of this coordinator
    stopped.
    """
    spec = state.plan.spec
    federation = state.rounds
    notes = list[Effect]()
    if (rule := spec.aggregation).rule in RULES:
        against = f", against {rule.liars} liar(s)" if rule.liars else ""
        notes.append(_note(f"contributions become one model by {rule.rule}, unweighted{against}"))
    if federation.held:
        notes.append(_note("its operator has paused this run: no round opens or closes"))
    if federation.status is Status.GATHERING:
        return notes
    if state.is_finished and spec.chooses:
        notes.append(_note("the sums of this run are there; its nodes compare the encoders"))
    elif state.is_finished:
        notes.append(_note("this run had finished before; --new begins another one"))
    else:
        notes.append(_note(f"going on with run {spec.run} in round {federation.round}"))
        notes.append(ShowRound(federation.round))
        if names := ", ".join(sorted(set(damaged) - state.excluded)):
            folder = state.plan.folder / "blobs"
            notes.append(
                _note(f"what {names} contributed was damaged in {folder}: it is fetched again")
            )
        if names := ", ".join(sorted(federation.missing - state.excluded)):
            if sum(map(federation.takes_part, federation.members)) > federation.plan.quorum:
                notes.append(
                    _note(f"{names}: {GRACE:.0f} s to come back, or the round may close without")
                )
            else:
                text = (
                    f"waiting for {names} to come back: round {federation.round} needs all of "
                    "its nodes"
                )
                notes.append(_note(text))
    if state.excluded:
        names = ", ".join(sorted(state.excluded))
        quorum = federation.plan.quorum
        notes.append(
            _note(f"no member any more: {names}; the others go on, {quorum} close a round")
        )
    return notes


def _act(state: Coordination, event: Acted) -> Step:
    """Do what the operator wants."""
    match event.action:
        case Action(what="pause" | "resume" as what, by=by):
            words = (
                ("paused", "no round opens or closes")
                if what == "pause"
                else ("resumed", "the rounds go on")
            )
            note = _note(f"{by} has {words[0]} the federation: {words[1]}")
            state, effects = _turn(state, event)
            return state, (note, *effects, Publish())
        case Action(what="drop", by=by, node=str(node)):
            why = f"{by} has dropped it from this run"
            error = PeerError(
                node,
                why,
                state.rounds.round,
                "ask the federation's operator; another run may take it",
            )
            return state, (Drop(node, error),)
        case Action(by=by, reason=reason):
            ended = EdgeNodeError(f"{by} has aborted the run", "begin another one with --new")
            return state, (Abort(reason or f"{by} has ended it"), Fail(ended))


# Time


def _tick(state: Coordination, tick: Tick) -> Step:
    spec = state.plan.spec
    state = state._replace(now=tick.now)
    effects = list[Effect]()
    if state.was_over:
        state, failed = _await_return(state, tick.heard)
        effects += failed
    age = tick.now - state.opened
    federation = state.rounds
    is_due = 0 < spec.deadline <= age and not federation.expired
    if federation.status is Status.OPEN and is_due:
        state, more = _turn(state, Expired(federation.round))
        effects += more
    if state.is_finished:
        state, more = _linger(state, tick.finished)
        effects += more
    return state, tuple(effects)


def _await_return(state: Coordination, heard: Collection[str]) -> Step:
    """End with an error if this run has finished before,
    and nodes whose part is lacking do not come back.
    """
    federation = state.rounds
    plan = state.plan
    gone = federation.members - federation.contributed - set(heard)
    if len(federation.members - gone) >= federation.plan.quorum:
        return state._replace(was_over=False), ()
    if state.now - state.joined < plan.linger:
        return state, ()
    error = EdgeNodeError(
        f"this run had finished, {plan.folder} is in round {federation.round}: it is an older "
        f"copy, and {', '.join(sorted(gone))} did not come back within {plan.linger:g} s",
        "put the newer folder back; or start this again, which then waits for them, and have "
        "each join again with its own --state: they go back to this round. For another run: "
        "edge-node abort, then --new",
    )
    return state, (Fail(error),)


def _linger(state: Coordination, finished: Collection[str]) -> Step:
    """Go once no node is expected any more that has yet to fetch the result."""
    plan = state.plan
    waiting = state.rounds.members - set(finished) - state.excluded
    if waiting & state.rounds.present or state.newcomers:
        return state._replace(lingering_since=None), ()
    if not waiting and not plan.serves_newcomers:
        return state._replace(is_over=True), ()
    told = list[Effect]()
    if state.lingering_since is None:
        state = state._replace(lingering_since=state.now)
        names = ", ".join(sorted(waiting)) or "newcomers"
        text = (
            f"waiting {plan.linger:g} s for {names} to fetch the result; started again, it is "
            "served later"
        )
        if plan.spec.chooses:
            text = f"waiting {plan.linger:g} s for {names} to compare the encoders"
        told = [Report(progress.Note(text=text), ("lingering", names))]
    is_over = state.lingering_since is not None and state.now - state.lingering_since >= plan.linger
    return state._replace(is_over=is_over), tuple(told)


# Nodes


def _admit(state: Coordination, event: Joined) -> Step:
    node = event.node
    hello = event.hello
    federation = state.rounds
    if state.is_newcomer(node) and state.plan.spec.chooses:
        return state, ()  # there is no result for it; the next run is soon
    if state.is_newcomer(node):
        text = f"{node} was not in this run, and takes its result"
        noted = Report(progress.Note(text=text), ("newcomer", node))
        return state._replace(newcomers=state.newcomers | {node}), (
            noted,
            WelcomeNewcomer(node, hello),
        )
    if state.is_finished and event.is_in_totals and hello.round < state.plan.spec.rounds:
        # Its folder is another one, or an older copy; one that only lacks its identity knows its
        # sums.
        refusal = Refusal(
            session=hello.session,
            reason=f"the totals hold statistics of {node!r} that its state folder does not know",
            remedy=(
                "join with the newest folder (--state), or ask for a new run: these images would "
                "count twice"
            ),
        )
        return state, (Reject(node, refusal),)
    if node in state.dropped:
        reason = "the operator has dropped it from this run"
        remedy = "ask the operator; another run may take it"
        return state, (Reject(node, Refusal(session=hello.session, reason=reason, remedy=remedy)),)
    is_new = node not in federation.present or event.session is None
    state = state._replace(excluded=state.excluded - {node})
    # else it is said again
    notes = _note_older_copy(state, event) if hello.session != event.session else []
    admitted = [*notes, Admit(node, hello, event.contributed)]
    if not is_new:
        return state, tuple(admitted)
    state, effects = _turn(state._replace(joined=state.now), event)
    is_due = node in state.rounds.missing and state.rounds.status is Status.OPEN
    shown = [Show(node, "training", state.rounds.round)] if is_due else []
    return state, (*admitted, Report(progress.NodeJoined(node=node)), *effects, *shown)


def _note_older_copy(state: Coordination, event: Joined) -> list[Effect]:
    """Report once that a node's state folder, or ours,
    is behind what the other one has seen of it.
    """
    node = event.node
    theirs = event.hello.round
    here = state.rounds.round
    notes = list[Effect]()
    if theirs > here:
        text = (
            f"{node} has been in round {theirs}, and {state.plan.folder} is in round {here}: it "
            "is an older copy, and the nodes go back with it; put the newer folder back if that "
            "is not intended"
        )
        notes.append(Report(progress.Note(text=text), ("ahead", here)))
    if 0 < theirs < event.contributed:
        text = (
            f"{node} has contributed to round {event.contributed}, and its state folder knows of "
            f"round {theirs}: it is an older copy, from which the node goes on"
        )
        notes.append(Report(progress.Note(text=text), ("behind", node, theirs)))
    return notes


def _leave(state: Coordination, event: Left | Refused) -> Step:
    node = event.node
    return _then([Forget(node)], _turn(state._replace(newcomers=state.newcomers - {node}), event))


def _hear(
    state: Coordination,
    node: str,
    message: Contribution | Telemetry | Finished | MaskingAnswer,
    *,
    was_counted: bool,
) -> Step:
    match message:
        case MaskingAnswer():
            if state.masking is None or node not in state.rounds.members:
                return state, ()
            if message.keys and not _can_have(state.plan.spec, message.keys.classes):
                wrong = PeerError(
                    node,
                    "it tells classes that this federation does not have or sum",
                    message.round,
                )
                return state, (Refuse(wrong),)
            masking, effects = masking_machine.hear(state.masking, node, message)
            return _mask(state._replace(masking=masking), effects)
        case Finished():
            is_recorded = state.is_finished and node in state.rounds.members
            state = state._replace(newcomers=state.newcomers - {node})
            record_finished = (RecordFinished(node),) if is_recorded else ()
            return state, record_finished
        case Telemetry() if state.plan.spec.chooses:
            return state, _hear_losses(state, node, message)
        case Telemetry(round=round_):
            measured = progress.Measured(node=node, round=round_, metrics=message.metrics)
            is_known = round_ <= state.rounds.round
            report = (Report(measured, ("telemetry", node, round_)),) if is_known else ()
            return state, report
        case Contribution():
            return state, _judge(state, node, message, was_counted=was_counted)


def _hear_losses(state: Coordination, node: str, message: Telemetry) -> tuple[Effect, ...]:
    """Take what a node of a choosing run tells: with that it has finished, and not before.

    It tells that again whenever it is welcomed, since a coordinator may have been killed before
    that was written down.
    """
    if not state.is_finished or node not in state.rounds.members:
        return ()
    measured = progress.Measured(node=node, round=message.round, metrics=message.metrics)
    return Report(measured), RecordFinished(node)


def _can_have(spec: Spec, classes: Collection[int]) -> bool:
    """Whether a node can tell that it has images of these."""
    return not classes or (bool(spec.statistics) and max(classes) < len(spec.classes))


def _judge(
    state: Coordination, node: str, message: Contribution, *, was_counted: bool
) -> tuple[Effect, ...]:
    """What is done with a contribution."""
    match classify(state.rounds, node, round_ := message.round):
        case Admission.COUNTED:
            return (_accept(node, message),)  # its effect is on disk
        case Admission.LATE if was_counted:
            return (_accept(node, message),)
        case Admission.LATE:
            late = Report(progress.Late(node=node, round=round_), ("late", node, round_))
            return late, _accept(
                node, message, f"round {round_} was closed before this contribution came"
            )
        case Admission.EARLY if message.server not in ("", state.plan.session):
            return ()  # sent before the node knew that this process goes on from an older copy
        case Admission.EARLY:
            return (Refuse(PeerError(node, f"round {round_} is not open", round_)),)
        case Admission.NOT_DRAWN:
            return (Refuse(PeerError(node, f"it was not drawn for round {round_}", round_)),)
        case Admission.DUE:
            return (Collect(node, message),)


def _accept(node: str, message: Contribution, not_counted: str = "") -> Accept:
    """Tell a node that it need not send this contribution again, and why it was not counted."""
    accepted = Accepted(
        session=message.session,
        run=message.run,
        round=message.round,
        counted=not not_counted,
        reason=not_counted,
    )
    return Accept(node, accepted)


def _then(effects: Sequence[Effect], step: Step) -> Step:
    """The step, with these effects before its own."""
    state, more = step
    return state, (*effects, *more)


def _note(text: str) -> Report:
    return Report(progress.Note(text=text))
