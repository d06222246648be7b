"""Events are shown as JSON for machines, as lines in a log and as a live board in a terminal."""

import io
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from tests.support.plants import draw
from tests.support.terminal import Terminal, console, text_lines
from trainer import progress
from trainer.methods import headline_metrics
from trainer.progress import (
    Activity,
    ActivityReporter,
    AnyEvent,
    CellFinished,
    Contribution,
    Exported,
    FederationFinished,
    Gathering,
    Late,
    Learning,
    Measured,
    ModelReady,
    NodeJoined,
    NodeLost,
    NodeRefused,
    Note,
    Paused,
    Received,
    Result,
    RoundClosed,
    RoundOpened,
    RoundReporter,
    Step,
)
from trainer.progress.board import Board
from trainer.progress.remaining_time import RemainingTime

# Two rounds of a federation, with every kind of event.
STORY: list[AnyEvent] = [
    Step(what="drawing images"),
    Note(text="broker: mosquitto"),
    Gathering(federation="steel", run="0123456789abcdef", nodes=2, rounds=2),
    NodeJoined(node="plant-1"),
    NodeJoined(node="plant-2"),
    RoundOpened(round=1),
    Activity(node="plant-1", round=1, what="receiving", done=100, total=512),
    Received(node="plant-1", round=1, bytes=512),
    Activity(node="plant-1", round=1, what="training"),
    Contribution(node="plant-2", round=1, weight=0.6931471805599453, bytes=9_000_000),
    Measured(node="plant-2", round=1, metrics={"L_D": 0.6931, "A_k": 0.5}),
    Contribution(node="plant-1", round=1, weight=0.25, bytes=512),
    RoundClosed(
        round=1,
        contributors=["plant-1", "plant-2"],
        seconds=32.14,
        bytes_up=9_000_512,
        bytes_down=512,
    ),
    RoundOpened(round=2),
    Measured(node="plant-1", round=1, metrics={"L_D": 0.25}),
    NodeRefused(node="mallory", round=2, reason="tensor encoder.weight is [int64], [/not] float32"),
    NodeLost(node="plant-2", round=2),
    Paused(round=2, waiting_for=["plant-2"]),
    NodeJoined(node="plant-2"),
    Contribution(node="plant-1", round=2, weight=0.5, bytes=2_500),
    Contribution(node="plant-2", round=2, weight=0.75, bytes=2_500),
    Measured(node="plant-1", round=2, metrics={"accuracy": 0.95, "A_k": -0.125}),
    RoundClosed(round=2, contributors=["plant-1", "plant-2"], seconds=60, bytes_up=5_000),
    Late(node="plant-3", round=2),
    ModelReady(node="plant-1", folder="plant-1/model", accuracy=0.9, low=0.8, high=0.95),
    FederationFinished(rounds=2, bytes_up=9_005_512, bytes_down=3_000_000_000, seconds=63.2),
    Exported(node="plant-1", folder="bundles/plant-1", bytes=245_000, difference=1.2e-7),
    CellFinished(
        done=2,
        total=9,
        cell="fedavg, NEU-CLS disjoint 10, seed 0",
        accuracy=0.912,
        seconds=31,
        left=600,
    ),
    Result(result={"model": "global.safetensors"}),
]
LINES = """
drawing images
broker: mosquitto
federation steel: waiting for 2 nodes, 2 rounds
plant-1 joined
plant-2 joined
round 1 closed after 32.1 s, 1 to go (32 s): 9.0 MB up, 512 B down, L_D 0.693, A_k 0.500
mallory is left out (round 2): tensor encoder.weight is [int64], [/not] float32
plant-2 is gone (round 2): its connection ended
round 2 waits for plant-2 to come back
plant-2 joined
round 2 closed after 60.0 s: 5.0 kB up, mean of 2 nodes: L_D 0.472, A_k 0.188, accuracy 95.0 %
round 2: plant-3 contributed too late; it is not counted
a model is ready in plant-1/model, and can be exported and served; training goes on
finished: 2 rounds in 63 s, 9.0 MB up, 3.00 GB down
wrote bundles/plant-1: 245.0 kB, differs from torch by at most 1.2e-07
2 of 9, 10 min to go: fedavg, NEU-CLS disjoint 10, seed 0: accuracy 91.2 % in 31 s
""".strip().splitlines()


class Clock:
    """Seconds that pass when they are told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def told(report: progress.Report, events: list[AnyEvent]) -> None:
    for event in events:
        report(event)


def log(events: list[AnyEvent], clock: Callable[[], float] = Clock()) -> list[str]:  # noqa: B008
    stream = io.StringIO()
    told(progress.log_lines(stream, clock), events)
    lines = stream.getvalue().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    return [line[9:] for line in lines]


def test_the_story_has_every_kind_of_event() -> None:
    assert {type(event) for event in STORY} | {Learning} == set(get_args(AnyEvent))


def test_a_line_that_learns_has_a_line_now_and_then_and_one_at_its_end() -> None:
    clock = Clock()
    stream = io.StringIO()
    show = progress.log_lines(stream, clock)
    for round_ in range(1, 31):
        clock.now += 1
        show(Learning(node="coordinator", round=round_, rounds=30, rate=1, loss=0.5))
        show(Learning(node="coordinator", round=round_, rounds=30, rate=1, loss=0.5))
    said = [line[9:] for line in stream.getvalue().splitlines()]
    assert said == [
        f"round {each} of 30: loss 0.500, 1.0 rounds per second" for each in (1, 11, 21, 30)
    ]


def test_training_alone_after_the_last_round_has_a_line_now_and_then_and_one_at_its_end() -> None:
    """It takes minutes at a slow node, in which nothing else is said."""
    clock = Clock()
    stream = io.StringIO()
    show = progress.log_lines(stream, clock)
    for done in range(31):
        clock.now += 1
        show(Activity(node="a", round=30, what="judging", done=done, total=30))
    show(Activity(node="b", round=30, what="judging"))  # which does not train alone
    said = [line[9:] for line in stream.getvalue().splitlines()]
    assert said == [f"a has trained alone for {each} of 30 rounds" for each in (9, 19, 29)] + [
        "a has trained alone for 30 of 30 rounds; judging its models on held-out images"
    ]


# For machines


@pytest.mark.parametrize("event", STORY, ids=lambda event: type(event).__name__)
def test_an_event_survives_its_json_line_and_can_be_said(event: AnyEvent) -> None:
    stream = io.StringIO()
    progress.json_lines(stream)(event)
    (line,) = stream.getvalue().splitlines()
    assert progress.parse_event(line) == progress.parse_event(line.encode()) == event
    assert progress.format_event(event)


def test_every_event_is_flushed_when_it_happens() -> None:
    stream = io.TextIOWrapper(raw := io.BytesIO(), write_through=False)
    joined = NodeJoined(node="plant-1")
    progress.json_lines(stream)(joined)
    assert raw.getvalue() == b'{"event":"NodeJoined","node":"plant-1"}\n'
    progress.log_lines(stream)(joined)
    assert raw.getvalue().endswith(b" plant-1 joined\n")


def test_json_goes_to_standard_output_and_a_log_to_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress.reporter(as_json=True) as report:
        told(report, STORY)
    out, err = capsys.readouterr()
    assert [progress.parse_event(line) for line in out.splitlines()] == STORY
    assert err == ""
    with progress.reporter(as_json=False) as report:
        told(report, STORY)
    out, err = capsys.readouterr()
    assert [line[9:] for line in err.splitlines()] == LINES
    assert out == ""


def test_quiet_shows_nothing_and_as_json_the_result_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress.reporter(as_json=False, quiet=True) as report:
        told(report, STORY)
    assert capsys.readouterr() == ("", "")
    with progress.reporter(as_json=True, quiet=True) as report:
        told(report, STORY)
    assert capsys.readouterr() == (
        '{"event":"Result","result":{"model":"global.safetensors"}}\n',
        "",
    )


# In a log


def test_a_log_has_a_line_a_round_with_what_is_known_and_one_for_each_other_event() -> None:
    assert log(STORY) == LINES


def test_a_round_of_which_nothing_is_known_is_closed_without_a_list() -> None:
    assert log([RoundOpened(round=1), RoundClosed(round=1, contributors=["a"], seconds=0.5)]) == [
        "round 1 closed after 0.5 s"
    ]


def test_a_round_for_statistics_is_said_to_be_one() -> None:
    """Also after rounds whose metrics are known, which are not its own.

    A node knows of its own sums alone.
    """
    measured = Measured(node="a", round=1, metrics={"L_C": 0.5})
    closed = RoundClosed(round=2, contributors=["a", "b"], seconds=0.5, sums=True)
    assert log([measured, closed]) == ["round 2 closed after 0.5 s: sums of 2 nodes, no training"]
    alone = RoundClosed(round=2, contributors=["a"], seconds=0.5, sums=True)
    assert log([alone]) == ["round 2 closed after 0.5 s: sums, no training"]


def test_nodes_that_tell_no_metrics_are_known_by_the_range_of_their_weights() -> None:
    offered = [
        Contribution(node=node, round=1, weight=weight, bytes=1)
        for node, weight in (("a", 0.25), ("b", 0.75))
    ]
    closed = RoundClosed(round=1, contributors=["a", "b"], seconds=0.5)
    assert log([*offered, closed]) == ["round 1 closed after 0.5 s: weights 0.250 to 0.750"]


def rounds(count: int) -> list[AnyEvent]:
    return [
        RoundClosed(round=number, contributors=["a"], seconds=0.1) for number in range(1, count + 1)
    ]


def test_of_many_rounds_some_have_a_line_the_first_and_the_last_among_them() -> None:
    lines = log([Gathering(federation="f", run="0" * 16, nodes=1, rounds=1000), *rounds(1000)])
    assert 40 < len(lines) < 60
    assert lines[1].startswith("round 1 ")
    assert lines[-1].startswith("round 1000 ")


def test_slow_rounds_have_a_line_each_however_many_they_are() -> None:
    clock, stream = Clock(), io.StringIO()
    report = progress.log_lines(stream, clock)
    report(Gathering(federation="f", run="0" * 16, nodes=1, rounds=1000))
    for event in rounds(30):
        clock.now += 61
        report(event)
    assert len(stream.getvalue().splitlines()) == 31


def test_a_hundred_nodes_join_in_a_few_lines() -> None:
    joined = [NodeJoined(node=f"plant-{number}") for number in range(100)]
    lines = log([Gathering(federation="f", run="0" * 16, nodes=100, rounds=1), *joined])
    assert len(lines) == 11
    assert lines[-1] == "100 of 100 nodes have joined"


def test_a_pause_without_names_waits_for_more_nodes_and_one_with_many_names_a_few() -> None:
    assert (
        progress.format_event(Paused(round=3, waiting_for=[]))
        == "round 3 waits for more nodes to come back"
    )
    many = Paused(round=3, waiting_for=list("abcdefgh"))
    assert progress.format_event(many) == "round 3 waits for a, b, c, d, e and 3 more to come back"


# Time, bytes and activities


def test_the_time_left_counts_down_and_one_long_round_does_not_make_it_jump() -> None:
    clock = Clock()
    remaining = RemainingTime(10, clock)
    remaining.close_round(1, 20)
    # the first round loads and warms up: of a short one nothing follows
    assert remaining.seconds is None
    for number in (2, 3, 4):
        remaining.close_round(number, 5)
    assert remaining.seconds == 30
    clock.now += 3
    assert remaining.seconds == 27
    clock.now += 100  # a round takes long: the others will not
    assert remaining.seconds == 25
    remaining.close_round(5, 103)
    assert remaining.seconds == 25
    remaining.close_round(10, 5)
    assert remaining.seconds is None


def test_of_long_rounds_the_first_already_tells_something() -> None:
    remaining = RemainingTime(3, Clock())
    remaining.close_round(1, 600)
    assert remaining.seconds == 1200


def test_whose_contribution_is_limited_is_in_the_event_and_told_once() -> None:
    """A node of which most counts is as most are:
    under AFedCL all weights differ by a few per cent.
    """
    events: list[AnyEvent] = []
    reporter = RoundReporter(events.append, lambda: (0, 0))
    limited = {"a": {"weight": 0.25, "update": 1.0}, "b": {"weight": 0.98, "update": 0.9}}
    for round_ in (1, 2):
        reporter.open(round_)
        reporter.close(["a", "b", "c"], limited=limited)
    assert [event.limited for event in events if isinstance(event, RoundClosed)] == [
        limited,
        limited,
    ]
    assert [event.text for event in events if isinstance(event, Note)] == [
        (
            "round 1: 25% of the weight of a counts, and 100% of its update: both are limited to "
            "the median of all nodes"
        )
    ]


def test_the_bytes_of_all_rounds_add_up_to_what_has_travelled() -> None:
    moved = {"up": 0, "down": 10}
    events: list[AnyEvent] = []
    reporter = RoundReporter(events.append, lambda: (moved["up"], moved["down"]))
    reporter.close([])  # none is open
    for number in (1, 2):
        reporter.open(number)
        moved["up"] += 5
        reporter.close(["a"])
        moved["down"] += 1
    closed = [event for event in events if isinstance(event, RoundClosed)]
    assert [(event.round, event.bytes_up, event.bytes_down) for event in closed] == [
        (1, 5, 10),
        (2, 5, 1),
    ]


def test_an_activity_is_told_when_it_changes_and_travelling_bytes_once_a_second() -> None:
    clock, events = Clock(), []
    reporter = ActivityReporter(events.append, clock)
    for seconds in range(30):  # three seconds
        clock.now = seconds / 10
        reporter.report(Activity(node="a", round=1, what="receiving", done=seconds, total=30))
        reporter.report(Activity(node="b", round=1, what="training"))
    reporter.report(Activity(node="a", round=1, what="training"))
    assert [event.done for event in events if event.node == "a"] == [0, 10, 20, 0]
    assert len([event for event in events if event.node == "b"]) == 1
    reporter.reset("b")
    reporter.report(Activity(node="b", round=1, what="training"))
    assert events[-1].node == "b"


# On a board


def board(
    events: list[AnyEvent],
    width: int,
    height: int = 24,
    clock: Callable[[], float] = Clock(),  # noqa: B008
) -> list[str]:
    shown = Board(headline_metrics(), clock=clock)
    for event in events:
        shown.update(event)
    return drawn(shown, width, height)


def drawn(shown: Board, width: int, height: int = 24) -> list[str]:
    lines = text_lines(shown.render(console(width, height)), width, height)
    assert all(len(line) <= width for line in lines)
    return lines


METRICS = {"L_C": 0.5, "L_D": 0.693, "L_F": 0.25, "A_k": 0.5, "accuracy": 0.75}
BUSY: list[AnyEvent] = [
    *STORY[2:6],
    Activity(node="plant-1", round=1, what="receiving", done=256, total=512),
    Received(node="plant-2", round=1, bytes=512),
    Contribution(node="plant-2", round=1, weight=0.5, bytes=9_000_000),
    Activity(node="plant-2", round=1, what="waiting"),
    Measured(node="plant-2", round=1, metrics=METRICS),
    RoundClosed(round=1, contributors=["plant-2"], seconds=40, bytes_up=9_000_000, bytes_down=512),
]


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (40, "node round state accuracy"),
        (60, "node round state accuracy up down"),
        (80, "node round state L_C L_D A_k accuracy up down"),
        (120, "node round state L_C L_D L_F A_k accuracy up down"),
    ],
)
def test_the_width_of_the_terminal_decides_which_columns_there_are(
    width: int, columns: str
) -> None:
    title, first, second, _ = board(BUSY, width)
    assert title.split() == columns.split()
    assert first.split()[:4] == ["plant-1", "1", "receiving", "50%"]
    assert second.startswith("plant-2")


@pytest.mark.parametrize("width", [20, 30, 40, 60, 80, 120])
def test_the_time_left_has_room_in_any_terminal(width: int) -> None:
    status = board(BUSY, width)[-1]
    assert "round 2 of 2" in status
    assert ("40 s left" in status) == (width > 20)
    assert ("9.0 MB up" in status) == (width > 80)


def test_a_long_name_keeps_both_ends() -> None:
    name = f"plant-{'x' * 48}-line-3"
    row = board([Activity(node=name, round=1, what="training")], 40)[1]
    assert re.fullmatch(r"plant-x+…x*-line-3 +1  training", row)


def test_nodes_are_in_natural_order_and_those_beyond_the_screen_are_counted() -> None:
    many: list[AnyEvent] = [
        Activity(node=f"plant-{number}", round=1, what="training") for number in range(1, 41)
    ]
    many += [Activity(node="plant-40", round=1, what="sending"), NodeLost(node="plant-39", round=1)]
    lines = board(many, 80, 24)
    assert [line.split()[0] for line in lines[1:4]] == ["plant-1", "plant-2", "plant-3"]
    assert lines[-1] == "and 25 more: 23 training, 1 gone, 1 sending"
    assert len(lines) == 17


def test_a_lost_node_is_marked_until_it_is_back() -> None:
    for until, mark in ((17, "gone"), (19, "waiting")):
        assert mark in board(STORY[:until], 80)[-2]


def test_work_that_is_no_round_turns_and_says_for_how_long() -> None:
    clock = Clock()
    shown = Board(clock=clock)
    shown.update(Step(what="tracing"))
    clock.now += 75
    assert re.fullmatch("[⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏] tracing 1:15", drawn(shown, 40)[-1])
    assert shown.update(Note(text="done")) == ["tracing (1:15)", "done"]
    assert drawn(shown, 40) == []


def test_a_grid_shows_how_many_cells_are_done_and_counts_down() -> None:
    clock = Clock()
    shown = Board(clock=clock)
    event = CellFinished(done=2, total=9, cell="fedavg, seed 0", accuracy=0.9, seconds=31, left=600)
    assert shown.update(event) == ["2 of 9, 10 min to go: fedavg, seed 0: accuracy 90.0 % in 31 s"]
    clock.now += 120
    (line,) = drawn(shown, 60)
    assert re.fullmatch("2 of 9 done ━+[╸ ]+ 8 min left", line)
    shown.update(
        CellFinished(done=9, total=9, cell="fedavg, seed 1", accuracy=0.9, seconds=31, left=0.0)
    )
    assert drawn(shown, 20)[0].startswith("9 of 9 done")


def test_a_finished_federation_keeps_its_table() -> None:
    lines = board(STORY, 80)
    assert lines[0].split()[0] == "node"
    assert lines[-1] == "finished: 2 rounds in 63 s, 9.0 MB up, 3.00 GB down"


def test_a_run_that_follows_another_is_not_shown_as_finished() -> None:
    following = Gathering(federation="steel", run="f" * 16, nodes=2, rounds=1)
    assert not any("finished:" in line for line in board([*STORY, following], 80))


# In a real terminal


SIMULATE = (
    "--method",
    "afedcl",
    "--model",
    "small",
    "--size",
    32,
    "--nodes",
    3,
    "--samples",
    6,
    "--rounds",
)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("data") / "images", 24, 0)


@pytest.mark.slow
def test_a_terminal_shows_the_board_and_follows_its_width(images: Path) -> None:
    terminal = Terminal(80, "simulate", "--data", images, *SIMULATE, 2000)
    shown = terminal.read_until_round(6)
    assert terminal.screen.cursor.hidden
    assert "L_C    L_D    L_F" in terminal.text
    terminal.resize(40)
    terminal.read_until_round(shown + 5)
    assert re.findall("^node .*", terminal.text, re.MULTILINE) == [
        "node     round  state           accuracy"
    ]
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.read_to_end() == 130
    assert not terminal.screen.cursor.hidden


@pytest.mark.slow
def test_a_terminal_without_color_gets_none_and_a_dumb_one_plain_lines(images: Path) -> None:
    terminal = Terminal(80, "simulate", "--data", images, *SIMULATE, 2, NO_COLOR="1")
    assert terminal.read_to_end() == 0
    assert b"\x1b[?25l" in terminal.sent
    assert not re.search(rb"\x1b\[[0-9;]*3[0-9]", terminal.sent)
    terminal = Terminal(80, "simulate", "--data", images, *SIMULATE, 2, TERM="dumb")
    assert terminal.read_to_end() == 0
    assert b"\x1b" not in terminal.sent
    assert b"round 2 closed" in terminal.sent


@pytest.mark.slow
def test_quiet_leaves_the_result_alone_on_the_screen(images: Path) -> None:
    terminal = Terminal(80, "simulate", "--data", images, *SIMULATE, 2, "--quiet")
    assert terminal.read_to_end() == 0
    assert b"\x1b[?25l" not in terminal.sent
    assert "accuracy %" in terminal.text
