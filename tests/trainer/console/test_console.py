"""The console in a real browser: what it shows of runs, what it compares,
what it gives away as files.
"""

import asyncio
import csv
import io
import itertools
import json
import re
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from playwright.sync_api import Download, expect
from starlette.requests import Request

from broker_config.storage import disk
from edge.http.login import Accounts
from edge.http.request import RequestError
from edge.http.web_app import EventStream, User
from tests.support.browser import Page
from tests.support.console_process import console
from tests.support.paths import REPOSITORY
from tests.support.recorded_run import RUN, record_run
from tests.support.waiting import wait_until
from trainer.console.console import MOST_STREAMS, Console
from trainer.console.federation_folder import FederationFolder
from trainer.federation.server.operator_actions import ActionReader
from trainer.progress import NodeLost, NodeRefused, Note, event_log

SOURCES = REPOSITORY / "trainer/console"
STRINGS: dict[str, dict[str, str]] = json.loads((SOURCES / "console_strings.json").read_text())
OTHER = "f" * 16
BRASS = "b" * 16
HOSTILE = '"><img src=x onerror="document.title=\'hacked\'">'


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("console") / "steel"
    record_run(folder, OTHER, nodes=2, rounds=4, method="fedavg")
    record_run(folder, nodes=3, rounds=6, contributed=2)
    with event_log.logging(folder, lambda _: None) as report:
        report(NodeRefused(node="plant-2", round=6, reason=HOSTILE))
        report(Note(text=HOSTILE))
    return folder


@pytest.fixture(scope="module")
def url(state: Path) -> Iterator[str]:
    with console(state.with_name("log"), state) as served:
        yield served


@pytest.fixture
def page(browser: Page, url: str) -> Page:
    """The page, with the newest run in view."""
    browser.problems.clear()
    browser.look()
    browser.open(url)
    expect(browser.tab.locator("#chart-weight canvas")).to_be_visible()
    return browser


def facts(page: Page) -> dict[str, str]:
    """The figures at the top."""
    names, values = (page.tab.locator(f"#overview {tag}").all_inner_texts() for tag in ("dt", "dd"))
    return dict(zip(names, values, strict=True))


def download(page: Page, button: str) -> str:
    with page.tab.expect_download() as found:
        page.tab.locator(button).click()
    saved: Download = found.value
    return Path(saved.path()).read_text()


def test_the_newest_run_is_shown_with_where_it_stands(page: Page) -> None:
    assert page.tab.title() == "Federation steel"
    expect(page.tab.locator("#connection")).to_have_text("Its coordinator does not run")
    found = facts(page)
    assert re.fullmatch(r"8\d\.\d%", found.pop("Accuracy, own classes"))
    assert found == {
        "Round": "6 of 6",
        "A round takes": "55 sec",
        "From the nodes": "153 MB",
        "To the broker": "45 MB",
    }


def test_each_measure_has_a_chart_that_says_what_it_shows(page: Page) -> None:
    titles = page.tab.locator("figure:visible figcaption b").all_inner_texts()
    assert titles[:3] == ["Accuracy, own classes, %", "Weight", "Counted after, s"]
    assert "LD discrimination loss" in titles
    assert "Ak fusion weight" in titles
    summary = page.tab.locator("#chart-counted .plot").get_attribute("aria-label")
    assert (
        summary
        == "Counted after, s by round: 45.84 in round 1, 44.21 in round 6, mean of the nodes"
    )


def test_nodes_are_told_with_their_last_values_and_problems(page: Page) -> None:
    rows = page.tab.locator("#nodes tbody tr").all_inner_texts()
    assert [row.split("\t")[0].strip() for row in rows] == ["plant-1", "plant-2", "plant-3"]
    assert rows[2].split("\t")[2] == "5"  # the round to which it contributed last
    assert "is left out (round 6)" in rows[1]


def test_a_node_that_is_chosen_stands_out_in_the_charts_by_keyboard_too(page: Page) -> None:
    button = page.tab.locator("#nodes button").nth(1)
    # its canvas is another one each time that it is drawn anew
    chart = page.tab.locator("#chart-weight .plot")
    before = chart.screenshot()
    button.focus()
    page.tab.keyboard.press("Enter")
    expect(button).to_have_attribute("aria-pressed", "true")
    expect(button).to_be_focused()
    wait_until(lambda: chart.screenshot() != before)
    page.tab.keyboard.press("Enter")
    expect(button).to_have_attribute("aria-pressed", "false")


def test_two_runs_are_compared_in_one_chart(page: Page) -> None:
    page.tab.locator("#other").select_option(OTHER)
    rows = list(csv.reader(io.StringIO(wait_for_csv(page))))
    assert [len(rows[0]), len(rows) - 1] == [3, 6]
    assert re.fullmatch(r"steel, afedcl, .*: mean of the nodes", rows[0][1])
    assert re.fullmatch(r"steel, fedavg, .*: mean of the nodes", rows[0][2])
    assert [bool(row[2]) for row in rows[1:]] == [True] * 4 + [False] * 2


def wait_for_csv(page: Page) -> str:
    """The weights' CSV, once both runs are drawn."""
    for _ in range(1000):
        found = download(page, "#chart-weight button:has-text('CSV')")
        if "fedavg" in found:
            return found
        page.tab.wait_for_timeout(100)
    raise AssertionError(found)


def test_an_earlier_run_is_shown_when_it_is_chosen_from_the_history(page: Page) -> None:
    assert page.tab.locator("#runs tbody tr").count() == 2
    for language in ("de", "en"):  # the button stands in view, too
        page.tab.locator("#language").select_option(language)
        assert page.ask(
            "[...document.querySelectorAll('#runs .scroll')].every(e => e.scrollWidth <= "
            "e.clientWidth)"
        )
    page.tab.locator("#runs button").nth(1).click()
    expect(page.tab.locator("#connection")).to_have_text("Finished")
    expect(page.tab.locator("#nodes tbody tr")).to_have_count(2)
    expect(page.tab.locator("#chart-A_k")).to_be_visible()


def test_messages_are_those_of_a_node_on_request(page: Page) -> None:
    page.tab.locator("#of").select_option("plant-3")
    expect(page.tab.locator("#messages li")).to_have_count(2)
    assert "contributed too late" in page.tab.locator("#messages").inner_text()


def test_the_timeline_has_a_row_for_each_node(page: Page) -> None:
    height = page.ask("document.querySelector('#timeline canvas').clientHeight")
    assert height >= 3 * 22
    label = page.tab.locator("#timeline canvas").get_attribute("aria-label")
    assert "What each node did in rounds 1 to 6; the table of nodes has the figures" in (
        label or ""
    )


TRAINING = """canvas => {
  const probe = document.createElement("span");
  probe.style.color = "var(--train)";
  document.body.append(probe);
  const wanted = getComputedStyle(probe).color.match(/\\d+/g).join();
  probe.remove();
  const {width, height} = canvas;
  const end = canvas.getContext("2d").getImageData(width - width / 20, 0, width / 20, height).data;
  let found = 0;
  for (let at = 0; at < end.length; at += 4) found += end.slice(at, at + 3).join() === wanted;
  return found;
}"""


def test_the_timeline_draws_no_node_as_training_that_was_killed_or_dropped(
    browser: Page, tmp_path: Path
) -> None:
    folder = tmp_path / "steel"
    record_run(folder, nodes=3, rounds=6, contributed=1)
    with console(tmp_path / "log", folder) as url, disk.lock_folder(folder):
        browser.open(url)
        timeline = browser.tab.get_by_role("img", name=re.compile("^What each node did"))
        expect(timeline).to_be_visible()
        browser.wait_until(lambda: timeline.evaluate(TRAINING))
        with (folder / event_log.FILE).open("ab") as log:
            for event in (
                NodeLost(node="plant-2", round=6),
                NodeRefused(node="plant-3", round=6, reason="dropped"),
            ):
                log.write(msgspec.json.encode(event_log.Logged(time.time() - 40, event)) + b"\n")
        told = re.compile("plant-2: absent.*plant-3: left out")
        expect(browser.tab.get_by_role("img", name=told)).to_be_visible()
        browser.wait_until(lambda: timeline.evaluate(TRAINING) == 0)
        assert browser.violations() == []


def test_a_node_that_takes_much_longer_than_the_others_is_marked(
    browser: Page, tmp_path: Path
) -> None:
    folder = tmp_path / "steel"
    record_run(folder, nodes=3, rounds=6, contributed=2)
    with (
        console(tmp_path / "log", folder) as url,
        disk.lock_folder(folder),
        browser.another(locale="en") as page,
    ):
        page.tab.clock.install(time=time.time() + 120)
        page.open(url)
        slow = page.tab.get_by_role("row").filter(has_text=re.compile(r"slow: [\d.]+ times"))
        expect(slow).to_have_count(1)
        expect(slow).to_contain_text("plant-3")
        assert page.violations() == []


def test_a_console_that_is_there_is_not_called_lost_when_nothing_has_changed_for_long(
    browser: Page, url: str
) -> None:
    with browser.another(locale="en") as page:
        page.tab.clock.install()
        page.open(url)
        expect(page.tab.get_by_role("banner")).to_contain_text("does not run")
        page.tab.clock.fast_forward(20_000)
        expect(page.tab.get_by_role("banner")).to_contain_text("does not run")


def test_who_watches_a_run_is_told_that_the_console_is_there_though_nothing_changes(
    state: Path,
) -> None:
    page = Console([FederationFolder(state)], itertools.count(step=10).__next__)

    async def run() -> list[bytes]:
        scope = {"type": "http", "method": "GET", "client": ("192.0.2.1", 1), "user": User("")}
        response = await page._events(Request(scope))
        assert isinstance(response, EventStream)
        found = [await anext(response.body_iterator) for _ in range(2)]
        await response.body_iterator.aclose()
        return found

    with ThreadPoolExecutor(1) as thread:
        first, second = thread.submit(asyncio.run, run()).result()
    assert first.startswith(b"data: ")
    # a browser hands only events with data to the page
    assert (second.startswith(b"event: alive\n"), b"\ndata: " in second) == (True, True)


def test_no_cell_of_a_file_is_a_formula_to_a_spreadsheet(page: Page) -> None:
    written = page.ask(
        """import("./console_values.js").then(({ toCsv }) =>
          toCsv(["=1", "a;=1"], [["\\u00a0=1", -1]]).text())"""
    )
    assert list(csv.reader(io.StringIO(written))) == [["'=1", "a;'=1"], ["'\u00a0=1", "-1"]]


def test_what_is_shown_can_be_taken_away_as_files(page: Page) -> None:
    rows = list(csv.DictReader(io.StringIO(download(page, "#csv"))))
    assert len(rows) == 6 * 3
    assert rows[0]["node"] == "plant-1"
    assert float(rows[0]["accuracy"]) == pytest.approx(0.5995, abs=1e-3)
    with page.tab.expect_download() as found:
        page.tab.locator("#chart-weight button:has-text('PNG')").click()
    assert Path(found.value.path()).read_bytes().startswith(b"\x89PNG")


# Actions


def test_who_has_not_logged_in_may_look_and_change_nothing(url: str, state: Path) -> None:
    with disk.lock_folder(state):  # as its coordinator does
        answer = httpx.post(f"{url}runs/{RUN}/actions", json={"what": "pause"})
    assert answer.status_code == 401
    assert ActionReader(state, RUN).read() == []


def test_without_a_coordinator_there_is_nothing_to_do(page: Page) -> None:
    expect(page.tab.locator("#operate")).to_be_hidden()
    assert page.tab.locator("#nodes").get_by_text("Drop").count() == 0


def test_whoever_has_logged_in_pauses_drops_and_aborts_and_their_name_stands_beside_it(
    page: Page, state: Path
) -> None:
    accounts = state / "accounts.json"
    with disk.lock_folder(state):
        expect(page.tab.locator("#pause")).to_be_visible()
        page.tab.locator("#pause").click()
        expect(page.tab.locator("#outcome")).to_contain_text("edge-node user NAME --state steel")
        Accounts(state).set("anna", "correct horse")
        page.tab.locator("#pause").click()
        page.tab.get_by_label("Name").fill("anna")
        page.tab.get_by_label("Password").fill("correct horse")
        assert page.violations() == []
        page.tab.locator("dialog.login button[type=submit]").click()
        expect(page.tab.locator("#connection")).to_have_text("Paused by its operator")
        expect(page.tab.locator("#login")).to_have_text("Log anna out")
        page.tab.get_by_role("button", name="Drop plant-3").click()
        expect(page.tab.locator("#confirm")).to_contain_text("In this run it cannot come back.")
        page.tab.keyboard.press("Escape")
        page.tab.get_by_role("button", name="Drop plant-3").click()
        assert page.violations() == []
        page.tab.get_by_role("button", name="Do it").click()
        page.tab.get_by_role("button", name="Resume").click()
        expect(page.tab.locator("#connection")).to_have_text("Running")
        page.tab.locator("#abort").click()
        page.tab.get_by_role("button", name="Do it").click()
        wait_until(lambda: len(ActionReader(state, RUN).read()) == 4)
    done = [(each.what, each.by, each.node) for each in ActionReader(state, RUN).read()]
    assert done == [
        ("pause", "anna", None),
        ("drop", "anna", "plant-3"),
        ("resume", "anna", None),
        ("abort", "anna", None),
    ]
    accounts.unlink()


@pytest.mark.parametrize(
    ("run", "wanted", "status"),
    [
        (RUN, {"what": "explode"}, 400),
        (RUN, {"what": "drop"}, 409),
        (RUN, {"what": "drop", "node": "plant-9"}, 409),
        (OTHER, {"what": "pause"}, 409),
        ("0" * 16, {"what": "pause"}, 404),
    ],
)
def test_what_makes_no_sense_is_refused(
    url: str, state: Path, run: str, wanted: dict[str, str], status: int
) -> None:
    Accounts(state).set("anna", "correct horse")
    before = ActionReader(state, RUN).read()
    with httpx.Client() as client, disk.lock_folder(state):
        client.post(
            str(httpx.URL(url).join("/login")), json={"name": "anna", "password": "correct horse"}
        )
        answer = client.post(f"{url}runs/{run}/actions", json=wanted)
    assert answer.status_code == status, answer.text
    assert ActionReader(state, RUN).read() == before


def test_who_may_act_on_one_folders_runs_may_not_act_on_anothers(
    tmp_path: Path, state: Path
) -> None:
    brass = tmp_path / "brass"
    record_run(brass, BRASS, nodes=2, rounds=4)
    Accounts(state).set("anna", "correct horse")
    Accounts(brass).set("bert", "battery staple")
    with (
        console(tmp_path / "log", state, brass) as url,
        disk.lock_folder(state),
        disk.lock_folder(brass),
    ):
        found = {}
        for name, password in (("anna", "correct horse"), ("bert", "battery staple")):
            with httpx.Client() as client:
                credentials = {"name": name, "password": password}
                client.post(str(httpx.URL(url).join("/login")), json=credentials)
                for run in (RUN, BRASS):
                    wanted = {"what": "drop", "node": "plant-9"}  # 409: there is none
                    answer = client.post(f"{url}runs/{run}/actions", json=wanted)
                    found[name, run] = answer.status_code
    assert found == {
        ("anna", RUN): 409,
        ("anna", BRASS): 403,
        ("bert", RUN): 403,
        ("bert", BRASS): 409,
    }
    assert ActionReader(brass, BRASS).read() == []


def test_strangers_who_watch_keep_no_operator_from_the_console(state: Path) -> None:
    """Each has one of a limited number of streams; one of whoever has the most gives way."""
    # at each look so much later that a stream says that it is still there
    clock = itertools.count(step=10).__next__
    page = Console([FederationFolder(state)], clock)

    async def watch(client: str, user: str = "") -> AsyncGenerator[bytes]:
        scope = {"type": "http", "method": "GET", "client": (client, 1), "user": User(user)}
        response = await page._events(Request(scope))
        assert isinstance(response, EventStream)
        await anext(response.body_iterator)
        return response.body_iterator

    async def is_over(stream: AsyncGenerator[bytes]) -> bool:
        return await anext(stream, None) is None

    async def run() -> None:
        many = [await watch("192.0.2.1") for _ in range(MOST_STREAMS)]
        with pytest.raises(RequestError):
            await watch("192.0.2.1")
        newer = [await watch("192.0.2.2"), await watch("192.0.2.1", "anna")]
        over = await asyncio.gather(*map(is_over, (*many, *newer)))
        assert over == 2 * [True] + MOST_STREAMS * [False]  # the oldest have given way
        for each in (*many, *newer):
            await each.aclose()

    # not in this thread, which has the browser's event loop
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, run()).result()


# Languages


def test_every_language_has_every_text_and_each_is_used() -> None:
    files = [
        SOURCES / "console.html",
        *SOURCES.glob("console*.js"),
        REPOSITORY / "edge/page/login.js",
    ]
    code = "".join(path.read_text() for path in files)
    for language, words in STRINGS.items():
        assert words.keys() == STRINGS["en"].keys(), language
        for key, text in words.items():
            assert set(re.findall(r"{\w+}", text)) == set(
                re.findall(r"{\w+}", STRINGS["en"][key])
            ), (language, key)
    told = {
        "gathering",
        "finished",
        "aborted",
        "accuracy",
        "accuracy_all",
        "offered",
        "counted",
        "bytes_up",
        "name",
    }
    doing = {"waiting", "receiving", "judging", "absent", "refused"}
    unused = {key for key in STRINGS["en"] if not re.search(rf"""["'.`]{key}\b""", code)}
    assert {
        key
        for key in unused - told - doing
        if not key.startswith(("meaning_", "confirm_", "warn_"))
    } == set()


def test_it_is_shown_in_the_reader_s_language(url: str, page: Page) -> None:
    page.tab.locator("#language").select_option("de")
    expect(page.tab.locator("#connection")).to_have_text("Ihr Koordinator läuft nicht")
    expect(page.tab.locator("#chart-accuracy b")).to_have_text("Genauigkeit, eigene Klassen, %")
    page.tab.locator("#language").select_option("en")
    expect(page.tab.locator("#connection")).to_have_text("Its coordinator does not run")


# Everybody, everywhere


@pytest.mark.parametrize(
    ("width", "height", "theme"),
    [(390, 844, "light"), (390, 844, "dark"), (1280, 800, "light"), (3840, 2160, "dark")],
)
def test_it_fits_and_axe_finds_nothing_wrong(
    page: Page, width: int, height: int, theme: str
) -> None:
    page.look(width=width, height=height, theme=theme)
    expect(page.tab.locator("#chart-weight canvas")).to_be_visible()
    assert page.ask("document.documentElement.scrollWidth <= innerWidth")
    assert page.violations() == []


def test_everything_is_reached_with_the_tab_key(page: Page) -> None:
    reached = set()
    for _ in range(60):
        page.tab.keyboard.press("Tab")
        reached.add(
            page.ask("document.activeElement.id || document.activeElement.closest('section')?.id")
        )
    assert {"run", "other", "language", "charts", "csv", "nodes", "span", "of", "runs"} <= reached


def test_nothing_is_asked_of_another_host_and_names_are_shown_and_never_obeyed(
    page: Page, url: str
) -> None:
    expect(page.tab.locator("#messages")).to_contain_text("onerror")
    assert page.tab.title() == "Federation steel"
    host = httpx.URL(url).host
    assert {
        httpx.URL(each).host for each in page.requests if not each.startswith(("data:", "blob:"))
    } == {host}
    assert page.problems == []
    policy = httpx.get(url).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


# Programs


def test_what_has_changed_since_a_version_can_be_asked_for(url: str) -> None:
    whole = httpx.get(f"{url}runs/{RUN}").json()
    assert (whole["whole"], len(whole["rows"])) == (True, 6)
    newer: dict[str, Any] = httpx.get(f"{url}runs/{RUN}", params={"since": whole["version"]}).json()
    assert (newer["whole"], newer["rows"]) == (False, [])
    for hostile in ("x", "9" * 5000, "\u0667"):
        answer = httpx.get(f"{url}runs/{RUN}", params={"since": hostile})
        assert answer.json()["whole"]


def test_who_asks_for_the_head_of_a_stream_gets_no_piece_of_it(url: str) -> None:
    answer = httpx.head(f"{url}events")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")


def test_a_run_that_is_not_there_is_answered_with_what_to_do(url: str) -> None:
    answer = httpx.get(f"{url}runs/0000000000000000")
    assert answer.status_code == 404
    assert "choose one" in answer.json()["remedy"]


def test_who_asks_for_nothing_in_particular_is_led_to_the_page(url: str) -> None:
    assert httpx.get(str(httpx.URL(url).join("/"))).headers["location"] == "console/"


def test_a_name_by_which_it_is_not_called_is_refused(url: str) -> None:
    assert httpx.get(url, headers={"host": "evil.example"}).status_code == 421
