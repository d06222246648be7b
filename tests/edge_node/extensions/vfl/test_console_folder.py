"""A head's state folder as the console reads it: latency, iterations and errors by round;
of very many, a part.
"""

from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace
from playwright.sync_api import expect

from broker_config.protocol.messages import Validation
from edge_node.extensions.vfl.console_folder import VflFolder
from edge_node.extensions.vfl.messages import VflSpec
from edge_node.extensions.vfl.server.journal import ClosedRound, Journal
from tests.support import vfl_runs
from tests.support.browser import browse
from tests.support.console_process import is_served, url_in
from tests.support.mosquitto import Mosquitto
from tests.support.plants import start, wait_for
from tests.support.vfl_runs import vfl_spec
from tests.support.waiting import wait_until
from trainer.progress import Gathering, NodeJoined, event_log


def closed(round_: int, absent: str = "", rmse: float | None = None) -> ClosedRound:
    """A round of two sensors, 50 ms."""
    there = [name for name in ("press", "oven") if name != absent]
    return ClosedRound(
        round=round_,
        attempt=1,
        first=0,
        last=20,
        iterations=tuple(2 * (name in there) for name in ("press", "oven")),
        loss=1 / round_,
        rmse=rmse,
        seconds=0.05,
        collection=dict.fromkeys(there, 0.01),
        communication=dict.fromkeys(there, 0.02),
        iteration=dict.fromkeys(there, 0.004),
    )


def record(folder: Path, *rounds: ClosedRound, spec: VflSpec | None = None) -> VflSpec:
    spec = spec or vfl_spec()
    with closing(Journal(folder)) as journal:
        if journal.newest() != spec:
            journal.begin(spec)
            journal.attempt(spec.run)
        journal.close_rounds(spec.run, rounds)
    return spec


def read(folder: Path) -> VflFolder:
    found = VflFolder(folder)
    found.refresh()
    return found


def test_a_round_has_its_sensors_latency_and_iterations_and_its_loss(tmp_path: Path) -> None:
    spec = record(tmp_path, closed(1), closed(2, absent="oven", rmse=3.5))
    run = read(tmp_path).runs[spec.run]
    first, second = run.since(0)["rows"]
    assert run.since(0)["nodes"] == ["press", "oven"]
    assert first.values == {"iterations": [2, 2], "latency": [pytest.approx(0.038)] * 2}
    assert first.whole == {"loss": 1.0, "seconds": 0.05}
    assert second.values == {"iterations": [2, 0], "latency": [pytest.approx(0.038)]}
    assert second.whole["rmse"] == 3.5
    assert second.opened == pytest.approx(first.opened + 0.05)
    assert (run.stage, run.newest) == ("open", 2)


def test_a_round_has_how_well_new_products_are_judged_beside_what_needs_no_model(
    tmp_path: Path,
) -> None:
    judged = [
        Validation(products=4, accuracy=0.75, recall=0.5, baseline=0.5),
        Validation(products=4, rmse=2.0, baseline=8.0),
    ]
    spec = record(
        tmp_path,
        *(replace(closed(number), validation=each) for number, each in enumerate(judged, 1)),
    )
    first, second = read(tmp_path).runs[spec.run].since(0)["rows"]
    assert (first.whole["new_accuracy"], first.whole["baseline"]) == (0.75, 0.5)
    assert (second.whole["new_rmse"], second.whole["baseline"]) == (2.0, 8.0)
    assert "new_accuracy" not in second.whole


def test_what_is_added_is_seen_with_the_next_look(tmp_path: Path) -> None:
    spec = record(tmp_path, closed(1))
    folder = read(tmp_path)
    seen = folder.runs[spec.run].version
    assert not folder.refresh()
    record(tmp_path, closed(2), spec=spec)
    with closing(Journal(tmp_path)) as journal:
        journal.end(spec.run, 2)
    assert folder.refresh()
    newer = folder.runs[spec.run].since(seen)
    assert ([row.round for row in newer["rows"]], newer["stage"]) == ([2], "finished")


def test_of_very_many_rounds_a_part_is_kept_and_who_has_seen_others_gets_all_anew(
    tmp_path: Path,
) -> None:
    spec = record(tmp_path, *map(closed, range(1, 1501)))
    folder = read(tmp_path)
    run = folder.runs[spec.run]
    seen = run.version
    assert len(run.since(0)["rows"]) == 1500
    record(tmp_path, *map(closed, range(1501, 5002)), spec=spec)
    folder.refresh()
    newer = run.since(seen)
    assert newer["whole"]
    assert [row.round for row in newer["rows"]] == [*range(4, 5001, 4)]
    assert newer["round"] == 5001
    record(tmp_path, closed(5002), closed(5004), spec=spec)
    folder.refresh()
    assert [row.round for row in run.since(newer["version"])["rows"]] == [5004]


def test_a_run_that_waits_for_its_sensors_began_when_the_log_says(tmp_path: Path) -> None:
    spec = vfl_spec()
    with closing(Journal(tmp_path)) as journal:
        journal.begin(spec)
    with event_log.logging(tmp_path, lambda _: None) as report:
        report(
            Gathering(federation=spec.federation, run=spec.run, nodes=2, rounds=0, what="sensor")
        )
    run = read(tmp_path).runs[spec.run]
    assert (run.stage, run.begun) == ("gathering", event_log.read(tmp_path)[0][0].time)


def test_who_is_there_stands_in_the_log(tmp_path: Path) -> None:
    spec = record(tmp_path, closed(1))
    with event_log.logging(tmp_path, lambda _: None) as report:
        report(
            Gathering(federation=spec.federation, run=spec.run, nodes=2, rounds=0, what="sensor")
        )
        report(NodeJoined(node="oven"))
    run = read(tmp_path).runs[spec.run]
    assert {name: status.doing for name, status in run.status.items()} == {
        "press": "absent",
        "oven": "waiting",
    }


@pytest.mark.slow
@pytest.mark.needs("chromium")
def test_sensors_are_followed_while_they_learn(tmp_path: Path) -> None:
    broker = Mosquitto(tmp_path / "broker", persistence=False)
    broker.start()
    vfl_runs.draw(tmp_path / "data", 400, seed=1)
    log = tmp_path / "head.log"
    head = start(
        "vfl",
        "coordinate",
        broker.url,
        "--labels",
        tmp_path / "data" / "labels.csv",
        "--classes",
        "good,bad,ugly",
        "--sensors",
        "press,oven",
        "--start",
        20,
        "--chunk",
        1,
        "--window",
        24,
        "--rounds",
        300,
        "--commit",
        5,
        "--state",
        tmp_path / "head",
        "--http",
        "0",
        log=log,
    )
    processes = [head]
    try:
        url = url_in(wait_for(log, "console: http"))
        wait_until(lambda: is_served(url))
        with browse() as page:
            page.open(url)
            for name in ("press", "oven"):
                columns, data = ",".join(vfl_runs.COLUMNS[name]), tmp_path / "data" / f"{name}.csv"
                processes.append(
                    start(
                        "vfl",
                        "join",
                        broker.url,
                        "--sensor",
                        name,
                        "--columns",
                        columns,
                        "--data",
                        data,
                        "--state",
                        tmp_path / name,
                        log=tmp_path / f"{name}.log",
                    )
                )
            expect(page.tab.locator("#chart-loss canvas")).to_be_visible()
            expect(page.tab.locator("#chart-new_accuracy canvas")).to_be_visible()
            expect(page.tab.locator("#overview")).to_contain_text("Always the same answer")
            expect(page.tab.locator("#chart-latency canvas")).to_be_visible()
            expect(page.tab.locator("#chart-iterations canvas")).to_be_visible()
            expect(page.tab.locator("#nodes tbody tr")).to_have_count(2)
            expect(page.tab.locator("#operate")).to_be_hidden()
            assert page.problems == []
            assert page.violations() == []
        assert [process.wait(120) for process in processes] == [0, 0, 0], log.read_text()
    finally:
        for process in processes:
            process.kill()
        broker.kill()
