"""From the outbox to the sinks: in order, each at its own pace, again until the receiver has it."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from edge.outbox import delivery
from edge.outbox.delivery import Delivery, Pauses, stop
from edge.outbox.limits import Limits
from edge.outbox.outbox import Outbox, open_outbox
from edge.sinks.sink import Item, Refused, SinkDown
from tests.support.numbered_outcomes import verdict

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


class Receiver:
    """A sink whose receiver is in the test's hands: `rule` raises what it has against a number."""

    def __init__(self, name: str = "a", rule: Callable[[int], None] = lambda number: None) -> None:
        self.name = name
        self.rule = rule
        self.items: list[Item] = []
        self.closed = threading.Event()
        self._news = threading.Condition()

    def deliver(self, items: Sequence[Item]) -> None:
        for delivered, item in enumerate(items):
            try:
                self.rule(int(item.outcome.image))
            except (SinkDown, Refused) as error:
                error.delivered = delivered
                raise
            with self._news:
                self.items.append(item)
                self._news.notify_all()

    def close(self) -> None:
        self.closed.set()

    def numbers(self) -> list[int]:
        return [int(item.outcome.image) for item in self.items]

    def until(self, number: int) -> list[int]:
        with self._news:
            assert self._news.wait_for(lambda: number in self.numbers(), 60)
        return self.numbers()


SHORT = Pauses(first=0.01, idle=0.02)


@contextlib.contextmanager
def line(folder: Path, *receivers: Receiver, drain: float = 5.0):
    with open_outbox(folder, Limits()) as outbox:
        outbox.set_sinks([each.name for each in receivers])
        deliveries = [Delivery(outbox, each, SHORT) for each in receivers]
        try:
            yield outbox, deliveries
        finally:
            stop(deliveries, drain)


def put(outbox: Outbox, *numbers: int) -> None:
    for number in numbers:
        outbox.put(verdict(number))


def test_every_sink_gets_every_outcome_in_order_and_is_closed(tmp_path):
    receivers = [Receiver(name) for name in "abc"]
    with line(tmp_path, *receivers) as (outbox, deliveries):
        put(outbox, *range(1000))
        assert [each.until(999) for each in receivers] == [list(range(1000))] * 3
    assert [item.seq for item in receivers[0].items] == list(
        range(outbox.newest - 999, outbox.newest + 1)
    )
    assert all(each.closed.is_set() for each in receivers)
    assert [each.delivered for each in deliveries] == [1000] * 3


def test_a_receiver_that_is_away_gets_everything_once_when_it_is_back_and_is_told_once_each(
    tmp_path, caplog
):
    away = threading.Event()
    attempts = threading.Semaphore(0)

    def rule(number: int) -> None:
        if number >= 5 and away.is_set():
            attempts.release()
            raise SinkDown("nobody there")

    fine, gone = Receiver("fine"), Receiver("gone", rule)
    away.set()
    with line(tmp_path, fine, gone) as (outbox, deliveries):
        put(outbox, *range(8))
        assert [attempts.acquire(timeout=60) for _ in range(4)] == [True] * 4
        assert fine.until(7) == list(range(8))  # is not held up
        assert gone.numbers() == list(range(5))
        assert not deliveries[1].up
        assert outbox.pending("gone") == 3
        away.clear()
        gone.until(7)
        put(outbox, 8)
        assert gone.until(8) == list(range(9))
    assert caplog.text.count("gone takes no outcomes: nobody there") == 1
    assert caplog.text.count("gone takes outcomes again") == 1
    assert [item.replayed for item in gone.items if item.outcome.image in "567"] == [True] * 3
    assert not gone.items[-1].replayed


def test_an_outcome_that_is_refused_for_good_is_left_out_and_said(tmp_path, caplog):
    def rule(number: int) -> None:
        if number in (0, 3):
            raise Refused("413 too large")

    receiver = Receiver(rule=rule)
    with line(tmp_path, receiver) as (outbox, deliveries):
        put(outbox, *range(6))
        assert receiver.until(5) == [1, 2, 4, 5]
    assert caplog.text.count("a refuses the outcome") == 2
    assert (deliveries[0].delivered, deliveries[0].refused) == (4, 2)


def test_a_bug_in_a_sink_loses_nothing_and_does_not_end_it(tmp_path, caplog):
    faults = iter([ZeroDivisionError("1 / 0")])

    def rule(number: int) -> None:
        for fault in faults:
            raise fault

    receiver = Receiver(rule=rule)
    with line(tmp_path, receiver) as (outbox, _):
        put(outbox, 0, 1)
        assert receiver.until(1) == [0, 1]
    assert "ZeroDivisionError" in caplog.text


def test_a_sink_looks_after_its_receiver_also_while_there_is_nothing_to_deliver(tmp_path):
    calls = threading.Semaphore(0)

    class Idle(Receiver):
        def deliver(self, items: Sequence[Item]) -> None:
            assert not items
            calls.release()

    with line(tmp_path, Idle()):
        assert [calls.acquire(timeout=60) for _ in range(3)] == [True] * 3


def test_the_end_waits_for_what_is_left_but_not_for_a_receiver_that_is_away(tmp_path, caplog):
    def slowly(number: int) -> None:
        time.sleep(0.001)  # so that some are left at the end

    def down(number: int) -> None:
        raise SinkDown("nobody there")

    slow, gone = Receiver("slow", slowly), Receiver("gone", down)
    with line(tmp_path, slow, gone, drain=1000.0) as (outbox, _):
        put(outbox, *range(300))
    assert slow.numbers() == list(range(300))
    assert "300 outcome(s) wait for gone" in caplog.text

    back = Receiver("gone")
    with line(tmp_path, Receiver("slow"), back) as (outbox, _):
        put(outbox, 300)
        assert back.until(300) == list(range(301))
    assert [item.replayed for item in back.items] == [True] * 300 + [False]


def test_a_receiver_that_never_answers_is_left_behind_at_the_end(tmp_path, caplog):
    hanging, free = threading.Event(), threading.Event()

    def rule(number: int) -> None:
        hanging.set()
        free.wait()

    stuck, fine = Receiver("stuck", rule), Receiver("fine")
    with line(tmp_path, stuck, fine, drain=0.2) as (outbox, deliveries):
        put(outbox, 0)
        assert hanging.wait(60)
    assert fine.numbers() == [0]
    assert "1 outcome(s) wait for stuck" in caplog.text
    thread = deliveries[0]._thread
    free.set()  # too late: it will come again
    thread.join(60)
    assert "cannot be written" not in caplog.text
    assert stuck.closed.is_set()  # a line that has replaced its sinks goes on
    back = Receiver("stuck")
    with line(tmp_path, back, Receiver("fine")):
        assert back.until(0) == [0]


def test_pauses_grow_and_are_no_shorter_than_the_receiver_asks_for(tmp_path, monkeypatch):
    pauses: list[float] = []

    def rule(number: int) -> None:
        if len(pauses) < 5:
            raise SinkDown("busy", retry_after=300.0 if len(pauses) == 4 else 0)

    class Unhurried(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is not None:
                pauses.append(timeout)  # and no time passes
                return self.is_set()
            return super().wait()

    monkeypatch.setattr(
        delivery, "threading", SimpleNamespace(Event=Unhurried, Thread=threading.Thread)
    )
    receiver = Receiver(rule=rule)
    with line(tmp_path, receiver) as (outbox, _):
        put(outbox, 0)
        receiver.until(0)
    assert pauses[4] == 300.0
    assert all(0.005 * 2**n <= pause <= 0.01 * 2**n for n, pause in enumerate(pauses[:4]))


def test_an_outcome_that_cannot_be_read_is_left_out(tmp_path, caplog):
    receiver = Receiver()
    with open_outbox(tmp_path, Limits()) as outbox:
        outbox.set_sinks(["a"])
        put(outbox, 0, 1, 2)
        outbox._db.execute("UPDATE outcomes SET data = x'00' WHERE seq = ?", (outbox.newest - 1,))
        with (
            caplog.at_level(logging.ERROR),
            contextlib.closing(Delivery(outbox, receiver, SHORT)) as bringing,
        ):
            assert receiver.until(2) == [0, 2]
        bringing.join(60)
    assert "cannot be read" in caplog.text
