"""What a federation's server reports is on its disk with the time,
and nothing of a disk's troubles reaches it.
"""

from pathlib import Path

from trainer.progress import Activity, AnyEvent, Learning, NodeJoined, Note, Step, event_log

JOINED, NOTE = NodeJoined(node="plant-a"), Note(text="“ünïcode”\nin two lines")


def log(folder: Path, *events: AnyEvent) -> list[AnyEvent]:
    """Log events; what was passed on."""
    passed: list[AnyEvent] = []
    with event_log.logging(folder, passed.append) as report:
        for event in events:
            report(event)
    return passed


def events(folder: Path) -> list[AnyEvent]:
    return [each.event for each in event_log.read(folder)[0]]


def test_events_are_passed_on_and_logged_in_order_with_their_times(tmp_path: Path) -> None:
    assert log(tmp_path, JOINED, NOTE) == [JOINED, NOTE]
    assert events(tmp_path) == [JOINED, NOTE]
    first, second = event_log.read(tmp_path)[0]
    assert 1.7e9 < first.time <= second.time


def test_a_later_process_goes_on_with_the_log(tmp_path: Path) -> None:
    log(tmp_path, JOINED)
    log(tmp_path, NOTE)
    assert events(tmp_path) == [JOINED, NOTE]


def test_what_has_no_place_in_a_history_is_passed_on_only(tmp_path: Path) -> None:
    passing = [Step(what="loading"), Learning(node="head", round=3, rate=1.0)]
    assert log(tmp_path, *passing) == passing
    assert events(tmp_path) == []


def test_a_transfer_is_logged_once_however_often_it_is_told(tmp_path: Path) -> None:
    sending = [
        Activity(node="a", round=1, what="sending", done=done, total=9) for done in (0, 4, 9)
    ]
    other = Activity(node="b", round=1, what="sending", total=9)
    log(tmp_path, *sending, other, Activity(node="a", round=2, what="sending", total=9))
    assert events(tmp_path) == [
        sending[0],
        other,
        Activity(node="a", round=2, what="sending", total=9),
    ]


def test_it_is_read_on_from_where_it_was_read_to_and_a_line_only_when_it_is_whole(
    tmp_path: Path,
) -> None:
    log(tmp_path, JOINED)
    found, end = event_log.read(tmp_path)
    log(tmp_path, NOTE)
    whole = (tmp_path / event_log.FILE).read_bytes()
    (tmp_path / event_log.FILE).write_bytes(whole[:-5])
    assert event_log.read(tmp_path, end) == ([], end)
    (tmp_path / event_log.FILE).write_bytes(whole)
    found, last = event_log.read(tmp_path, end)
    assert ([each.event for each in found], last) == ([NOTE], len(whole))


def test_a_damaged_line_is_left_out(tmp_path: Path) -> None:
    log(tmp_path, JOINED)
    with (tmp_path / event_log.FILE).open("ab") as file:
        file.write(b'{"time": 1, "event": {"event": "Unkno\xff\n\n[]\n')
    log(tmp_path, NOTE)
    assert events(tmp_path) == [JOINED, NOTE]


def test_where_it_cannot_be_written_events_are_passed_on_all_the_same(tmp_path: Path) -> None:
    (tmp_path / event_log.FILE).mkdir()
    assert log(tmp_path, JOINED) == [JOINED]
    assert event_log.read(tmp_path / "nowhere") == ([], 0)
