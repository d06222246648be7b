"""A coordinator, decided without broker, clock or ledger."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker_config.protocol.messages import (
    Contribution,
    Finished,
    Hello,
    Manifest,
    MaskingAnswer,
    Telemetry,
    TensorSpec,
)
from tests.support.node_model import RUN, make_broadcast, make_contribution, make_spec
from tests.support.wire_messages import KEYS
from trainer import progress
from trainer.federation.server.coordinator import round_state
from trainer.federation.server.coordinator.coordinator_machine import Step, advance
from trainer.federation.server.coordinator.coordinator_state import Coordination, ProcessPlan
from trainer.federation.server.coordinator.effects import (
    Abort,
    Accept,
    Admit,
    Cancel,
    Close,
    Collect,
    Drop,
    Effect,
    Fail,
    Finish,
    Open,
    Publish,
    RecordFinished,
    RecordMasks,
    Refuse,
    Reject,
    Report,
    Say,
    Show,
    ShowRound,
    Unmask,
    WelcomeNewcomer,
)
from trainer.federation.server.coordinator.events import (
    Acted,
    Contributed,
    Dropped,
    Event,
    Joined,
    Left,
    Opened,
    Refused,
    Started,
    Tick,
    Told,
    Unmasked,
)
from trainer.federation.server.coordinator.masking_state import Masking
from trainer.federation.server.operator_actions import Action, Kind

A, B, C = "plant-a", "plant-b", "plant-c"
SPEC = make_spec(rounds=2)
FOLDER, LINGER, SERVER = Path("coordinator-state"), 60.0, "5" * 16


def begin(
    *, spec: Any = SPEC, quorum: int = 2, round_: int = 0, contributed: str = "", **fields: Any
) -> Coordination:
    """A coordinator's process, of a run of two nodes that stands in a round; 0:
    it has not begun.
    """
    plan = round_state.Plan(2, quorum, spec.rounds)
    members = (A, B) if round_ else ()
    federation = round_state.restore(plan, round_, members, (), contributed.split())
    is_finished = federation.status is round_state.Status.FINISHED
    serves = is_finished and bool(spec.statistics) and not spec.chooses
    return Coordination(ProcessPlan(spec, SERVER, FOLDER, LINGER, serves), federation, **fields)


def play(state: Coordination, *events: Event) -> Step:
    done: list[Effect] = []
    for event in events:
        state, effects = advance(state, event)
        done += effects
    return state, tuple(done)


def hello(node: str, session: str = "1" * 16, round_: int = 0) -> Hello:
    return Hello(
        session=session, run=RUN, software="1", identity=node.encode().hex()[:16], round=round_
    )


def join(*nodes: str) -> list[Event]:
    return [Joined(node, hello(node)) for node in nodes]


def offer(node: str, round_: int, *, was_counted: bool = False) -> Told:
    return Told(node, contribution(round_), was_counted)


def contribution(round_: int, blob: Manifest | None = None) -> Contribution:
    return Contribution(session="1" * 16, run=RUN, round=round_, weight=1.0, blob=blob)


def add(*nodes: str, round_: int) -> list[Event]:
    return [
        Contributed(node, contribution(round_, make_contribution(make_broadcast(SPEC, round_))))
        for node in nodes
    ]


def of(effects: tuple[Effect, ...], *kinds: type) -> list[Effect]:
    return [each for each in effects if isinstance(each, kinds)]


def told(effects: tuple[Effect, ...]) -> list[str]:
    """What people are told: the words of notes, and the names of other events."""
    events = [each.event for each in effects if isinstance(each, Report)]
    return [
        each.text if isinstance(each, progress.Note) else type(each).__name__ for each in events
    ]


# Rounds


def test_the_first_round_opens_when_all_nodes_have_been_admitted() -> None:
    state, effects = play(begin(), Started(), *join(A, B))
    assert of(effects, Admit) == [Admit(A, hello(A), 0), Admit(B, hello(B), 0)]
    assert of(effects, Open) == [Open(1)]
    assert [each for each in effects if isinstance(each, Show)] == [
        Show(A, "training", 1),
        Show(B, "training", 1),
        Show(B, "training", 1),
    ]
    assert state.rounds.status is round_state.Status.OPEN


def test_a_contribution_is_collected_then_accepted_and_the_last_one_closes_the_round() -> None:
    state, effects = play(begin(round_=1), offer(A, 1))
    assert effects == (Collect(A, contribution(1)),)
    state, effects = play(state, *add(A, round_=1))
    assert [each.accepted.counted for each in effects if isinstance(each, Accept)] == [True]
    assert of(effects, Close) == []
    state, effects = play(state, *add(B, round_=1))
    assert of(effects, Close, Open) == [
        Close(1, frozenset((A, B))),
        Open(2),
    ]


def test_what_a_node_does_is_shown_for_the_round_that_it_contributed_to() -> None:
    _, effects = play(begin(round_=1, contributed=A), *add(B, round_=1))
    assert of(effects, Show)[0] == Show(B, "waiting", 1)


@pytest.mark.parametrize(
    ("round_", "was_counted", "accepted"),
    [
        pytest.param(1, False, [False], id="too late"),
        pytest.param(1, True, [True], id="counted before its round was closed"),
        pytest.param(3, False, [], id="early"),
    ],
)
def test_a_contribution_to_another_round_is_answered_and_not_collected(
    round_: int, was_counted: bool, accepted: list[bool]
) -> None:
    _, effects = play(begin(round_=2), offer(A, round_, was_counted=was_counted))
    assert [each.accepted.counted for each in effects if isinstance(each, Accept)] == accepted
    assert of(effects, Collect) == []
    assert bool(of(effects, Refuse)) == (round_ == 3)


def test_a_contribution_to_the_coordinator_before_this_one_may_be_early() -> None:
    """This one goes on from an older copy, and the node could not know."""
    early = msgspec.structs.replace(contribution(3), server="6" * 16)
    assert play(begin(round_=2), Told(A, early)) == (begin(round_=2), ())
    knowing = msgspec.structs.replace(early, server=SERVER)
    assert len(of(play(begin(round_=2), Told(A, knowing))[1], Refuse)) == 1


def test_a_contribution_that_is_summed_already_is_accepted_again_and_counted_once() -> None:
    _, effects = play(begin(round_=1, contributed=A), offer(A, 1))
    assert [each.accepted.counted for each in effects if isinstance(each, Accept)] == [True]
    assert of(effects, Collect) == []


def test_a_deadline_counts_from_when_the_round_was_published() -> None:
    spec = make_spec(rounds=2, deadline=10.0)
    state, _ = play(begin(spec=spec, quorum=1, round_=1, contributed=A), Opened(100.0), Tick(109.9))
    assert state.rounds.round == 1
    assert of(play(state, Tick(110.0))[1], Close) == [Close(1, frozenset((A,)))]


def test_a_round_without_its_quorum_is_paused_and_resumed_in_words() -> None:
    state, effects = play(begin(round_=1), Left(B))
    assert told(effects) == ["NodeLost", "Paused"]
    _, effects = play(state, *join(B))
    assert told(effects) == ["NodeJoined", "enough nodes are there again: round 1 goes on"]


# Nodes


def test_a_hello_that_is_said_again_is_answered_and_joins_nobody_twice() -> None:
    _, effects = play(begin(round_=1), Joined(A, hello(A), session="1" * 16))
    assert effects == (Admit(A, hello(A), 0),)


def test_a_node_whose_folder_or_ours_is_an_older_copy_is_told_of() -> None:
    _, effects = play(begin(round_=1), Joined(A, hello(A, round_=2)))
    assert "go back" in told(effects)[0]
    _, effects = play(begin(round_=2), Joined(A, hello(A, round_=1), contributed=2))
    assert "goes on" in told(effects)[0]
    _, effects = play(
        begin(round_=2), Joined(A, hello(A, round_=1), session="1" * 16, contributed=2)
    )
    assert told(effects) == []  # the same process says it again


def test_a_refused_node_is_cancelled_and_not_waited_for_until_it_is_admitted_again() -> None:
    state, effects = play(begin(round_=1), Refused(A))
    assert of(effects, Cancel) == [Cancel(A)]
    assert (state.excluded, state.present) == ({A}, {B})
    assert play(state, *join(A))[0].excluded == frozenset()


def test_telemetry_of_a_round_that_has_not_begun_is_not_reported() -> None:
    def telemetry(round_: int) -> Told:
        return Told(A, Telemetry(session="1" * 16, run=RUN, round=round_, metrics={"loss": 1.0}))

    assert told(play(begin(round_=1), telemetry(1))[1]) == ["Measured"]
    assert told(play(begin(round_=1), telemetry(2))[1]) == []


# The end


def test_the_coordinator_goes_when_all_nodes_have_their_model() -> None:
    state, effects = play(begin(round_=2, contributed=A), *add(B, round_=2), Tick(1.0, {A}))
    assert of(effects, Finish) == [Finish()]
    assert not state.is_over
    _, effects = play(state, Told(B, Finished(session="1" * 16, run=RUN)))
    assert effects == (RecordFinished(B),)
    assert play(state, Tick(2.0, {A, B}))[0].is_over


def test_absent_nodes_are_waited_for_a_while_which_begins_anew_when_one_has_come_back() -> None:
    state, effects = play(begin(round_=3), Tick(0.0))
    assert f"waiting {LINGER:g} s for {A}, {B}" in told(effects)[0]
    state, _ = play(state, Tick(LINGER - 1), *join(A), Tick(LINGER + 1))
    assert not state.is_over
    state, _ = play(state, Left(A), Tick(LINGER + 2), Tick(2 * LINGER + 1))
    assert not state.is_over
    assert play(state, Tick(2 * LINGER + 2))[0].is_over


def test_a_refused_node_is_not_waited_for_at_the_end() -> None:
    assert play(begin(round_=3, excluded=frozenset((B,))), Tick(0.0, {A}))[0].is_over


def test_a_finish_before_the_end_is_not_written_down() -> None:
    assert play(begin(round_=2), Told(A, Finished(session="1" * 16, run=RUN)))[1] == ()


def test_a_newcomer_takes_the_result_of_sums_but_no_place_and_is_waited_for_while_present() -> None:
    state = begin(spec=make_spec(rounds=2, statistics=True), round_=3)
    state, effects = play(state, *join(C))
    assert of(effects, WelcomeNewcomer, Admit) == [WelcomeNewcomer(C, hello(C))]
    state, _ = play(state, Tick(0.0, {A, B}), Tick(LINGER, {A, B}))
    assert not state.is_over
    state, effects = play(
        state, Told(C, Finished(session="1" * 16, run=RUN)), Tick(LINGER + 1, {A, B})
    )
    assert of(effects, RecordFinished) == []
    assert play(state, Tick(2 * LINGER + 1, {A, B}))[0].is_over


def test_a_node_that_has_forgotten_its_sums_would_count_them_twice_and_is_rejected() -> None:
    state = begin(spec=make_spec(rounds=2, statistics=True), round_=3)
    assert len(of(play(state, Joined(A, hello(A, round_=1), is_in_totals=True))[1], Reject)) == 1
    assert len(of(play(state, Joined(A, hello(A, round_=2), is_in_totals=True))[1], Admit)) == 1
    assert len(of(play(state, Joined(A, hello(A, round_=1), is_in_totals=False))[1], Admit)) == 1


# Choosing runs


def tell_losses(node: str) -> Told:
    return Told(node, Telemetry(session="1" * 16, run=RUN, round=2, metrics={"loss": 1.0}))


def begin_choosing(round_: int) -> Coordination:
    spec = msgspec.structs.replace(make_spec(rounds=2, statistics=True), chooses=True)
    return begin(spec=spec, round_=round_)


def test_a_node_of_a_choosing_run_has_finished_once_its_losses_are_reported() -> None:
    """Each time that it tells them: they may not have been written down before."""
    state, effects = play(begin_choosing(3), tell_losses(A))
    assert [type(each) for each in effects] == [Report, RecordFinished]
    assert told(effects) == ["Measured"]
    state, effects = play(state, tell_losses(A))
    assert [type(each) for each in effects] == [Report, RecordFinished]
    state, _ = play(state, Tick(0.0, {A}), Tick(1.0, {A, B}))
    assert state.is_over, "it waits for nobody but its members"


@pytest.mark.parametrize(("round_", "node"), [(2, A), (3, C)])
def test_losses_count_at_the_end_and_of_members_alone(round_: int, node: str) -> None:
    assert play(begin_choosing(round_), tell_losses(node))[1] == ()


def test_nodes_that_have_yet_to_compare_encoders_are_named() -> None:
    _, effects = play(begin_choosing(3), Started(), Tick(0.0, {A}))
    notes = told(effects)
    assert any(B in text and "compare" in text and A not in text for text in notes)
    assert not any("--new" in text or "fetch" in text for text in notes)


def test_a_node_that_comes_after_a_choosing_run_gets_no_answer_and_is_not_waited_for() -> None:
    state, effects = play(begin_choosing(3), *join(C))
    assert effects == ()
    assert play(state, Tick(0.0, {A, B}))[0].is_over


# Restarts


def test_a_restart_says_where_it_goes_on_and_whom_it_waits_for() -> None:
    _, effects = play(begin(round_=2, contributed=A), Started(damaged=[A]))
    words = "\n".join(told(effects))
    assert of(effects, ShowRound) == [ShowRound(2)]
    assert f"going on with run {RUN} in round 2" in words
    assert f"what {A} contributed was damaged in {FOLDER / 'blobs'}" in words
    assert f"waiting for {B} to come back: round 2 needs all of its nodes" in words
    _, effects = play(begin(round_=2, quorum=1), Started())
    assert "may close without" in "\n".join(told(effects))


def test_an_older_copy_of_a_finished_run_waits_only_a_while_for_nodes_that_have_gone() -> None:
    state, effects = play(begin(round_=2, was_over=True), Tick(LINGER - 1, heard=[A]))
    assert effects == ()
    _, effects = play(state, Tick(LINGER, heard=[A]))
    assert [type(each) for each in effects] == [Fail]
    assert B in str(of(effects, Fail)[0].error)
    state, effects = play(state, Tick(LINGER, heard=[A, B]))
    assert (effects, state.was_over) == ((), False)


# The operator


def wants(what: Kind, node: str | None = None) -> Acted:
    return Acted(Action(run=RUN, what=what, by="anna", time=0.0, node=node))


def test_a_pause_is_published_and_told_and_ends_with_resume() -> None:
    state, effects = play(begin(round_=1), wants("pause"))
    assert told(effects) == ["anna has paused the federation: no round opens or closes"]
    assert of(effects, Publish) == [Publish()]
    state, effects = play(state, *add(A, B, round_=1))
    assert of(effects, Close) == []
    state, effects = play(state, wants("resume"))
    assert told(effects)[0] == "anna has resumed the federation: the rounds go on"
    assert of(effects, Close, Open) == [
        Close(1, frozenset((A, B))),
        Open(2),
    ]


def test_a_process_that_starts_while_the_run_is_paused_says_so() -> None:
    state = begin(round_=1)
    _, effects = advance(state._replace(rounds=state.rounds._replace(held=True)), Started())
    assert any("operator has paused" in each for each in told(effects))


def test_a_dropped_node_is_refused_with_the_reason_and_not_let_in_again() -> None:
    state, (drop,) = play(begin(round_=1), wants("drop", B))
    assert isinstance(drop, Drop)
    assert (drop.node, drop.error.why) == (B, "anna has dropped it from this run")
    left = round_state.restore(round_state.Plan(1, 1, SPEC.rounds), 1, (A,), (), ())
    state, effects = advance(state, Dropped(B, left))
    assert of(effects, Cancel) == [Cancel(B)]
    assert state.rounds.members == {A}
    state, effects = play(state, *join(B))
    (rejected,) = of(effects, Reject)
    assert isinstance(rejected, Reject)
    assert "dropped it" in rejected.refusal.reason
    assert of(effects, Admit) == []


def test_an_abort_is_written_down_and_published_before_the_process_ends() -> None:
    _, (abort, fail) = play(begin(round_=1), wants("abort"))
    assert abort == Abort("anna has ended it")
    assert isinstance(fail, Fail)
    assert "anna has aborted" in str(fail.error)


@pytest.mark.parametrize("what", ["pause", "resume", "drop", "abort"])
def test_nothing_can_be_done_to_a_finished_run(what: Kind) -> None:
    state = begin(round_=3)
    assert advance(state, wants(what, A)) == (state, ())


# Masked contributions


def begin_masked(contributed: str = "") -> Coordination:
    """A coordinator whose round 1 is open: the cohort is all three nodes, whose masks count."""
    plan = round_state.Plan(3, 2, 2, is_masked=True)
    federation = round_state.restore(plan, 1, (A, B, C), (), contributed.split())
    keys, shares = (
        dict.fromkeys((A, B, C), KEYS),
        {each: {A: "", B: "", C: ""} for each in (A, B, C)},
    )
    masking = Masking(RUN, 2, 0, 1, keys, is_gathered=True, shares=shares, is_shared=True)
    return Coordination(ProcessPlan(MASKED, SERVER, FOLDER, LINGER), federation, masking=masking)


MASKED = msgspec.structs.replace(SPEC, nodes=3, quorum=2, mask_threshold=2)


def test_a_round_of_masked_contributions_closes_once_its_sum_is_unmasked() -> None:
    state, effects = play(begin_masked(), *add(A, B, C, round_=1))
    assert of(effects, Close, Open) == []
    assert state.rounds.status is round_state.Status.UNMASKING
    (record,) = of(effects, RecordMasks)
    assert isinstance(record, RecordMasks)
    assert record.facts.survivors == (A, B, C)
    assert [each.node for each in effects if isinstance(each, Say)] == [A, B, C]
    assert effects.index(record) < effects.index(of(effects, Say)[0])  # on disk before it is said
    assert play(state, Unmasked(2))[1] == ()
    state, effects = play(state, Unmasked(1))
    assert [type(each) for each in of(effects, Close, Open)] == [
        Close,
        Open,
    ]
    assert state.masking == Masking(RUN, 2, 0, 2)


def test_a_contribution_during_unmasking_or_without_masks_in_it_is_late() -> None:
    state, _ = play(begin_masked(), Left(C), *add(A, B, round_=1))
    assert of(play(state, offer(C, 1))[1], Refuse) == []
    (accept,) = of(play(state, offer(C, 1))[1], Accept)
    assert isinstance(accept, Accept)
    assert not accept.accepted.counted


def test_too_few_nodes_to_unmask_a_sum_are_told_to_people() -> None:
    state, _ = play(begin_masked(), Left(C), *add(A, B, round_=1))
    _, effects = play(state, Left(B))
    assert any("waits for 2 of its nodes to unmask" in text for text in told(effects))


def test_a_sum_that_nobody_can_unmask_ends_the_process_before_anybody_is_told_survivors() -> None:
    state = begin_masked()
    names = (A, B, C, "plant-d")
    keys, shares = dict.fromkeys(names, KEYS), {each: {C: "", "plant-d": ""} for each in names}
    masking = Masking(RUN, 2, 2, 1, keys, is_gathered=True, shares=shares, is_shared=True)
    state, effects = play(state._replace(masking=masking), Left(C), *add(A, B, round_=1))
    (fail,) = of(effects, Fail)
    assert isinstance(fail, Fail)
    assert "shares of plant-a's secrets" in fail.error.what
    assert of(effects, Say, RecordMasks) == []


def begin_unmasking(*revealed: str) -> Coordination:
    """Four nodes, each of which shares with two others, have agreed on who is in the sum;
    some have revealed shares.
    """
    state, names = begin_masked(), (A, B, C, "plant-d")
    shares = {
        A: {B: "", C: ""},
        B: {A: "", C: ""},
        C: {A: "", "plant-d": ""},
        "plant-d": {A: "", C: ""},
    }
    masking = Masking(
        RUN,
        2,
        2,
        1,
        dict.fromkeys(names, KEYS),
        is_gathered=True,
        shares=shares,
        is_shared=True,
        survivors=names,
        agreed=dict.fromkeys(names, ""),
        revealed={each: {} for each in revealed},
        tried=len(revealed),
    )
    everyone = frozenset(names)
    federation = state.rounds._replace(
        plan=state.rounds.plan._replace(nodes=4),
        status=round_state.Status.UNMASKING,
        members=everyone,
        present=everyone,
        contributed=everyone,
    )
    return state._replace(masking=masking, rounds=federation)


def test_people_are_told_for_whom_a_sum_waits_that_too_few_neighbours_can_unmask() -> None:
    assert told(play(begin_unmasking(), Tick(1))[1]) == []
    _, effects = play(begin_unmasking(), Left(B), Left(C))
    (said,) = [text for text in told(effects) if "shares" in text]
    assert said == (
        "round 1 waits for nodes that hold shares of plant-a's secrets to unmask its sum: too "
        "few of them are there"
    )
    assert not any("shares" in text for text in told(play(begin_unmasking(B), Left(B), Left(C))[1]))


def test_people_are_told_that_some_have_lied_when_what_is_revealed_unmasks_nothing() -> None:
    (said,) = told(play(begin_unmasking(A, C), Tick(1))[1])
    assert said == (
        "round 1 is not unmasked by what 2 nodes have revealed: some lie; waits for "
        "plant-b, plant-d"
    )
    state = begin_unmasking(A, C)
    assert state.masking
    untried = state._replace(masking=state.masking._replace(tried=1))
    (attempt,) = play(untried, Tick(1))[1]  # of which nothing is known here
    assert isinstance(attempt, Unmask)


@pytest.mark.parametrize(("statistics", "classes"), [(False, (0,)), (True, (0, 2)), (True, (999,))])
def test_a_node_that_tells_classes_which_nobody_has_is_refused(
    statistics: bool, classes: tuple[int, ...]
) -> None:
    """They would be looked up when people are told which class is scarce."""
    state = begin_masked()
    counts = {"statistics.images": TensorSpec((2,), 0, "int64")} if statistics else {}
    spec = msgspec.structs.replace(MASKED, classes=("x", "y"), statistics=counts)
    state = state._replace(plan=state.plan._replace(spec=spec))
    keys = msgspec.structs.replace(KEYS, classes=classes)
    (refusal,) = play(state, Told(A, MaskingAnswer(session="1" * 16, run=RUN, round=1, keys=keys)))[
        1
    ]
    assert isinstance(refusal, Refuse)
    assert "tells classes" in str(refusal.error)


def test_what_a_stranger_says_of_masks_has_no_effect() -> None:
    answer = MaskingAnswer(session="1" * 16, run=RUN, round=1, keys=KEYS)
    assert play(begin_masked(), Told("plant-z", answer))[1] == ()
    assert play(begin(round_=1), Told(A, answer))[1] == ()
