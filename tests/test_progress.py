"""Events are shown as JSON for machines, as lines in a log and as a table in a terminal."""

import io
import re
import sys
from typing import get_args

import pytest

from trainer import progress
from trainer.progress import (
    AnyEvent,
    Contribution,
    FederationFinished,
    Gathering,
    Measured,
    NodeJoined,
    NodeLost,
    NodeRefused,
    Paused,
    RoundClosed,
    RoundOpened,
)

# Two rounds of a federation, with every kind of event.
STORY: list[AnyEvent] = [
    Gathering(federation="steel", run="0123456789abcdef", nodes=2, rounds=2),
    NodeJoined(node="plant-1"),
    NodeJoined(node="plant-2"),
    RoundOpened(round=1),
    Contribution(node="plant-2", round=1, weight=0.6931471805599453, bytes=9_000_000),
    Measured(node="plant-2", round=1, metrics={"L_D": 0.6931, "A_k": 0.5}),
    Contribution(node="plant-1", round=1, weight=0.25, bytes=512),
    RoundClosed(round=1, contributors=["plant-1", "plant-2"], seconds=3.14),
    RoundOpened(round=2),
    Measured(node="plant-1", round=1, metrics={"L_D": 0.25}),
    NodeRefused(node="mallory", round=2, reason="tensor encoder.weight is [int64], [/not] float32"),
    NodeLost(node="plant-2", round=2),
    Paused(round=2, waiting_for=["plant-2"]),
    NodeJoined(node="plant-2"),
    Contribution(node="plant-1", round=2, weight=0.5, bytes=2_500),
    Contribution(node="plant-2", round=2, weight=0.75, bytes=2_500),
    Measured(node="plant-1", round=2, metrics={"accuracy": 0.95, "A_k": -0.125}),
    RoundClosed(round=2, contributors=["plant-1", "plant-2"], seconds=60),
    FederationFinished(rounds=2, bytes_up=9_005_512, bytes_down=3_000_000_000, seconds=63.2),
]
LINES = """
federation steel: waiting for 2 nodes, 2 rounds
plant-1 joined
plant-2 joined
round 1 closed after 3.1 s, 9.0 MB up: plant-1 0.250; plant-2 0.693
mallory is left out (round 2): tensor encoder.weight is [int64], [/not] float32
plant-2 is gone (round 2): its connection ended
round 2 waits for plant-2 to come back
plant-2 joined
round 2: plant-1: accuracy 0.950, A_k -0.125
round 2 closed after 60.0 s, 5.0 kB up: plant-1 0.500; plant-2 0.750
finished: 2 rounds in 63 s, 9.0 MB up, 3.00 GB down
""".strip().splitlines()


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def told(report: progress.Report, events: list[AnyEvent]) -> None:
    for event in events:
        report(event)


def test_the_story_has_every_kind_of_event() -> None:
    assert {type(event) for event in STORY} == set(get_args(AnyEvent))


@pytest.mark.parametrize("event", STORY, ids=lambda event: type(event).__name__)
def test_an_event_survives_its_json_line_and_can_be_said(event: AnyEvent) -> None:
    stream = io.StringIO()
    progress.json_lines(stream)(event)
    (line,) = stream.getvalue().splitlines()
    assert progress.read_line(line) == progress.read_line(line.encode()) == event
    assert progress.describe(event)


def test_every_event_is_flushed_when_it_happens() -> None:
    stream = io.TextIOWrapper(raw := io.BytesIO(), write_through=False)
    progress.json_lines(stream)(STORY[1])
    assert raw.getvalue() == b'{"event":"NodeJoined","node":"plant-1"}\n'
    progress.plain(stream)(STORY[1])
    assert raw.getvalue().endswith(b" plant-1 joined\n")


def test_a_log_has_a_line_a_round_with_what_is_known_of_each_node_and_one_for_each_other_event() -> None:
    stream = io.StringIO()
    told(progress.plain(stream), STORY)
    lines = stream.getvalue().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    assert [line[9:] for line in lines] == LINES


def test_a_round_of_which_nothing_is_known_is_closed_without_a_list() -> None:
    stream = io.StringIO()
    told(progress.plain(stream), [RoundOpened(round=1), RoundClosed(round=1, contributors=["plant-1"], seconds=0.5)])
    assert stream.getvalue()[9:] == "round 1 closed after 0.5 s\n"


def test_a_simulated_round_tells_metrics_since_nothing_is_sent() -> None:
    stream = io.StringIO()
    measured = Measured(node="plant-1", round=1, metrics={"L_D": 0.25})
    told(
        progress.plain(stream),
        [RoundOpened(round=1), measured, RoundClosed(round=1, contributors=["plant-1"], seconds=0.5)],
    )
    assert stream.getvalue()[9:] == "round 1 closed after 0.5 s: plant-1 L_D 0.250\n"


def test_a_pause_without_names_waits_for_more_nodes() -> None:
    assert progress.describe(Paused(round=3, waiting_for=[])) == "round 3 waits for more nodes to come back"


def test_ignoring_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    told(progress.ignore, STORY)
    assert capsys.readouterr() == ("", "")


def test_json_goes_to_standard_output_and_a_log_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.show(as_json=True) as report:
        told(report, STORY)
    out, err = capsys.readouterr()
    assert [progress.read_line(line) for line in out.splitlines()] == STORY
    assert err == ""
    with progress.show(as_json=False) as report:
        told(report, STORY)
    out, err = capsys.readouterr()
    assert [line[9:] for line in err.splitlines()] == LINES
    assert out == ""


def screen(monkeypatch: pytest.MonkeyPatch, events: list[AnyEvent]) -> list[str]:
    """The lines that a terminal 60 characters wide was sent, without its control sequences."""
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    with progress.show(as_json=False) as report:
        told(report, events)
    text = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", stream.getvalue())
    return [line for line in re.split(r"[\r\n]+", text) if line]


def cells(lines: list[str]) -> list[list[str]]:
    return [line.split() for line in lines]


def test_a_terminal_of_60_columns_shows_a_table_of_nodes_above_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = screen(monkeypatch, STORY[:8])
    assert all(len(line) <= 60 for line in shown)
    title, first, second, rounds = cells(shown[-4:])
    assert title == ["node", "round", "sent", "L_D", "A_k"]
    assert first == ["plant-1", "1", "512", "B"]
    assert second == ["plant-2", "1", "9.0", "MB", "0.693", "0.500"]
    assert rounds[0] == "round"
    assert "1/2" in rounds


def test_a_lost_node_is_marked_in_the_table_until_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for until, mark in ((12, "gone"), (14, "-"), (16, "2")):
        row = cells(screen(monkeypatch, STORY[:until]))[-2]
        assert row[:2] == ["plant-2", mark]


def test_more_columns_than_fit_are_cut_short_but_never_the_nodes_names(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = {f"a_long_figure_{number}": float(number) for number in range(12)}
    shown = screen(monkeypatch, [*STORY[:4], Measured(node="plant-1", round=1, metrics=metrics)])
    assert all(len(line) <= 60 for line in shown)
    assert [row[0] for row in cells(shown[-3:-1])] == ["plant-1", "plant-2"]


def test_joins_losses_and_refusals_scroll_by_above_the_table_word_for_word(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(word for line in cells(screen(monkeypatch, STORY)) for word in line)
    for line in LINES:
        in_the_table = line.startswith(("round 1 closed", "round 2 closed", "round 2: plant-1"))
        assert (line in text) != in_the_table, line
