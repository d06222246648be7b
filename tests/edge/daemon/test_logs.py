"""The line's log: for people, for machines, for journald; in files that rotate; without floods."""

import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from broker_config.protocol.errors import UsageError
from edge.daemon.logs import Log, Settings, goes_to_journal
from tests.support.manual_clock import Clock

log = logging.getLogger("edge.test")


@pytest.fixture(autouse=True)
def root() -> Iterator[None]:
    """The tests' own handlers stay out of it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def written(path: Path, **settings: object) -> Log:
    return Log(Settings(path=str(path), **settings))  # type: ignore[arg-type]


def test_a_line_for_people_has_time_level_message_and_fields_and_is_one_line(
    tmp_path: Path,
) -> None:
    with closing(written(tmp_path / "log")):
        log.warning("image %s\nis odd\x1b[2J", "a.png", extra={"source": "folder"})
    [line] = (tmp_path / "log").read_text().splitlines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00 warning: image a\.png is odd\ufffd\[2J "
        r"\(source=folder\)",
        line,
    )


def test_what_a_library_adds_to_every_record_is_not_a_field(tmp_path: Path) -> None:
    """As ray does, from its import on, for whole processes."""
    plain = logging.getLogRecordFactory()

    def marked(*args: object, **kwargs: object) -> logging.LogRecord:
        record: logging.LogRecord = plain(*args, **kwargs)
        record.__dict__["_ray_timestamp_ns"] = 1
        return record

    logging.setLogRecordFactory(marked)
    try:
        for form in ("text", "json"):
            with closing(written(tmp_path / form, format=form)):
                log.warning("odd", extra={"source": "folder"})
            assert "source" in (told := (tmp_path / form).read_text())
            assert "ray" not in told
    finally:
        logging.setLogRecordFactory(plain)


def test_a_line_for_machines_is_an_object_with_fields_and_traceback(tmp_path: Path) -> None:
    with closing(written(tmp_path / "log", format="json")):
        try:
            raise KeyError("nothing")
        except KeyError:
            log.exception("it failed", extra={"image": "a.png", "count": 3, "where": tmp_path})
    [line] = (tmp_path / "log").read_text().splitlines()
    found = json.loads(line)
    assert (found["level"], found["logger"], found["message"]) == (
        "error",
        "edge.test",
        "it failed",
    )
    assert (found["image"], found["count"], found["where"]) == ("a.png", 3, str(tmp_path))
    assert found["time"].endswith("+00:00")
    assert "KeyError: 'nothing'" in found["traceback"]


def test_only_what_is_grave_enough_is_written(tmp_path: Path) -> None:
    for level, expected in (("debug", 4), ("info", 3), ("warning", 2), ("error", 1)):
        path = tmp_path / level
        with closing(written(path, level=level)):
            for each in (log.debug, log.info, log.warning, log.error):
                each("something")
        assert len(path.read_text().splitlines()) == expected


JOURNAL = """
import logging, sys
from edge.daemon.logs import Log, Settings
Log(Settings(format=sys.argv[1], level="debug"))
for level in (10, 20, 30, 40, 50):
    logging.getLogger("a").log(level, "said")
try: 1 / 0
except ZeroDivisionError: logging.getLogger("a").exception("fell")
"""


@pytest.mark.parametrize("format_", ["text", "json"])
def test_journald_gets_a_priority_on_each_line_and_no_time_that_it_has_itself(
    tmp_path: Path, format_: str
) -> None:
    with (tmp_path / "err").open("wb") as err:
        found = os.fstat(err.fileno())
        environment = {**os.environ, "JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        subprocess.run(
            [sys.executable, "-c", JOURNAL, format_], stderr=err, env=environment, check=True
        )
    said = (tmp_path / "err").read_text().splitlines()
    assert [line[:3] for line in said[:5]] == ["<7>", "<6>", "<4>", "<3>", "<2>"]
    assert {line[:3] for line in said[5:]} == {"<3>"}
    assert (
        said[0][3:] == "said" if format_ == "text" else json.loads(said[0][3:])["message"] == "said"
    )


def test_a_stream_that_journald_does_not_read_is_none_of_its() -> None:
    with (Path(os.devnull)).open("w") as stream:
        assert not goes_to_journal({}, stream)
        assert not goes_to_journal({"JOURNAL_STREAM": "1:2"}, stream)
    assert not goes_to_journal({"JOURNAL_STREAM": "1:2"}, io.StringIO())


def test_a_file_is_put_aside_when_it_is_full_and_the_oldest_is_removed(tmp_path: Path) -> None:
    with closing(written(tmp_path / "log", megabytes=0.001, backups=2)):
        for number in range(60):
            text = f"line {number:03} of some fifty characters, or a few more"
            log.handle(
                log.makeRecord(
                    log.name, logging.ERROR, "each from another place", number, text, (), None
                )
            )
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["log", "log.1", "log.2"]
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    assert "line 059" in (tmp_path / "log").read_text()


def test_a_file_that_something_else_put_aside_is_opened_anew_when_the_settings_are_read_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    with closing(written(path)) as found:
        log.error("before")
        path.rename(tmp_path / "log.old")
        found.apply(Settings(path=str(path)))
        log.error("after")
    assert "before" in (tmp_path / "log.old").read_text()
    assert "after" in path.read_text()


def test_a_log_that_cannot_be_written_is_refused_and_the_one_before_goes_on(tmp_path: Path) -> None:
    with closing(written(tmp_path / "log")) as found:
        with pytest.raises(UsageError, match="cannot write the log to "):
            found.apply(Settings(path=str(tmp_path / "none" / "log")))
        log.error("still here")
    assert "still here" in (tmp_path / "log").read_text()


def test_on_a_full_disk_the_log_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with closing(written(Path("/dev/full"), megabytes=0)):
        log.error("nowhere to go")
    assert "nowhere to go" in capsys.readouterr().err


def test_what_repeats_is_shown_ten_times_a_minute_then_counted(tmp_path: Path) -> None:
    clock = Clock()
    with closing(Log(Settings(path=str(tmp_path / "log"), format="json"), clock)):
        for number in range(1000):
            log.error("image %s failed", number)
            if number % 100 == 0:
                log.warning("something else")
        clock.now = 60.0
        log.error("at last")
    found = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    shown = [each["message"] for each in found]
    assert [text for text in shown if text.startswith("image")] == [
        *(f"image {number} failed" for number in range(10)),
        "image 999 failed",
    ]
    assert [each["repeated"] for each in found if "repeated" in each] == [990]
    assert shown.count("something else") == 10
    assert shown[-1] == "at last"


def test_what_was_counted_is_told_at_the_end(tmp_path: Path) -> None:
    with closing(written(tmp_path / "log")):
        for number in range(25):
            log.error("image %s failed", number)
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert last.endswith("image 24 failed (repeated=15)")
