"""A console beside its coordinator: it follows a live federation,
and whatever becomes of it the federation goes on.
"""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from broker_config.protocol.errors import EdgeNodeError, UsageError
from edge.http.login import Accounts
from tests.support.browser import Page, browse
from tests.support.console_process import is_served, url_in
from tests.support.mosquitto import Mosquitto
from tests.support.plants import CLASSES, draw, drawn_weights, start, wait_for
from tests.support.ports import free_port
from tests.support.recorded_run import record_run
from tests.support.waiting import wait_until
from trainer import progress
from trainer.console.console_process import LOG, console_beside
from trainer.federation.server.journal import history


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    found = Mosquitto(tmp_path / "broker", persistence=False)
    found.start()
    yield found
    found.kill()


def test_it_serves_while_the_coordinator_runs_and_no_longer(tmp_path: Path) -> None:
    record_run(tmp_path, contributed=1)
    told: list[progress.AnyEvent] = []
    with console_beside(tmp_path, "0", told.append):
        (note,) = (each.text for each in told if isinstance(each, progress.Note))
        url = url_in(note)
        wait_until(lambda: is_served(url))
    assert not is_served(url)


def test_without_an_address_there_is_none(tmp_path: Path) -> None:
    with console_beside(tmp_path, None, progress.ignore):
        assert not (tmp_path / LOG).exists()


@pytest.mark.parametrize("address", ["", "here", "localhost:", "8090:localhost", "localhost:99999"])
def test_what_is_no_address_is_refused_before_anything_begins(tmp_path: Path, address: str) -> None:
    with (
        pytest.raises(UsageError, match="HOST"),
        console_beside(tmp_path, address, progress.ignore),
    ):
        pass


def test_a_port_that_is_taken_is_told_before_anything_begins(tmp_path: Path) -> None:
    record_run(tmp_path)
    port = free_port()
    with console_beside(tmp_path, str(port), progress.ignore):
        wait_until(lambda: is_served(f"http://127.0.0.1:{port}/console/"))
        with (
            pytest.raises(EdgeNodeError, match="cannot listen"),
            console_beside(tmp_path, str(port), progress.ignore),
        ):
            pass


@pytest.mark.slow
@pytest.mark.needs("chromium")
def test_a_live_federation_is_followed_and_outlives_its_console(
    tmp_path: Path, broker: Mosquitto
) -> None:
    logs = {name: tmp_path / f"{name}.log" for name in ("coordinator", "plant-a", "plant-b")}
    rounds = ("--model", "small", "--size", "32", "--rounds", "30", "--seed", "7")
    state = tmp_path / "coordinator"
    coordinator = start(
        "coordinate",
        broker.url,
        "--classes",
        ",".join(CLASSES),
        "--nodes",
        2,
        *rounds,
        "--method",
        "afedcl",
        "--weights",
        drawn_weights(),
        "--state",
        state,
        "--http",
        "0",
        log=logs["coordinator"],
    )
    processes = [coordinator]
    try:
        url = url_in(wait_for(logs["coordinator"], "console: http"))
        wait_until(lambda: is_served(url))
        with browse() as page:
            page.open(url)
            expect(page.tab.locator("#connection")).to_have_text("Waiting for nodes")
            for number, name in enumerate(("plant-a", "plant-b")):
                images = draw(tmp_path / f"{name}-images", 10, number)
                processes.append(
                    start(
                        "join",
                        broker.url,
                        "--name",
                        name,
                        "--data",
                        images,
                        "--state",
                        tmp_path / name,
                        "--telemetry",
                        log=logs[name],
                    )
                )
            expect(page.tab.locator("#connection")).to_have_text("Running")
            expect(page.tab.locator("#nodes tbody tr")).to_have_count(2)
            expect(page.tab.locator("#overview dd").nth(1)).to_have_text("2 of 2")
            # both told what they measured
            expect(page.tab.locator("#chart-A_k canvas")).to_be_visible()
            expect(page.tab.locator("#overview dd").first).to_have_text(re.compile(r"[2-9] of 30"))
            pause(page, state)
            # it is then that it asks for a login
            assert [each for each in page.problems if "401" not in each] == []
            assert page.violations() == []
            kill_console(state)
            expect(page.tab.locator("#connection")).to_have_text("No connection to the console")
        assert [process.wait(120) for process in processes] == [0, 0, 0], logs[
            "coordinator"
        ].read_text()
        assert len(history(state)) == 30
    finally:
        for process in processes:
            process.kill()


def pause(page: Page, state: Path) -> None:
    """Pause the federation for a moment."""
    Accounts(state).set("anna", "correct horse")
    page.tab.locator("#pause").click()
    page.tab.get_by_label("Name").fill("anna")
    page.tab.get_by_label("Password").fill("correct horse")
    page.tab.locator("dialog.login button[type=submit]").click()
    expect(page.tab.locator("#connection")).to_have_text("Paused by its operator")
    expect(page.tab.locator("#messages")).to_contain_text("anna has paused the federation")
    page.tab.locator("#pause").click()
    expect(page.tab.locator("#connection")).to_have_text("Running")


def kill_console(state: Path) -> None:
    """Kill the process, as when memory runs out."""
    found = subprocess.run(
        ["pgrep", "-f", f"trainer.console.console {state} "],
        capture_output=True,
        text=True,
        check=True,
    )
    for line in found.stdout.split():
        os.kill(int(line), signal.SIGKILL)
