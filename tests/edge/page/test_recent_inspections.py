"""What a line remembers of its inspections for those who look at it: little,
and only as long as they look.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from edge.inference.outcomes import Failure, Notice, current_time
from edge.inference.pipeline import Frame, Pipeline
from edge.inference.served_model import load_model
from edge.page.recent_inspections import NOTICES, REJECTS, RecentInspections
from tests.support.classified_images import SIZE, picture
from tests.support.manual_clock import Clock
from tests.support.running_pipeline import Kept
from tests.support.tiny_bundle import tiny_bundle

CLASSES = ("no_defect", "scratch", "dent")


class Watched:
    """A line, a clock, and what is remembered of the line."""

    def __init__(self, bundle: Path) -> None:
        self.clock, self.passed_on = Clock(), Kept()
        self.recent = RecentInspections(self.passed_on, self.clock)
        self.pipeline = Pipeline(load_model(bundle), self.recent, monitors=[self.recent.observe])

    def inspect(self, label: str, name: str = "part") -> str:
        """The id of the verdict on an image of this class."""
        found = self.pipeline.inspect_sync(
            Frame(name, picture(np.random.default_rng(0), CLASSES.index(label)))
        )
        assert not isinstance(found, Failure)
        assert found.verdict.label == label
        return found.verdict.id


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    found = Watched(tiny_bundle(tmp_path / "bundle", size=SIZE, classes=CLASSES).folder)
    with closing(found.pipeline):
        yield found


def test_before_the_first_image_there_is_nothing_to_see(watched: Watched) -> None:
    found = watched.recent.snapshot()
    assert (found["last"], found["failure"], found["latency"], found["per_minute"]) == (
        None,
        None,
        None,
        0,
    )


def test_images_defects_and_failures_are_counted_and_passed_on(watched: Watched) -> None:
    for label in ("no_defect", "dent", "no_defect"):
        watched.inspect(label)
    watched.pipeline.inspect_sync(Frame("torn", b"no image"))
    found = watched.recent.snapshot()
    assert found["counts"] == {"images": 3, "defects": 1, "doubtful": 0, "failures": 1}
    assert found["failure"].image == "torn"
    assert found["latency"]["median"] > 0
    assert len(watched.passed_on) == 4


def test_a_failure_is_over_with_the_next_image(watched: Watched) -> None:
    watched.pipeline.inspect_sync(Frame("torn", b"no image"))
    watched.inspect("dent")
    assert watched.recent.snapshot()["failure"] is None


def test_the_pace_is_that_of_the_last_minute(watched: Watched) -> None:
    for _ in range(30):
        watched.inspect("no_defect")
        watched.clock.now += 1
    assert watched.recent.snapshot()["per_minute"] == 30
    watched.clock.now += 45
    assert watched.recent.snapshot()["per_minute"] == 14
    watched.clock.now += 60
    assert watched.recent.snapshot()["per_minute"] == 0


def test_the_last_defects_stand_there_the_newest_first_each_with_what_the_network_saw(
    watched: Watched,
) -> None:
    ids = [watched.inspect("dent", f"part-{number}") for number in range(REJECTS + 3)]
    watched.inspect("no_defect")
    told = watched.recent.snapshot()["rejects"]
    assert [verdict.id for verdict in told] == ids[::-1][:REJECTS]
    for verdict in told:
        held = watched.recent.find_reject(verdict.id)
        assert held is not None
        assert held.pixels.shape == (SIZE, SIZE, 3)


def test_a_defect_that_was_told_a_moment_ago_is_still_held(watched: Watched) -> None:
    ids = [watched.inspect("dent") for _ in range(REJECTS)]
    watched.recent.snapshot()
    for _ in range(REJECTS):
        watched.inspect("scratch")
    assert watched.recent.find_reject(ids[0])
    watched.inspect("scratch")
    assert watched.recent.find_reject(ids[0]) is None


def test_an_image_that_was_looked_at_is_held_while_others_are_inspected_but_not_for_ever(
    watched: Watched,
) -> None:
    first = watched.inspect("dent")
    watched.recent.snapshot()
    for _ in range(3):
        watched.inspect("no_defect")
        watched.recent.snapshot()
    assert watched.recent.find(first)
    watched.inspect("no_defect")
    watched.recent.snapshot()
    assert watched.recent.find(first) is None


def test_nothing_whole_is_held_but_the_last_image_once_nobody_looks(watched: Watched) -> None:
    first = watched.inspect("dent")
    watched.recent.snapshot()
    watched.clock.now += 11
    watched.inspect("no_defect")
    assert watched.recent.find(first) is None


def test_of_notices_the_newest_are_kept(watched: Watched) -> None:
    for number in range(NOTICES + 2):
        watched.recent.put(Notice(kind="drift", text=str(number), time=current_time()))
    assert [notice.text for notice in watched.recent.snapshot()["notices"]] == [
        "6",
        "5",
        "4",
        "3",
        "2",
    ]
    assert len(watched.passed_on) == NOTICES + 2
