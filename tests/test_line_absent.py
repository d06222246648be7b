"""A line that need not wait (`absent`: last, impute): a sensor dies, the line goes on, and takes it back."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.line_witness import Witness
from tests.mosquitto import Mosquitto
from tests.streams import Plant, Processes
from trainer.vertical.live.journal import ClosedRound, history

HEAD, SENSORS = "coordinator", ("press", "oven")
WINDOW, CHUNK, COMMIT = 32, 2, 3
ENOUGH = 2 * COMMIT  # rounds
PATIENCE = 60.0  # seconds for rounds


class Line:
    """A line of real processes, whose products never end."""

    def __init__(self, folder: Path, url: str, absent: str):
        self._plant = Plant(folder / "plant", SENSORS)
        settings = {
            "--start": WINDOW, "--window": WINDOW, "--chunk": CHUNK, "--iterations": 1, "--commit": COMMIT,
            "--policy": "all", "--absent": absent, "--patience": 1,
        }  # fmt: skip
        self._processes = Processes(folder, self._plant, url, settings)
        self.parties = {name: Witness(folder, name) for name in (HEAD, *SENSORS)}
        for name in self.parties:
            self.start(name)

    def start(self, name: str) -> None:
        """Start it, for the first time or again."""
        self.parties[name].start(self._processes.words(name))

    def until(self, what: Callable[[ClosedRound], bool]) -> int:
        """Run on until ENOUGH rounds after the present one are as they should be; return the last one."""
        after, deadline = self.parties[HEAD].last, time.monotonic() + PATIENCE
        while True:
            learnt = self.parties[HEAD].last
            self._plant.feed(max(0, WINDOW + CHUNK * (learnt + 50) - self._plant.products))
            closed = [each for each in self.closed() if each.round > after and what(each)]
            if len(closed) >= ENOUGH:
                return closed[-1].round
            assert time.monotonic() < deadline, (after, learnt, self.said())
            assert not any(each.ended is not None and each.ended >= 0 for each in self.parties.values()), self.said()
            time.sleep(0.05)

    def closed(self) -> list[ClosedRound]:
        """What the head has written down."""
        return history(self._processes.state(HEAD)) if self.parties[HEAD].last else []

    def said(self) -> str:
        """The end of each log."""
        return "\n".join(each.log.read_text()[-1000:] for each in self.parties.values() if each.log.exists())

    def end(self) -> None:
        """Kill all."""
        for each in self.parties.values():
            each.kill()
        self._plant.close()


@pytest.fixture(params=["last", "impute"])
def line(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Line]:
    broker = Mosquitto(tmp_path / "broker", persistence=False)
    broker.start()
    running = Line(tmp_path, broker.url, request.param)
    yield running
    running.end()
    broker.kill()


def whole(round_: ClosedRound) -> bool:
    return all(round_.iterations)


def test_a_line_goes_on_while_a_sensor_is_dead_and_takes_it_back_and_so_it_does_after_the_heads_death(
    line: Line,
) -> None:
    line.until(whole)
    line.parties["oven"].kill()
    last = line.until(lambda each: each.iterations == (1, 0))
    line.start("oven")
    assert line.until(whole) > last
    learnt = line.parties["press"].rounds
    line.parties[HEAD].kill()
    line.start(HEAD)
    line.until(whole)
    rounds = [each.round for each in line.closed()]
    assert rounds == list(range(1, len(rounds) + 1))
    assert len(learnt) == len(set(learnt)), "nobody went back while the head was alive"
