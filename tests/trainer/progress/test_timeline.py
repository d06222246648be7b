"""What a node did when is on its disk: whole, in order, bounded,
and only of the run that it is in.
"""

import time
from pathlib import Path

import pytest

from trainer.progress.timeline import FILE, Timeline, read_spans

RUN, EARLIER = "0123456789abcdef", "fedcba9876543210"


class Clock:
    """A node's two clocks, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.wall, self.steady = 1_700_000_000.0, 50.0
        monkeypatch.setattr(time, "time", lambda: self.wall)
        monkeypatch.setattr(time, "monotonic", lambda: self.steady)

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def found(folder: Path, run: str = RUN) -> list[tuple[int, str, float, float]]:
    """Round, activity, begin and end; times since the clock's start."""
    return [
        (
            span.round,
            span.activity,
            round(span.begin - 1_700_000_000, 3),
            round(span.end - 1_700_000_000, 3),
        )
        for span in read_spans(folder, run)
    ]


def test_a_span_is_written_when_it_has_ended_and_not_before(clock: Clock, tmp_path: Path) -> None:
    record = Timeline(tmp_path, RUN)
    record.begin("training", 3)
    clock.passes(2)
    assert found(tmp_path) == []
    record.end("training")
    assert found(tmp_path) == [(3, "training", 0, 2)]


def test_two_activities_at_a_time_are_two_spans(clock: Clock, tmp_path: Path) -> None:
    record = Timeline(tmp_path, RUN)
    record.begin("sending", 1)
    record.begin("refining", 1)
    clock.passes(1)
    record.end("sending")
    clock.passes(1)
    record.end("refining")
    assert found(tmp_path) == [(1, "sending", 0, 1), (1, "refining", 0, 2)]


def test_what_has_begun_for_a_round_does_not_begin_again_but_another_round_takes_its_place(
    clock: Clock, tmp_path: Path
) -> None:
    record = Timeline(tmp_path, RUN)
    record.begin("sending", 1)
    clock.passes(1)
    record.begin("sending", 1)
    clock.passes(1)
    record.end("sending")
    record.begin("sending", 2)
    clock.passes(1)
    record.begin("sending", 3)
    clock.passes(1)
    record.end("sending")
    assert found(tmp_path) == [(1, "sending", 0, 2), (3, "sending", 3, 4)]


def test_what_has_not_begun_does_not_end_and_what_took_no_time_is_not_told(
    clock: Clock, tmp_path: Path
) -> None:
    record = Timeline(tmp_path, RUN)
    record.end("waiting")
    record.begin("waiting", 1)
    record.end("waiting")
    assert found(tmp_path) == []


def test_a_clock_that_is_set_while_the_node_runs_turns_no_span_around(
    clock: Clock, tmp_path: Path
) -> None:
    record = Timeline(tmp_path, RUN)
    record.begin("training", 1)
    clock.passes(2)
    clock.wall -= 3600
    record.end("training")
    assert found(tmp_path) == [(1, "training", 0, 2)]


def test_a_restarted_node_goes_on_and_the_time_between_is_nobodys(
    clock: Clock, tmp_path: Path
) -> None:
    record = Timeline(tmp_path, RUN)
    record.begin("waiting", 1)
    clock.passes(1)
    record.end("waiting")
    record.begin("training", 1)
    clock.passes(5)  # killed here
    again = Timeline(tmp_path, RUN)
    again.begin("training", 1)
    clock.passes(1)
    again.end("training")
    assert found(tmp_path) == [(1, "waiting", 0, 1), (1, "training", 6, 7)]


def test_a_line_cut_short_is_passed_by_and_spoils_no_other(clock: Clock, tmp_path: Path) -> None:
    for round_ in (1, 2):
        record = Timeline(tmp_path, RUN)
        record.begin("training", round_)
        clock.passes(1)
        record.end("training")
        with (tmp_path / FILE).open("ab") as file:
            file.write(b'{"run":"0123456789abc')
    assert [round_ for round_, *_ in found(tmp_path)] == [1, 2]


def test_a_new_run_forgets_the_earlier_one(clock: Clock, tmp_path: Path) -> None:
    record = Timeline(tmp_path, EARLIER)
    record.begin("training", 9)
    clock.passes(1)
    record.end("training")
    Timeline(tmp_path, RUN)
    assert found(tmp_path) == found(tmp_path, EARLIER) == []


def test_the_file_stays_small_and_keeps_the_newest(clock: Clock, tmp_path: Path) -> None:
    record = Timeline(tmp_path, RUN, most=10)
    for round_ in range(1, 101):
        record.begin("training", round_)
        clock.passes(1)
        record.end("training")
        assert len((tmp_path / FILE).read_bytes().splitlines()) < 20
    rounds = [round_ for round_, *_ in found(tmp_path)]
    assert rounds == list(range(rounds[0], 101))
    assert len(rounds) >= 10


def test_a_node_without_a_record_has_no_spans(tmp_path: Path) -> None:
    assert read_spans(tmp_path, RUN) == []
