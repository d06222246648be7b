"""A message's entry is found by the message as it was printed, or by a part; what is unknown is called so."""

import re
import time

import pytest

from edge.terminal.explanations import find_entries, read_entries
from tests.support.plants import here


def fill(template: str) -> str:
    """The template with something in its braces."""
    return re.sub(r"\{[^}]*\}", lambda brace: f"'{brace.start()} of plant-a'", template)


def test_every_message_is_found_by_its_words_with_anything_in_its_braces() -> None:
    missed = []
    for entry in read_entries():
        found = find_entries(f"12:30:01 edge-node: {fill(entry.template)}\n  What to do: something")
        if not found.fits or entry not in found.entries:
            missed.append((entry.template, [each.template for each in found.entries]))
    assert missed == []


@pytest.mark.parametrize(
    ("said", "template"),
    [
        ("edge-node: nothing listens at 10.0.0.7:8883: connection refused", "nothing listens at {place}: connection"),
        ("edge-node: cannot write to\n/var/x: No space left on device", "cannot write to {folder}: {reason}"),
        ("'Kratzer' is none of the federation's classes, which are dent, stain", "{names} {none} of the federation"),
        ("3 IMAGE(S) are the same in two classes:\n  a.png = b.png", "{count} image(s) are the same in two classes"),
    ],
)
def test_a_message_is_known_however_it_is_copied(said: str, template: str) -> None:
    found = find_entries(said)
    assert found.fits
    assert [each.template.startswith(template) for each in found.entries] == [True]


@pytest.mark.parametrize("said", ["connection refused", "nothing listens there: connection was refused"])
def test_a_part_or_a_misspelt_message_leads_to_the_most_alike(said: str) -> None:
    found = find_entries(said)
    assert not found.fits
    assert found.entries[0].template == "nothing listens at {place}: connection refused"


def test_a_long_text_is_answered_soon() -> None:
    started = time.process_time()
    find_entries("cannot write " * 10_000)
    assert time.process_time() - started < 5


def test_the_command_prints_the_entry_and_where_it_stands() -> None:
    done = here("explain", "nothing", "listens", "at", "10.0.0.7:8883:", "connection", "refused")
    assert done.returncode == 0
    assert "(Reaching the broker)" in done.stdout
    assert "edge-node broker" in done.stdout
    assert "most alike" not in done.stdout


def test_the_command_says_when_it_only_knows_something_alike_and_when_nothing() -> None:
    alike = here("explain", "connection refused")
    assert (alike.returncode, "most alike" in alike.stdout) == (1, True)
    unknown = here("explain", "pink elephants")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "no message of edge-node is like 'pink elephants'" in unknown.stderr
