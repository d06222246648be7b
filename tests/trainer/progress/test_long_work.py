"""Long work stops between two steps, and tells how far it is, if somebody watches."""

import pytest

from trainer import progress
from trainer.progress import Step, Stopped, steps, watched


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_after_a_stop_no_further_step_begins() -> None:
    begun: list[int] = []
    with (
        pytest.raises(Stopped),
        watched(progress.ignore, lambda: len(begun) == 3),
    ):
        begun.extend(steps("folds", range(10)))
    assert begun == [0, 1, 2]


def test_long_loops_tell_how_far_they_are_and_short_ones_nothing() -> None:
    clock = Clock()
    told: list[progress.AnyEvent] = []
    with watched(told.append, clock=clock):
        for _ in steps("short", range(100)):
            clock.now += 0.01
        assert not told
        for _ in steps("folds", range(20)):
            for _ in steps("inner", range(100)):
                clock.now += 0.1
    assert all(isinstance(each, Step) and each.what == "folds" for each in told)
    done = [each.done for each in told if isinstance(each, Step)]
    assert done == sorted(done)
    assert len(done) >= 80
    assert {*done} == {*range(20)}
    assert {each.total for each in told if isinstance(each, Step)} == {20}


def test_without_a_watch_nothing_stops_it() -> None:
    with watched(progress.ignore, lambda: True):
        pass
    assert list(steps("folds", range(3))) == [0, 1, 2]
