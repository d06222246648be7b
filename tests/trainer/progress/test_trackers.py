"""Any tracker is fed from events; one that fails or is slow holds up nobody, and is told once."""

import threading
from collections.abc import Sequence

import pytest

from broker_config.protocol.errors import UsageError
from tests.support.tracked_run import BEGIN, END, RUN, SETTINGS, round_events
from tests.support.waiting import wait_until
from trainer.progress import AnyEvent, Gathering, Measured, Note, ignore
from trainer.progress.trackers import TRACKERS, Limits, Point, Run, to_points, track, tracking


class Memory:
    """A tracker that remembers, fails while it is `away`, and waits while it is `busy`."""

    remedy = "switch it on"

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.points: list[Point] = []
        self.ended: list[bool] = []
        self.away = False
        self.failures = 0
        self.free = threading.Event()
        self.free.set()

    def begin(self, run: Run) -> None:
        self._work()
        self.runs.append(run)

    def record(self, points: Sequence[Point]) -> None:
        self._work()
        self.points += points

    def end(self, *, finished: bool) -> None:
        self._work()
        self.ended.append(finished)

    def _work(self) -> None:
        self.free.wait()
        if self.away:
            self.failures += 1
            raise ConnectionError("nobody answers")


def notes(events: Sequence[AnyEvent]) -> list[str]:
    return [each.text for each in events if isinstance(each, Note)]


def test_a_run_is_recorded_with_its_settings_and_every_round() -> None:
    memory, seen = Memory(), list[AnyEvent]()
    events = [*BEGIN, *round_events(1, 0.5), *round_events(2, 0.75), *END]
    with tracking("memory", memory, seen.append) as report:
        for event in events:
            report(event)
    assert seen == events, "whoever watches hears everything, and nothing else"
    assert memory.runs == [Run("steel", RUN, SETTINGS)]
    assert {(each.name, each.value) for each in memory.points if each.round == 2} == {
        ("accuracy/plant-1", 0.75),
        ("L_D/plant-1", 0.5),
        ("leave-one-out loss x/plant-1", 1.0),
        ("weight/plant-1", 0.5),
        ("weight/plant-2", 0.75),
        ("bytes/plant-1", 9e6),
        ("bytes/plant-2", 9e6),
        ("counted weight/plant-2", 0.8),
        ("counted update/plant-2", 1.0),
        ("round/seconds", 2.5),
        ("round/bytes_up", 1.8e7),
        ("round/bytes_down", 0.0),
        ("round/contributors", 2.0),
    }
    assert memory.ended == [True]


def test_of_a_choice_only_the_run_that_is_wanted_is_recorded() -> None:
    choosing = Gathering(
        federation="steel", run="f" * 16, nodes=2, rounds=1, settings={"chooses": True}
    )
    memory = Memory()
    with tracking("memory", memory, ignore) as report:
        for event in (choosing, *round_events(1, 0.25), *END, *BEGIN, *round_events(2, 0.5)):
            report(event)
    assert memory.runs == [Run("steel", RUN, SETTINGS)]
    assert {each.round for each in memory.points} == {2}
    assert memory.ended == [False]


def test_a_run_that_is_suspended_is_not_recorded_as_finished() -> None:
    memory = Memory()
    with tracking("memory", memory, ignore) as report:
        report(BEGIN[0])
    assert memory.ended == [False]


@pytest.mark.parametrize("name", ["../x", "", "/etc", "a\nb", "ä", ".."])
def test_a_node_cannot_name_a_metric_so_that_a_tracker_refuses_it(name: str) -> None:
    assert list(to_points(Measured(node="mallory", round=1, metrics={name: 1.0, "fair": 2.0}))) == [
        ("fair/mallory", 2.0, 1)
    ]


def test_a_tracker_that_is_away_is_told_once_and_gets_everything_when_it_is_back() -> None:
    memory, seen = Memory(), list[AnyEvent]()
    memory.away = True
    with tracking("memory", memory, seen.append, Limits(retry=0.01)) as report:
        report(BEGIN[0])
        for number in range(1, 5):
            for event in round_events(number, 0.5):
                report(event)
            wait_until(lambda most=3 * number: memory.failures > most)
        memory.away = False
        for event in END:
            report(event)
    assert len(notes(seen)) == 1
    assert "records nothing now: nobody answers" in notes(seen)[0]
    assert "switch it on" in notes(seen)[0]
    assert {each.round for each in memory.points} == {1, 2, 3, 4}
    assert memory.ended == [True]


def test_a_tracker_that_hangs_holds_up_nobody_and_what_it_lacks_is_counted() -> None:
    memory, seen = Memory(), list[AnyEvent]()
    memory.free.clear()
    with tracking("memory", memory, seen.append, Limits(patience=0.1, waiting=50)) as report:
        for event in [*BEGIN, *round_events(1, 0.5) * 100, *END]:
            report(event)
    assert notes(seen) == ["memory lacks 1300 values of this run"]
    memory.free.set()
    wait_until(lambda: memory.ended)
    assert len(memory.points) == 50, "what waits is bounded"


def test_what_cannot_be_tracked_is_answered_before_anything_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(place: str) -> Memory:
        raise UsageError(f"nothing can be remembered in {place}", "name another place")

    monkeypatch.setitem(TRACKERS, "memory", refuse)
    with pytest.raises(UsageError, match="'memry'") as caught, track({"memry": "here"}, ignore):
        pass
    assert "'memory'" in caught.value.remedy
    with pytest.raises(UsageError, match="in here"), track({"memory": "here"}, ignore):
        pass


def test_a_tracker_is_made_of_its_place_and_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Memory] = {}
    monkeypatch.setitem(TRACKERS, "memory", lambda place: made.setdefault(place, Memory()))
    with track({"memory": "here"}, ignore) as report:
        for event in [*BEGIN, *END]:
            report(event)
    assert made["here"].runs == [Run("steel", RUN, SETTINGS)]
