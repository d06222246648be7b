"""State machine of a federation's coordinator: (state, event) -> (state, effects).

Pure: no MQTT, clock or files.

Around the rounds (`round_state`) it has who may take part, who is told what, and when the
coordinator may go.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from broker_config.protocol.errors import EdgeNodeError, PeerError
from broker_config.protocol.messages import (
    Accepted,
    Contribution,
    Finished,
    Hello,
    MaskingAnswer,
    Refusal,
    Spec,
    Telemetry,
)
from broker_config.protocol.round_contents import is_statistics_round
from trainer import progress
from trainer.federation.server import masking_rounds
from trainer.federation.server import round_state as rounds
from trainer.federation.server.masked_sums import scarce_error
from trainer.federation.server.masking_rounds import Masking
from trainer.federation.server.membership import GRACE
from trainer.federation.server.operator_actions import Action
from trainer.federation.server.robust_rules import RULES


class Plan(NamedTuple):
    """What does not change while the process lasts."""

    spec: Spec
    session: str  # of this process
    folder: Path  # of the ledger
    linger: float  # seconds for absent nodes to come back, and for newcomers
    # the run had finished before, and its result is of use to others
    serves_newcomers: bool = False


class Coordination(NamedTuple):
    """The state. The sets hold node names; times are seconds of any monotonic clock."""

    plan: Plan
    rounds: rounds.Federation
    now: float = 0.0
    # no members any more, or refused: not waited for at the end
    excluded: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()  # by the operator: they are not let in again
    # they are fetching the result without having been in the run
    newcomers: frozenset[str] = frozenset()
    # the broker knows of a later end than the ledger: nodes have gone that are needed
    was_over: bool = False
    opened: float = 0.0  # the open round
    joined: float = 0.0  # when a node did last
    # when the last node left of those that still want the result
    lingering_since: float | None = None
    is_over: bool = False  # the coordinator may go
    masking: Masking | None = None  # where contributions are masked

    @property
    def is_finished(self) -> bool:
        """Whether the last round is closed."""
        return self.rounds.status is rounds.Status.FINISHED

    @property
    def present(self) -> frozenset[str]:
        """Nodes that are connected, as far as is known."""
        return self.rounds.present | self.newcomers

    def is_newcomer(self, node: str) -> bool:
        """Whether a node comes for the result of a run that it was not in."""
        return (
            self.is_finished and bool(self.plan.spec.statistics) and node not in self.rounds.members
        )


# Events


class Started(NamedTuple):
    """The coordinator is connected, with the state that its ledger holds."""

    damaged: Collection[str] = ()  # nodes whose contribution to the open round was not what it was


class Tick(NamedTuple):
    """Time passes."""

    now: float
    finished: Collection[str] = ()  # nodes that have their model
    heard: Collection[str] = ()  # nodes that this process has heard of


class Admitted(NamedTuple):
    """A node may take part by the rules of membership."""

    node: str
    hello: Hello
    session: str | None = None  # that spoke for the node so far
    contributed: int = 0  # the newest round that a contribution of it is recorded to
    is_in_totals: bool = False  # the run's totals hold its statistics


class Lost(NamedTuple):
    """A node's connection has ended."""

    node: str
    has_model: bool = False


class Excluded(NamedTuple):
    """A node was refused."""

    node: str


class Told(NamedTuple):
    """A node's message of its session and of this run."""

    node: str
    message: Contribution | Telemetry | Finished | MaskingAnswer
    was_counted: bool = False  # a round holds this contribution


class Added(NamedTuple):
    """A contribution is valid, written down and summed."""

    node: str
    message: Contribution


class Acted(NamedTuple):
    """The operator wants something that changes how the run goes on."""

    action: Action


class Dropped(NamedTuple):
    """Answer to `Drop`: the journal is without the node."""

    node: str
    left: rounds.Federation


class Unmasked(NamedTuple):
    """Answer to `masking_rounds.Unmask`: no mask is left in the round's sum."""

    round: int


class Opened(NamedTuple):
    """Answer to `rounds.Open`: the round is written down and published."""

    now: float


Event = (
    Started | Tick | Admitted | Lost | Excluded | Told | Added | Acted | Dropped | Unmasked | Opened
)


# Effects


class Admit(NamedTuple):
    """Write down that a node holds a place, and welcome it."""

    node: str
    hello: Hello
    contributed: int


class WelcomeNewcomer(NamedTuple):
    """Welcome a node that takes no place."""

    node: str
    hello: Hello


class Reject(NamedTuple):
    """Do not let a node in."""

    node: str
    refusal: Refusal


class Refuse(NamedTuple):
    """Refuse a node that breaks the protocol."""

    error: PeerError


class Collect(NamedTuple):
    """Validate a contribution, fetch its blob if it has one, and add it; Added follows,
    if it is valid.
    """

    node: str
    message: Contribution


class Cancel(NamedTuple):
    """Fetch nothing more from a node."""

    node: str


class Accept(NamedTuple):
    """Tell a node that it need not send a contribution again."""

    node: str
    accepted: Accepted


class RecordFinished(NamedTuple):
    """Write down that a node has its model."""

    node: str


class Forget(NamedTuple):
    """A node is not expected to answer the roll call any more."""

    node: str


class Drop(NamedTuple):
    """Take a node out of the journal; Dropped follows. Then refuse it."""

    node: str
    error: PeerError


class Abort(NamedTuple):
    """Write down and publish that the run has ended early."""

    reason: str


class Publish(NamedTuple):
    """Publish the round."""


class ShowRound(NamedTuple):
    """Report that the open round goes on."""

    round: int


class Show(NamedTuple):
    """Report what a node does."""

    node: str
    what: progress.ActivityKind
    round: int


class Report(NamedTuple):
    """Report to people; of equal `once` only the first."""

    event: progress.AnyEvent
    once: tuple[object, ...] = ()


class Fail(NamedTuple):
    """End the process by an error."""

    error: EdgeNodeError


Effect = (
    Admit
    | WelcomeNewcomer
    | Reject
    | Refuse
    | Collect
    | Cancel
    | Accept
    | RecordFinished
    | Forget
    | Drop
    | Abort
    | Publish
    | ShowRound
    | Show
    | Report
    | Fail
    | rounds.Open
    | rounds.Close
    | rounds.Finish
    | masking_rounds.Record
    | masking_rounds.Say
    | masking_rounds.Unmask
)
Step = tuple[Coordination, tuple[Effect, ...]]


def advance(state: Coordination, event: Event) -> Step:
    """The next state and what has to be done, in order."""
    state, effects = _react(state, event)
    if state.masking is None:
        return state, effects
    masking, more = masking_rounds.settle(state.masking, state.rounds)
    state, told = _mask(state._replace(masking=masking), more)
    # what comes of it is not known here
    is_tried = any(isinstance(each, masking_rounds.Unmask) for each in more)
    unread = [] if is_tried else _tell_unread(state, masking)
    return state, (*effects, *told, *unread)


def _tell_unread(state: Coordination, masking: Masking) -> list[Effect]:
    """Say that a sum is there, and for whom it waits to be unmasked."""
    if state.rounds.status is not rounds.Status.UNMASKING:
        return []
    known = masking.revealed.keys()
    here = state.rounds.contributed & (state.rounds.present | known)
    if len(here) < masking.threshold:
        text = (
            f"round {masking.round} waits for {masking.threshold} of its nodes to unmask its "
            f"sum, and {len(here)} are there: nobody else can"
        )
        return [Report(progress.Note(text=text), ("unmasking", masking.round, len(here)))]
    if lonely := masking_rounds.find_unreadable(masking, here):
        text = (
            f"round {masking.round} waits for nodes that hold shares of {lonely[0]}'s secrets to "
            "unmask its sum: too few of them are there"
        )
        return [Report(progress.Note(text=text), ("shares", masking.round, lonely[0]))]
    if len(known) < masking.threshold or masking_rounds.find_unreadable(masking, known):
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
        case Admitted():
            return _admit(state, event)
        case Told(node, message, was_counted):
            return _hear(state, node, message, was_counted=was_counted)
        case Added(node, message):
            size = message.blob.size if message.blob else 0
            counted = progress.Contribution(
                node=node, round=message.round, weight=message.weight, bytes=size
            )
            told = (
                _accept(node, message),
                Report(counted),
                Show(node, "waiting", state.rounds.round),
            )
            return _then(told, _turn(state, rounds.Contributed(node)))
        case Lost(node, has_model):
            is_news = node in state.rounds.present and not has_model
            lost = (
                [Report(progress.NodeLost(node=node, round=state.rounds.round))] if is_news else []
            )
            return _then(lost, _leave(state, node))
        case Acted(action):
            return (state, ()) if state.is_finished else _act(state, action)
        case Dropped(node, left):
            masking = masking_rounds.forget(state.masking, node) if state.masking else None
            state = state._replace(
                excluded=state.excluded | {node}, dropped=state.dropped | {node}, masking=masking
            )
            return _then([Forget(node), Cancel(node)], _turn(state, rounds.Dropped(node, left)))
        case Excluded(node):
            return _then(
                [Cancel(node)], _leave(state._replace(excluded=state.excluded | {node}), node)
            )
        case Unmasked(round_):
            return _turn(state, rounds.Unmasked(round_))
        case Opened(now):
            return state._replace(opened=now), ()
        case Started(damaged):
            return _then(_tell_start(state, damaged), _turn(state, rounds.Resumed()))


def _turn(state: Coordination, event: rounds.Event) -> Step:
    """Let the rounds go on."""
    federation, effects = rounds.advance(state.rounds, event)
    state = state._replace(rounds=federation)
    done = list[Effect]()
    for effect in effects:
        match effect:
            case rounds.Pause(round_):
                absent = sorted(federation.members - federation.present - federation.contributed)
                done += [Report(progress.Paused(round=round_, waiting_for=absent)), Publish()]
            case rounds.Resume(round_):
                done += [_note(f"enough nodes are there again: round {round_} goes on"), Publish()]
            case rounds.Open():
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


def _mask(state: Coordination, effects: Sequence[masking_rounds.Effect]) -> Step:
    """Let the masks of the open round go on."""
    done = list[Effect]()
    for effect in effects:
        match effect:
            case masking_rounds.Narrow(nodes):
                state, more = _turn(state, rounds.Narrowed(nodes))
                done += more
            case masking_rounds.Scarce(classes):
                done.append(_warn_of_scarce(state, classes))
            case masking_rounds.Unreadable(nodes):
                done.append(Fail(_unreadable(state.rounds.round, nodes)))
            case masking_rounds.Forgotten(node):
                round_ = state.rounds.round
                text = (
                    f"{node} has lost its secrets of round {round_}, which needs a quorum "
                    "without it: have its state folder restored, or drop it"
                )
                done.append(Report(progress.Note(text=text), ("forgotten", node, round_)))
            case masking_rounds.Reject(error):
                done.append(Refuse(error))
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
    if federation.status is rounds.Status.GATHERING:
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


def _act(state: Coordination, action: Action) -> Step:
    """Do what the operator wants."""
    match action:
        case Action(what="pause" | "resume" as what, by=by):
            words = (
                ("paused", "no round opens or closes")
                if what == "pause"
                else ("resumed", "the rounds go on")
            )
            note = _note(f"{by} has {words[0]} the federation: {words[1]}")
            event = rounds.Held() if what == "pause" else rounds.Released()
            step = _turn(state, event)
            return _then([note], (step[0], (*step[1], Publish())))
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
    due = list[rounds.Event]()
    if federation.status is rounds.Status.OPEN:
        due += (
            [rounds.Expired(federation.round)]
            if 0 < spec.deadline <= age and not federation.expired
            else []
        )
    for event in due:
        state, more = _turn(state, event)
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


def _admit(state: Coordination, event: Admitted) -> Step:
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
    state, effects = _turn(state._replace(joined=state.now), rounds.Joined(node))
    is_due = node in state.rounds.missing and state.rounds.status is rounds.Status.OPEN
    shown = [Show(node, "training", state.rounds.round)] if is_due else []
    return state, (*admitted, Report(progress.NodeJoined(node=node)), *effects, *shown)


def _note_older_copy(state: Coordination, event: Admitted) -> list[Effect]:
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


def _leave(state: Coordination, node: str) -> Step:
    return _then(
        [Forget(node)], _turn(state._replace(newcomers=state.newcomers - {node}), rounds.Left(node))
    )


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
            masking, effects = masking_rounds.hear(state.masking, node, message)
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
    match state.rounds.admission(node, round_ := message.round):
        case rounds.Admission.COUNTED:
            return (_accept(node, message),)  # its effect is on disk
        case rounds.Admission.LATE if was_counted:
            return (_accept(node, message),)
        case rounds.Admission.LATE:
            late = Report(progress.Late(node=node, round=round_), ("late", node, round_))
            return late, _accept(
                node, message, f"round {round_} was closed before this contribution came"
            )
        case rounds.Admission.EARLY if message.server not in ("", state.plan.session):
            return ()  # sent before the node knew that this process goes on from an older copy
        case rounds.Admission.EARLY:
            return (Refuse(PeerError(node, f"round {round_} is not open", round_)),)
        case rounds.Admission.NOT_DRAWN:
            return (Refuse(PeerError(node, f"it was not drawn for round {round_}", round_)),)
        case rounds.Admission.DUE:
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
