"""Numbers, durations and names as people read them."""

import re
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from edge.terminal.formatting import (
    format_bytes,
    format_elapsed,
    format_expiry,
    format_metrics,
    format_names,
    format_remaining,
    natural_key,
    plain_cell,
    pluralize,
    read_cell,
    shorten,
)


def test_durations_are_said_as_finely_as_they_can_be_known() -> None:
    assert [format_elapsed(each) for each in (26.9, 250, 3723)] == ["0:26", "4:10", "1:02:03"]
    assert [format_remaining(each) for each in (26.4, 60, 254, 1500, 3600, 4200)] == [
        "26 s",
        "1 min",
        "4 min 10 s",
        "25 min",
        "1 h",
        "1 h 10 min",
    ]


def test_bytes_have_the_unit_that_fits() -> None:
    assert [format_bytes(each) for each in (512, 2500, 9e6, 3e9)] == [
        "512 B",
        "2.5 kB",
        "9.0 MB",
        "3.00 GB",
    ]


def test_counts_metrics_and_names_read_as_in_a_sentence() -> None:
    assert (pluralize(1, "node"), pluralize(0, "node")) == ("1 node", "0 nodes")
    assert format_metrics({"loss": 0.25, "accuracy": 0.5}) == "loss 0.250, accuracy 50.0 %"
    assert format_names("abcde") == "a, b, c, d, e"
    assert format_names("abcdefg") == "a, b, c, d, e and 2 more"


def test_what_has_expired_is_told_from_what_expires() -> None:
    now = datetime(2026, 3, 1, tzinfo=UTC)
    assert format_expiry(now - timedelta(days=1), now) == "expired on 2026-02-28"
    assert format_expiry(now + timedelta(days=1), now) == "expires on 2026-03-02, in 1 day"


def test_a_shortened_name_keeps_both_ends_and_has_the_length_asked_for() -> None:
    assert shorten("plant-1", 7) == "plant-1"
    assert [shorten("plant-line-10", length) for length in (12, 7)] == ["plant-…ne-10", "pla…-10"]
    assert shorten("plant-line-10", 7, ascii_only=True) == "pla~-10"


def test_numbers_in_names_are_sorted_as_numbers_and_no_digit_of_another_script_breaks_it() -> None:
    assert sorted(["plant-10", "plant-2", "m²", "plant", "m2"], key=natural_key) == [
        "m2",
        "m²",
        "plant",
        "plant-2",
        "plant-10",
    ]


def test_no_cell_is_a_formula_to_a_spreadsheet_and_its_text_can_be_had_back() -> None:
    hostile = ["=HYPERLINK(0)", "+1", "-1.png", "@SUM(A1)", "\t=1"]
    hostile += [" =1", "\u00a0=1", "\ufeff=1", "\u200b +1", "\uff1d1", " \uff201", "' =1"]
    assert [plain_cell(each)[0] for each in hostile] == ["'"] * len(hostile)
    for text in [*hostile, "'=1", "''=1", "part-7.png", "", "'quoted'"]:
        assert read_cell(plain_cell(text)) == text
    assert plain_cell("part-7.png") == "part-7.png"


@given(st.text("a=+-@'\"; ,\t\r\n\u00a0\ufeff\uff1d", max_size=8))
def test_no_part_of_a_cell_becomes_one_that_is_a_formula_where_other_separators_count(
    text: str,
) -> None:
    """A spreadsheet in German splits rows at semicolons, and LibreOffice at tabs too; quotes that
    begin in the middle of a cell hold nothing together.
    """
    shown = plain_cell(text)
    for part in re.split("[;\t\r\n]", shown):
        assert part.strip("\u00a0\ufeff ")[:1] not in set("=+-@\uff1d")
    assert read_cell(shown) == text
