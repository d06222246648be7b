"""A node's session, decided without broker, clock, disk or training."""

from typing import Any, get_args

import msgspec
import pytest

from broker_config.protocol.errors import EdgeNodeError, PeerError
from broker_config.protocol.messages import (
    Accepted,
    MaskingStep,
    Presence,
    Refusal,
    RoundState,
    Welcome,
)
from broker_config.transfer.blob_transfer import Damaged, FetchFailed
from tests.support.effect_tables import performed
from tests.support.node_model import (
    FOLDER,
    NAME,
    RUN,
    SESSION,
    Job,
    NodeModel,
    make_broadcast,
    make_contribution,
    make_delta,
    make_masked,
    make_spec,
)
from trainer.federation.client import session, session_events
from trainer.federation.client.session_events import (
    Announce,
    AnswerStep,
    Cancel,
    CheckRun,
    Connected,
    Deploy,
    Deployed,
    Effect,
    Fail,
    Fetch,
    GoBack,
    Mask,
    Received,
    Report,
    Send,
    TellFinished,
    TellKeys,
    TellOutcome,
    Tick,
    Train,
)
from trainer.federation.client.session_state import (
    MIN_INTERVAL,
    SILENCE,
    NewRunError,
    Plan,
    current_activity,
)

SERVER, OTHER = "5" * 16, "6" * 16
SPEC = make_spec()


def begin(**plan: Any) -> NodeModel:
    """A node that has just been started."""
    return NodeModel(Plan(plan.pop("spec", SPEC), NAME, SESSION, FOLDER, **plan))


def hear(node: NodeModel, message: Any) -> list[Effect]:
    return node.advance(Received(message, "edge-node/v1/steel/somewhere"))


def welcome(node: NodeModel, contributed: int = 0, server: str = SERVER) -> list[Effect]:
    return hear(node, Welcome(session=node.plan.session, server=server, contributed=contributed))


def show(
    node: NodeModel, round_: int, status: Any = "open", server: str = SERVER, **fields: Any
) -> list[Effect]:
    """The coordinator's round state arrives."""
    spec = node.plan.spec
    broadcast = make_broadcast(spec, round_ + (status == "finished")) if round_ else None
    return hear(
        node,
        RoundState(
            run=RUN, round=round_, status=status, broadcast=broadcast, server=server, **fields
        ),
    )


def accept(node: NodeModel, round_: int, *, counted: bool = True) -> list[Effect]:
    return hear(node, Accepted(session=node.plan.session, run=RUN, round=round_, counted=counted))


def play(node: NodeModel, rounds: int) -> NodeModel:
    """Take part in rounds without a fault."""
    welcome(node)
    for round_ in range(1, rounds + 1):
        show(node, round_)
        node.arrive()
        node.finish_stage()
        accept(node, round_)
        node.finish_stage()
    return node


def of(effects: list[Effect], *kinds: type) -> list[Effect]:
    return [each for each in effects if isinstance(each, kinds)]


def texts(effects: list[Effect]) -> str:
    return "\n".join(
        getattr(each.event, "text", "") for each in effects if isinstance(each, Report)
    )


# Being let in


def test_a_node_trains_only_once_a_coordinator_has_answered_it() -> None:
    """What is retained may be old, or replayed."""
    node = begin()
    assert of(show(node, 1), Fetch, Train) == []
    assert of(welcome(node), Fetch) == [Fetch(make_broadcast(SPEC, 1))]


@pytest.mark.parametrize("had_part", [False, True])
def test_a_node_that_found_the_run_over_contributes_nothing_when_it_is_open_again(
    had_part: bool,
) -> None:
    """Its plant's demands of rounds were not checked: a coordinator could pretend an end."""
    spec = make_spec(statistics=True)
    node = begin(spec=spec, was_over=True)
    if had_part:
        progress = play(begin(spec=spec), spec.rounds).state.progress
        node.state = node.state._replace(progress=progress)
    show(node, spec.rounds, "finished")
    welcome(node, server=OTHER)
    told = show(node, 1, server=OTHER)
    assert of(told, Train, GoBack, Fetch) == []
    (failed,) = of(told, Fail)
    assert isinstance(failed, Fail)
    assert isinstance(failed.error, NewRunError)


def test_a_welcome_to_an_earlier_process_lets_nobody_in() -> None:
    node = begin()
    show(node, 1)
    assert hear(node, Welcome(session="f" * 16, server=SERVER)) == []


def test_a_node_announces_itself_when_it_connects_and_to_roll_calls_at_most_once_a_second() -> None:
    node = begin()
    assert of(node.advance(Connected()), Announce) == []  # with the next tick, which is now
    assert of(node.advance(Tick(5.0)), Announce) == [Announce(0, is_served=False)]
    hear(node, Presence(session=SERVER, online=True))
    assert node.advance(Tick(5.0 + MIN_INTERVAL)) == []
    assert of(node.advance(Tick(5.1 + MIN_INTERVAL)), Announce) == [Announce(0, is_served=False)]
    assert node.advance(Tick(10.0)) == []


def test_a_node_that_reconnects_announces_itself_at_once() -> None:
    node = begin()
    node.advance(Connected())
    node.advance(Tick(5.0))
    node.advance(Connected())
    assert of(node.advance(Tick(5.1)), Announce) == [Announce(0, is_served=False)]


def test_silence_is_told_once_and_only_before_a_welcome() -> None:
    node = begin()
    assert texts(node.advance(Tick(SILENCE))) == ""
    assert "not let us in" in texts(node.advance(Tick(SILENCE + 0.1)))
    assert node.advance(Tick(SILENCE + 10)) == []
    heard = begin()
    welcome(heard)
    assert heard.advance(Tick(SILENCE + 0.1)) == []


def test_a_refusal_makes_it_look_for_a_newer_run_before_it_gives_up() -> None:
    refusal = Refusal(session=SESSION, reason="no", remedy="ask")
    assert hear(begin(), refusal) == [CheckRun(refusal)]
    assert hear(begin(), RoundState(run="f" * 16, round=1, status="open")) == [CheckRun()]


def test_an_absent_coordinator_is_told_and_its_return_too() -> None:
    node = begin()
    show(node, 1)
    assert "not connected" in texts(hear(node, Presence(session=SERVER, online=False)))
    assert "is back" in texts(welcome(node))
    assert "is back" not in texts(welcome(node))


# A round


def test_a_round_is_fetched_trained_contributed_and_refined() -> None:
    node = begin()
    welcome(node)
    show(node, 1)
    node.arrive()
    assert node.trained == [(1, 1)]
    node.finish_stage()
    sent = [each.message for each in node.outbox if isinstance(each, Send)]
    assert [(each.round, each.blob) for each in sent] == [
        (1, make_contribution(make_broadcast(SPEC, 1)))
    ]
    assert current_activity(node.state) == "sending"
    accept(node, 1)
    assert current_activity(node.state) == "training"  # stage 2
    node.finish_stage()
    assert (node.state.rounds_done, current_activity(node.state)) == (1, "waiting")


# A delta in a broadcast's place


DELTA = make_delta(SPEC, 2)


def test_who_has_the_broadcast_before_fetches_the_delta_and_trains_from_what_it_makes() -> None:
    node = play(begin(), 1)
    assert of(show(node, 2, delta=DELTA), Fetch) == [Fetch(DELTA.blob)]
    node.arrive()
    assert node.disk[make_broadcast(SPEC, 2).digest]
    assert node.trained[-1] == (2, 1)


def test_a_delta_of_nothing_is_fetched_by_whoever_comes() -> None:
    delta, node = make_delta(SPEC, 1), play(begin(), 0)
    assert of(show(node, 1, delta=delta), Fetch) == [Fetch(delta.blob)]
    node.arrive()
    assert node.disk[make_broadcast(SPEC, 1).digest]
    assert node.trained[-1] == (1, 1)


def test_the_result_is_made_of_a_delta_too() -> None:
    node = begin(spec=make_spec(rounds=1))
    play(node, 1)
    show(node, 1, "finished", delta=DELTA)
    node.arrive()
    assert node.job == Job(make_broadcast(node.plan.spec, 2), 0)


@pytest.mark.parametrize("lacks", ["the broadcast before", "its bytes", "a smaller blob"])
def test_who_cannot_use_a_delta_fetches_the_broadcast(lacks: str) -> None:
    node, delta, whole = play(begin(), 1), DELTA, make_broadcast(SPEC, 2)
    if lacks == "the broadcast before":
        del node.disk[delta.base]
    elif lacks == "its bytes":
        node.disk[delta.base] = False
    else:
        delta = msgspec.structs.replace(
            delta, blob=msgspec.structs.replace(delta.blob, size=whole.size)
        )
    assert of(show(node, 2, delta=delta), Fetch) == [Fetch(whole)]
    node.arrive()
    assert node.trained[-1] == (2, 1)


def test_a_wrongly_served_delta_gives_way_to_the_broadcast_and_a_full_disk_does_not() -> None:
    node = play(begin(), 1)
    show(node, 2, delta=DELTA)
    wrong = PeerError("coordinator", "its blob does not match its digest", 2)
    assert of(node.advance(FetchFailed(DELTA.blob, wrong)), Fetch) == [
        Fetch(make_broadcast(SPEC, 2))
    ]
    full = play(begin(), 1)
    show(full, 2, delta=DELTA)
    full.advance(FetchFailed(DELTA.blob, EdgeNodeError("no space left", "make room")))
    assert "no space left" in str(full.error)


def test_a_coordinator_that_has_restarted_offers_no_delta_and_the_broadcast_is_fetched() -> None:
    node = play(begin(), 1)
    show(node, 2, delta=DELTA)
    assert of(show(node, 2), Cancel, Fetch) == [Cancel(DELTA.blob), Fetch(make_broadcast(SPEC, 2))]


def test_a_node_that_was_not_drawn_waits() -> None:
    node = begin()
    welcome(node)
    assert of(show(node, 1, participants=("plant-b",)), Fetch) == []
    assert of(show(node, 2, participants=(NAME,)), Fetch) == [Fetch(make_broadcast(SPEC, 2))]


def test_a_broadcast_that_comes_when_a_newer_round_is_open_is_not_trained_from() -> None:
    node = begin()
    welcome(node)
    show(node, 1)
    old = node.fetching
    assert of(show(node, 2), Cancel, Fetch) == [
        Cancel(make_broadcast(SPEC, 1)),
        Fetch(make_broadcast(SPEC, 2)),
    ]
    node.fetching = old
    node.arrive()
    assert node.trained == []


def test_a_pause_is_told_and_so_is_its_end() -> None:
    node = begin()
    welcome(node)
    show(node, 1)
    assert "too few" in texts(show(node, 1, reason="too few"))
    assert texts(show(node, 1, reason="too few")) == ""
    assert "goes on" in texts(show(node, 1))
    assert texts(show(node, 1)) == ""


def test_a_delayed_round_state_changes_nothing() -> None:
    node = begin()
    welcome(node)
    show(node, 2)
    assert show(node, 1) == []


def test_a_broadcast_larger_than_its_tensors_ends_the_session_before_it_is_fetched() -> None:
    node = begin()
    large = msgspec.structs.replace(make_broadcast(SPEC, 1), size=1 << 30)
    effects = hear(
        node, RoundState(run=RUN, round=1, status="open", broadcast=large, server=SERVER)
    )
    assert isinstance(node.error, EdgeNodeError)
    assert of(effects, Fetch) == []


@pytest.mark.parametrize(
    ("error", "says"),
    [(PeerError("x", "gone"), "did not arrive"), (EdgeNodeError("full", "free some"), "full")],
)
def test_a_broadcast_that_cannot_be_fetched_ends_the_session_with_whose_fault_it_is(
    error: Any, says: str
) -> None:
    node = begin()
    welcome(node)
    show(node, 1)
    node.advance(FetchFailed(make_broadcast(SPEC, 2), error))
    assert node.error is None  # it was not wanted any more
    node.advance(FetchFailed(make_broadcast(SPEC, 1), error))
    assert says in str(node.error)


# The contribution


def test_a_contribution_is_offered_again_after_each_welcome_until_it_is_accepted() -> None:
    node = begin()
    welcome(node)
    show(node, 1)
    node.arrive()
    node.finish_stage()
    assert len(of(welcome(node), Send)) == 1
    accept(node, 1)
    assert of(welcome(node, contributed=1), Send) == []


def test_a_coordinator_that_has_lost_a_contribution_is_offered_it_again() -> None:
    """It was restored from a copy that is older than its Accepted."""
    node = play(begin(), 1)
    # where it stands is not known yet
    assert of(welcome(node, contributed=0, server=OTHER), Send) == []
    assert len(of(show(node, 1, server=OTHER), Send)) == 1


def test_a_contribution_that_the_disk_has_lost_is_made_again_when_the_training_has_ended() -> None:
    node = begin()
    welcome(node)
    show(node, 1)
    node.arrive()
    node.finish_stage()
    digest = make_contribution(make_broadcast(SPEC, 1)).digest
    node.disk[digest] = False
    assert of(node.advance(Damaged(digest)), GoBack) == []  # stage 2 is under way
    node.finish_stage()
    assert node.trained == [(1, 1), (1, 1)]


def test_a_late_contribution_is_told_and_not_counted() -> None:
    node = begin()
    welcome(node)
    show(node, 1)
    node.arrive()
    node.finish_stage()
    effects = accept(node, 1, counted=False)
    assert [type(each.event).__name__ for each in effects if isinstance(each, Report)] == ["Late"]
    assert (node.state.sent.accepted, node.state.sent.counted) == (1, 0)


# Faults of disks, and copies


def test_a_process_that_was_killed_in_stage_2_goes_on_with_it() -> None:
    node = begin()
    welcome(node)
    show(node, 1)
    node.arrive()
    node.finish_stage()
    node.restart(loses_its_state=False)
    show(node, 1)
    assert node.trained == [(1, 1), (1, 2)]


def test_a_lost_round_is_trained_again_if_its_broadcast_is_here_and_else_left_out() -> None:
    node = play(begin(), 2)
    node.restart(loses_its_state=True)
    show(node, 2)
    assert node.trained[-1] == (2, 1)
    gone = play(begin(), 2)
    gone.restart(loses_its_state=True)
    gone.disk.clear()
    assert "round 2 is not trained" in texts(show(gone, 3))


def test_a_node_that_trains_a_lost_round_again_announces_that_round_until_it_knows_it() -> None:
    """An older round would be refused: the totals may hold its statistics."""
    node = play(begin(), 3)
    node.restart(loses_its_state=True)
    show(node, 3, "finished")
    assert node.trained[-1] == (3, 1)
    node.advance(Connected())
    assert of(node.advance(Tick(5.0)), Announce) == [Announce(3, is_served=False)]
    node.finish_stage()
    assert node.state.lost is None


def test_a_node_goes_back_with_a_coordinator_that_was_restored_from_a_copy() -> None:
    node = play(begin(), 2)
    welcome(node, contributed=0, server=OTHER)
    effects = show(node, 1, server=OTHER)
    assert of(effects, GoBack) == [GoBack(1)]
    assert "older copy" in texts(effects)
    assert node.state.progress is None


def test_a_node_keeps_what_it_learnt_in_a_round_that_a_restored_coordinator_has() -> None:
    """That round may close before the node would have trained it again:
    the next one then begins from another state.
    """
    node = play(begin(), 3)
    welcome(node, contributed=2, server=OTHER)
    assert of(show(node, 2, server=OTHER), GoBack) == [GoBack(3)]
    assert node.state.rounds_done == 2
    show(node, 3, server=OTHER)
    assert [round_ for round_, _ in node.trained].count(2) == [
        round_ for round_, _ in node.trained
    ].count(1)


def test_a_node_never_goes_back_for_a_coordinator_that_has_not_welcomed_it() -> None:
    node = play(begin(), 2)
    assert show(node, 1, server=OTHER) == []


def test_a_node_whose_folder_is_an_older_copy_says_so() -> None:
    node = play(begin(), 1)
    assert "an older copy" in texts(welcome(node, contributed=3))
    assert "an older copy" not in texts(welcome(node, contributed=3))


# The end


def test_the_model_is_made_of_the_result_and_ends_the_session() -> None:
    node = play(begin(), 3)
    show(node, 3, "finished")
    node.arrive()
    assert current_activity(node.state) == "judging"
    node.finish_stage()
    assert node.state.result == FOLDER / "model"


def test_a_model_that_needs_no_result_fetches_it_only_if_its_last_broadcast_is_damaged() -> None:
    plan = {"deploys_final": False, "needs_final": False}
    node = play(begin(**plan), 3)
    assert of(show(node, 3, "finished"), Fetch, Deploy) == [
        Deploy(make_broadcast(SPEC, 4), counted=True)
    ]
    damaged = play(begin(**plan), 3)
    damaged.disk[make_broadcast(SPEC, 3).digest] = False
    assert of(show(damaged, 3, "finished"), Fetch) == [Fetch(make_broadcast(SPEC, 4))]


def test_a_newcomer_has_no_part_in_a_model_and_makes_one_of_sums() -> None:
    node = begin()
    welcome(node)
    show(node, 3, "finished")
    assert "before this node trained" in str(node.error)
    spec = make_spec(statistics=True)
    newcomer = begin(spec=spec)
    show(newcomer, 3, "finished")
    welcome(newcomer)
    newcomer.arrive()
    assert any(isinstance(each, TellFinished) for each in newcomer.outbox)
    newcomer.advance(Connected())
    assert of(newcomer.advance(Tick(1.0)), Announce) == [Announce(0, is_served=True)]


def begin_choosing(**plan: Any) -> NodeModel:
    spec = msgspec.structs.replace(make_spec(rounds=1, statistics=True), chooses=True)
    return begin(spec=spec, previews=True, **plan)


def tell_losses(node: NodeModel) -> list[Effect]:
    """The losses are known."""
    node.job = None
    return node.advance(Deployed(FOLDER / "preview.json", ("a forecast",), {"loss": 1.0}))


def finish(node: NodeModel) -> None:
    show(node, 1, "finished")
    node.arrive()


def test_a_node_of_a_choosing_run_tells_its_losses_whenever_it_is_welcomed_and_stays() -> None:
    node = play(begin_choosing(awaits_next=True), 1)
    finish(node)
    assert node.job == Job(make_broadcast(node.plan.spec, 2), 0)
    effects = tell_losses(node)
    assert of(effects, TellOutcome) == [TellOutcome({"loss": 1.0})]
    assert "a forecast" in texts(effects)
    assert node.state.result is None
    assert current_activity(node.state) == "waiting"
    effects = welcome(node, 1, OTHER)
    effects += show(node, 1, "finished", OTHER)
    assert of(effects, TellOutcome) == [TellOutcome({"loss": 1.0})]
    assert of(effects, Deploy) == []
    (checked,) = of(hear(node, RoundState(run="f" * 16, round=0, status="gathering")), CheckRun)
    assert checked == CheckRun()


def test_losses_are_made_again_when_the_coordinator_has_gone_back() -> None:
    node = play(begin_choosing(awaits_next=True), 1)
    finish(node)
    tell_losses(node)
    welcome(node, 0, OTHER)
    show(node, 1, "open", OTHER)
    accept(node, 1)
    show(node, 1, "finished", OTHER)
    assert node.job == Job(make_broadcast(node.plan.spec, 2), 0)
    assert of(welcome(node, 1, OTHER), TellOutcome) == []


def test_a_preview_of_a_choosing_run_tells_its_losses_and_ends() -> None:
    node = play(begin_choosing(), 1)
    finish(node)
    assert of(tell_losses(node), TellOutcome) == [TellOutcome({"loss": 1.0})]
    assert node.state.result == FOLDER / "preview.json"


def test_a_node_that_was_not_in_a_choosing_run_waits_for_the_next_one() -> None:
    node = begin_choosing(awaits_next=True)
    welcome(node)
    assert of(show(node, 1, "finished"), Fetch, Deploy, Fail, TellFinished) == []


def test_a_model_of_sums_waits_until_it_is_known_whether_they_hold_the_node_s_own() -> None:
    node = begin(spec=make_spec(rounds=1, statistics=True))
    welcome(node)
    show(node, 1)
    node.arrive()
    node.finish_stage()
    node.finish_stage()
    show(node, 1, "finished")
    assert node.fetching is None
    accept(node, 1)
    node.arrive()
    assert node.job is not None


@pytest.mark.parametrize("contributed", [2, 3])
def test_sums_that_hold_the_node_s_own_do_not_get_them_again_where_its_last_round_is_lost(
    contributed: int,
) -> None:
    node = play(begin(spec=make_spec(statistics=True)), 3)
    node.restart(loses_its_state=True)
    node.disk.clear()  # nor is the broadcast of that round left
    welcome(node, contributed=contributed)
    show(node, 3, "finished")
    node.disk[make_broadcast(node.plan.spec, 4).digest] = True
    deployed = of(node.advance(Tick(0.0)) + show(node, 3, "finished"), Deploy)
    assert deployed == [Deploy(make_broadcast(node.plan.spec, 4), counted=contributed == 3)]


def test_an_aborted_run_is_over_whoever_says_so() -> None:
    node = play(begin(), 1)
    assert isinstance(show(node, 1, "aborted", server=OTHER, reason="no more steel")[-1], Fail)
    assert "no more steel" in str(node.error)


# Masked contributions

MASKED = msgspec.structs.replace(SPEC, nodes=3, quorum=3, mask_threshold=2)


def tell_step(node: NodeModel, round_: int, **what: Any) -> list[Effect]:
    return hear(node, MaskingStep(run=RUN, round=round_, **what))


def share(node: NodeModel, round_: int) -> list[Effect]:
    """The others' shares arrive: the masks are known."""
    return tell_step(node, round_, shares={"plant-b": "00" * 82})


def test_keys_are_told_when_a_round_opens_and_after_each_welcome() -> None:
    node = begin(spec=MASKED)
    assert of(show(node, 1), TellKeys) == []  # it may be retained, and old
    assert of(welcome(node), TellKeys) == [TellKeys(1)]
    assert of(show(node, 1), TellKeys) == []
    assert of(welcome(node), TellKeys) == [TellKeys(1)]
    assert of(show(node, 2), TellKeys) == [TellKeys(2)]
    assert of(show(node, 3, participants=("plant-b",)), TellKeys) == []


def test_a_contribution_leaves_the_node_behind_masks_alone_and_weighs_one() -> None:
    node = begin(spec=MASKED)
    welcome(node)
    show(node, 1)
    node.arrive()
    assert of(share(node, 1), Mask) == []  # it is not trained
    node.finish_stage()
    (sent,) = [each for each in node.outbox if isinstance(each, Send)]
    assert sent.message.blob == make_masked(make_contribution(make_broadcast(MASKED, 1)))
    assert sent.message.weight == 1
    assert len(of(welcome(node), Send)) == 1  # as it was
    accept(node, 1)
    assert of(welcome(node, contributed=1), Send) == []


def test_who_has_trained_waits_for_the_masks_of_that_round() -> None:
    node = begin(spec=MASKED)
    welcome(node)
    show(node, 1)
    node.arrive()
    node.finish_stage()
    assert of(tell_step(node, 1, survivors=(NAME,)), AnswerStep)
    assert of(share(node, 2), Send) == []
    assert len(of(share(node, 1), Send)) == 1


def test_a_contribution_to_a_closed_round_is_not_offered() -> None:
    """It is not in that round's sum, and in no other one may it be."""
    node = begin(spec=MASKED)
    welcome(node)
    show(node, 1)
    node.arrive()
    node.finish_stage()
    show(node, 2)
    assert of(share(node, 1), Send) == []
    node.finish_stage()
    node.arrive()
    assert node.trained == [(1, 1), (2, 1)]


def test_masked_words_that_the_disk_has_lost_are_made_again_from_what_is_trained_again() -> None:
    node = begin(spec=MASKED)
    welcome(node)
    show(node, 1)
    node.arrive()
    node.finish_stage()
    share(node, 1)
    plain = make_contribution(make_broadcast(MASKED, 1))
    masked = make_masked(plain)
    node.disk[masked.digest] = False
    assert len(of(node.advance(Damaged(masked.digest)), Mask)) == 1
    assert node.disk[masked.digest]
    node.disk[masked.digest] = node.disk[plain.digest] = False
    assert of(node.advance(Damaged(masked.digest)), GoBack) == []  # stage 2 is under way
    node.finish_stage()
    assert node.trained == [(1, 1), (1, 1)]


def test_a_node_that_masks_does_not_go_back_with_a_coordinator() -> None:
    node = begin(spec=MASKED)
    welcome(node)
    for round_ in (1, 2):
        show(node, round_)
        node.arrive()
        share(node, round_)
        node.finish_stage()
        accept(node, round_)
        node.finish_stage()
    welcome(node, contributed=0, server=OTHER)
    effects = show(node, 1, server=OTHER)
    assert of(effects, GoBack) == []
    assert "two sums" in str(node.error) or "another sum of a round" in str(node.error)


def test_steps_mean_nothing_where_nothing_is_masked() -> None:
    node = begin()
    assert "unexpected MaskingStep" in texts(share(node, 1))


def test_the_session_performs_each_effect_and_nothing_else() -> None:
    assert performed(session) == {each.__name__ for each in get_args(session_events.Effect)}
