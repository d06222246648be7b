"""The line's page, of a live line in a real browser: what a person sees, hears and can reach."""

import asyncio
import io
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, get_args

import httpx
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Route, expect

from edge.http.app import App
from edge.http.prometheus_metrics import Metrics
from edge.inference.pipeline import Frame, NullConsumer, Pipeline
from edge.inference.served_model import load_model
from edge.page.line_page import LinePage
from edge.page.recent_inspections import RecentInspections
from edge.uncertainty.model_warnings import WarningId
from tests.support.browser import Page
from tests.support.classified_images import SIZE, picture
from tests.support.daemon_process import Daemon, daemon
from tests.support.paths import REPOSITORY
from tests.support.ports import free_port
from tests.support.tiny_bundle import RED, tiny_bundle

CLASSES = ("no_defect", "scratch", "dent")
HOSTILE = '"><img src=x onerror="document.title=\'hacked\'">'
SOURCES = REPOSITORY / "edge/page"
STRINGS: dict[str, dict[str, str]] = json.loads((SOURCES / "strings.json").read_text())


def image(label: str) -> bytes:
    """A PNG of a class."""
    out = io.BytesIO()
    Image.fromarray(picture(np.random.default_rng(0), CLASSES.index(label))).resize((64, 48)).save(
        out, "PNG"
    )
    return out.getvalue()


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("line") / "bundle"
    with daemon(tiny_bundle(folder, size=SIZE, classes=CLASSES, extras=True).folder) as running:
        yield running


@pytest.fixture
def page(browser: Page, line: Daemon) -> Page:
    """The page, with a defect in view."""
    line.classify(image("dent"), "part 1.png")
    browser.problems.clear()
    browser.look()
    browser.open(f"{line.url}/line/")
    expect(browser.tab.locator("#label")).to_have_text("dent")
    return browser


def test_a_browser_that_asks_for_nothing_in_particular_gets_the_page_and_a_program_what_it_got_ever(
    line: Daemon,
) -> None:
    sent = line.client.get("/", headers={"accept": "text/html,*/*"})
    assert (sent.status_code, sent.headers["location"], sent.headers["vary"]) == (
        303,
        "line/",
        "accept",
    )
    assert line.client.get("/").json()["bundle"] == "tiny@1"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("content", "decision", "label"),
    [
        (image("no_defect"), "Good", "no_defect"),
        (image("scratch"), "Defect", "scratch"),
        (RED, "Check", "no_defect"),
    ],
    ids=["good", "defect", "check"],
)
def test_each_decision_is_shown_as_it_falls(
    page: Page, line: Daemon, content: bytes, decision: str, label: str
) -> None:
    line.classify(content, "part 2")
    expect(page.tab.locator("#decision")).to_have_text(decision)
    expect(page.tab.locator("#label")).to_have_text(label)
    assert page.violations() == []


def test_drift_is_no_figure_where_the_bundle_has_nothing_to_measure_it_by(page: Page) -> None:
    expect(page.tab.locator("#drift")).to_have_text("Not measured")


def test_the_reason_for_a_doubt_is_given(page: Page, line: Daemon) -> None:
    line.classify(RED, "blank")
    expect(page.tab.locator("#doubts")).to_have_text("The picture shows nothing")


def test_a_file_that_is_no_image_is_shown_with_what_to_do(page: Page, line: Daemon) -> None:
    line.classify(b"no image", "torn.png")
    expect(page.tab.locator("#decision")).to_have_text("Not readable")
    expect(page.tab.locator("#doubts")).to_contain_text("torn.png is not a whole image")
    expect(page.tab.locator("#doubts")).to_contain_text("use an undamaged JPEG")
    assert page.violations() == []


def test_the_picture_is_that_of_the_decision(page: Page, line: Daemon) -> None:
    line.classify(image("scratch"), "part 3.png")
    expect(page.tab.locator("#image")).to_have_text("part 3.png: Defect, scratch")
    expect(page.tab.locator("#picture")).to_be_visible()
    assert (
        page.ask("(async (shown) => { await shown.decode(); return shown.naturalWidth; })(picture)")
        == 480
    )
    assert page.ask("document.getElementById('picture').alt") == "part 3.png: Defect, scratch"


def test_the_heat_map_comes_and_goes_with_a_key(page: Page) -> None:
    pixels = """async () => {
      const shown = document.getElementById("picture");
      await shown.decode();
      const canvas = new OffscreenCanvas(1, 1).getContext("2d");
      canvas.drawImage(shown, 0, 0, 1, 1);
      return [...canvas.getImageData(0, 0, 1, 1).data];
    }"""
    expect(page.tab.locator("#picture")).to_have_attribute("src", re.compile(r"^pictures/\w+$"))
    plain = page.ask(pixels)
    page.tab.keyboard.press("h")
    expect(page.tab.locator("#heat")).to_have_attribute("aria-pressed", "true")
    expect(page.tab.locator("#picture")).to_have_attribute("src", re.compile("heat=1"))
    assert page.ask(pixels) != plain
    page.tab.keyboard.press("h")
    expect(page.tab.locator("#picture")).to_have_attribute("src", re.compile(r"^pictures/\w+$"))


def test_a_held_picture_and_its_decision_stay_together_while_the_line_goes_on(
    page: Page, line: Daemon
) -> None:
    picture = page.tab.get_by_role("img", name="part 1.png")
    decision = page.tab.get_by_role("region", name="Defect", exact=True)
    expect(picture).to_be_visible()
    page.tab.keyboard.press("p")
    images = page.tab.locator("#images").inner_text()
    line.classify(image("no_defect"), "part 4.png")
    expect(page.tab.locator("#images")).not_to_have_text(images)
    expect(picture).to_be_visible()
    expect(decision).to_contain_text("Held")
    expect(decision).to_contain_text("dent")
    page.tab.keyboard.press("p")
    expect(page.tab.get_by_role("img", name="part 4.png: Good, no_defect")).to_be_visible()
    expect(page.tab.get_by_role("region", name="Good", exact=True)).to_be_visible()


def test_a_decision_is_not_shown_before_its_picture(browser: Page, line: Daemon) -> None:
    stalled: list[Route] = []

    def stall(route: Route) -> None:
        stalled.append(route)

    with browser.another(locale="en") as page:
        page.tab.clock.install()  # a page does not wait for a picture for ever
        line.classify(image("scratch"), "part 5.png")
        page.open(f"{line.url}/line/")
        expect(page.tab.get_by_role("img", name="part 5.png")).to_be_visible()
        page.tab.clock.pause_at(time.time() + 3600)
        page.tab.route("**/line/pictures/*", stall, times=1)
        line.classify(image("no_defect"), "part 6.png")
        page.wait_until(lambda: page.tab.clock.run_for(100) or stalled)
        expect(page.tab.get_by_role("img", name="part 5.png")).to_be_visible()
        decision = page.tab.get_by_role("region", name="Defect", exact=True)
        expect(decision).to_contain_text("scratch")
        stalled[0].continue_()
        expect(page.tab.get_by_role("img", name="part 6.png")).to_be_visible()
        expect(page.tab.get_by_role("region", name="Good", exact=True)).to_be_visible()


@contextmanager
def told(page: Page, state: dict[str, Any]) -> Iterator[None]:
    """Have the page be told this state."""
    page.tab.route("**/line/state", lambda route: route.fulfill(json=state))
    try:
        yield
    finally:
        page.tab.unroute("**/line/state")


def test_a_line_to_which_no_image_comes_is_not_shown_as_live(page: Page, line: Daemon) -> None:
    expect(page.tab.get_by_role("banner")).to_contain_text("Live")
    state = page.ask("(async () => (await fetch('state')).json())()")
    later = datetime.fromisoformat(state["last"]["time"]) + timedelta(seconds=24)
    state |= {"time": later.isoformat(), "per_minute": 60}  # whatever has come before this test
    with told(page, state):
        expect(page.tab.get_by_role("banner")).to_contain_text("No image has come: 24 seconds")
        assert page.violations() == []
    line.classify(image("dent"))
    expect(page.tab.get_by_role("banner")).not_to_contain_text("No image")


def test_a_sink_that_is_away_is_shown_until_it_is_back(browser: Page, tmp_path: Path) -> None:
    bundle = tiny_bundle(tmp_path / "bundle", size=SIZE, classes=CLASSES).folder
    port = free_port()
    with daemon(bundle, mqtt=f"mqtt://127.0.0.1:{port}") as line:
        line.classify(image("dent"))
        browser.open(f"{line.url}/line/")
        expect(browser.tab.get_by_role("banner")).to_contain_text(f":{port} takes no verdicts")
        assert browser.violations() == []


@pytest.mark.parametrize("language", ["en", "de"])
@pytest.mark.parametrize(("width", "height"), [(1024, 768), (1280, 800), (1920, 1080)])
def test_a_long_name_and_all_there_is_to_complain_about_leave_the_page_on_one_screen(
    page: Page, language: str, width: int, height: int
) -> None:
    long = "Oberflächenriss mit Einschluss, tief " * 5
    state = page.ask("(async () => (await fetch('state')).json())()")
    doubts = ["confidence", "disagreement", "novelty", "blank"]
    state["last"] |= {"label": long, "image": long, "doubts": doubts, "taught": False}
    state["rejects"] = [state["last"]] * 12
    state["warnings"] = [{"id": id_, "text": ""} for id_ in get_args(WarningId)]
    state["away"] = [f"mqtt mqtts://broker-{number}.plant.example" for number in range(2)]
    state["notices"] = [state["rejects"][0] | {"text": long, "kind": "drift"}] * 5
    page.look(width=width, height=height)
    page.tab.get_by_label(STRINGS["en"]["language"]).select_option(language)
    with told(page, state):
        decision = page.tab.get_by_role("region", name=STRINGS[language]["check"])
        expect(decision).to_contain_text(long.strip())
        assert page.ask("document.documentElement.scrollHeight") <= height
        assert page.ask("document.documentElement.scrollWidth") <= width
        text = decision.get_by_text(long.strip())
        text.scroll_into_view_if_needed()
        expect(text).to_be_in_viewport(ratio=0.99)
        assert page.violations() == []
    page.tab.get_by_role("combobox").select_option("en")


def test_the_state_has_what_the_page_shows_and_no_tiles(line: Daemon) -> None:
    verdict = line.classify(image("dent")).json()
    state = line.client.get("/line/state").json()
    assert {"tiles", "probabilities"} <= verdict.keys()
    for told in (state["last"], *state["rejects"]):
        assert not {"tiles", "probabilities"} & told.keys()
    assert state["last"]["id"] == verdict["id"]


def test_figures_count_what_was_inspected(page: Page, line: Daemon) -> None:
    before = page.tab.locator("#images").inner_text()
    line.classify(image("no_defect"))
    expect(page.tab.locator("#images")).to_have_text(str(int(before) + 1))
    assert re.fullmatch(r"[\d.]+ ms, p95 [\d.]+ ms", page.tab.locator("#latency").inner_text())
    assert int(page.tab.locator("#pace").inner_text()) > 0


def test_a_defect_of_before_is_opened_and_closed_by_keyboard(page: Page) -> None:
    first = page.tab.locator("#rejects button").first
    first.focus()
    page.tab.keyboard.press("Enter")
    expect(page.tab.locator("#details")).to_be_visible()
    assert page.ask("document.querySelector('#details img').naturalWidth") == SIZE
    page.tab.keyboard.press("Escape")
    expect(page.tab.locator("#details")).to_be_hidden()
    expect(first).to_be_focused()


def test_defects_and_doubts_are_spoken_and_good_parts_are_not(page: Page, line: Daemon) -> None:
    spoken = page.tab.get_by_role("status")
    expect(spoken).to_have_text("Defect: dent")
    line.classify(image("no_defect"))
    expect(page.tab.locator("#decision")).to_have_text("Good")
    expect(spoken).to_have_text("Defect: dent")


# Languages


def test_every_language_has_every_text_and_each_is_used() -> None:
    code = "".join(
        file.read_text() for file in SOURCES.iterdir() if file.suffix in (".html", ".js")
    )
    for language, words in STRINGS.items():
        assert words.keys() == STRINGS["en"].keys(), language
        for key, text in words.items():
            assert set(re.findall(r"{\w+}", text)) == set(
                re.findall(r"{\w+}", STRINGS["en"][key])
            ), (language, key)
    dynamic = {
        "ready",
        "draining",
        "stalled",
        "lost",
        "waiting",
        "defect",
        "good",
        "check",
        "failure",
    }
    unused = {
        key for key in STRINGS["en"] if not re.search(rf"""["'.]{key}\b|name \}}""", code)
    } - dynamic
    assert {key for key in unused if not key.startswith(("doubt_", "warning_"))} == set()
    # when a bundle expires stands among the messages, with its date
    translated = {f"warning_{id_}" for id_ in get_args(WarningId) if not id_.endswith("_expiry")}
    translated.add("warning_labels_damaged")  # of the line, not of its model
    assert {key for key in STRINGS["en"] if key.startswith("warning_")} == translated


def test_warnings_about_the_model_stand_beside_its_name_in_the_readers_language(
    page: Page, line: Daemon
) -> None:
    warned = [f"warning_{each['id']}" for each in line.client.get("/").json()["warnings"]]
    assert warned == ["warning_not_measured"]
    shown = page.tab.locator("#about #warnings li")
    page.look(width=1920, height=1080)
    for language in ("en", "de", "en"):
        page.tab.locator("#language").select_option(language)
        expect(shown).to_have_text([STRINGS[language][key] for key in warned])
        expect(shown.first).to_be_visible()
        assert page.ask("document.documentElement.scrollHeight") <= 1080
    assert page.violations() == []


def test_there_is_no_warning_about_a_good_model_and_an_expiry_stands_among_the_messages(
    page: Page,
) -> None:
    state = page.ask("(async () => (await fetch('state')).json())()")
    state["warnings"] = [{"id": "bundle_expiry", "text": "the bundle expires on 2031-01-01"}]
    page.tab.route("**/line/state", lambda route: route.fulfill(json=state))
    expect(page.tab.locator("#warnings li")).to_have_count(0)
    expect(page.tab.locator("#notices li")).to_contain_text(["2031-01-01"])
    page.tab.unroute("**/line/state")


def test_the_language_is_the_browser_s_until_another_is_chosen_which_stays(
    line: Daemon, page: Page
) -> None:
    context = page.tab.context.browser.new_context(locale="de-AT")  # type: ignore[union-attr]
    tab = context.new_page()
    line.classify(image("dent"))
    tab.goto(f"{line.url}/line/")
    expect(tab.locator("#decision")).to_have_text("Fehler")
    assert tab.evaluate("document.documentElement.lang") == "de"
    shown = tab.locator("[data-text]").all_inner_texts()
    assert "Livebild" in shown
    tab.locator("#language").select_option("en")
    expect(tab.locator("#decision")).to_have_text("Defect")
    tab.reload()
    expect(tab.locator("#decision")).to_have_text("Defect")
    context.close()


# Everybody, everywhere


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(390, 844), (768, 1024), (1280, 800), (3840, 2160)])
def test_it_fits_and_axe_finds_nothing_wrong(
    page: Page, theme: str, width: int, height: int
) -> None:
    page.look(width=width, height=height, theme=theme)
    expect(page.tab.locator("#picture")).to_be_visible()
    assert page.ask("document.documentElement.scrollWidth <= innerWidth")
    assert page.violations() == []


@pytest.mark.parametrize(
    ("width", "height"), [(1024, 768), (1280, 800), (1920, 1080), (3840, 2160)]
)
def test_on_a_screen_all_is_seen_at_once_and_the_decision_from_afar(
    page: Page, width: int, height: int
) -> None:
    """Letters of a 300th of the distance can be read: 1 cm from three metres,
    on a tablet 25 cm wide.
    """
    page.look(width=width, height=height)
    assert (
        page.ask("parseFloat(getComputedStyle(document.getElementById('decision')).fontSize)")
        > width * 1 / 25
    )
    for section in ("verdict", "live", "figures"):
        box: Any = page.tab.locator(f"#{section}").bounding_box()
        assert box["y"] + box["height"] <= height, section
    rejects: Any = page.tab.locator("#rejects img").first.bounding_box()
    assert rejects["y"] + rejects["height"] <= height


def test_everything_is_reached_with_the_tab_key(page: Page) -> None:
    reached = set()
    for _ in range(20):
        page.tab.keyboard.press("Tab")
        reached.add(
            page.ask("document.activeElement.id || document.activeElement.closest('section')?.id")
        )
    assert {"language", "heat", "hold", "rejects"} <= reached


def test_nothing_is_asked_of_another_host_and_the_console_is_silent(
    page: Page, line: Daemon
) -> None:
    page.tab.keyboard.press("h")
    expect(page.tab.locator("#picture")).to_have_attribute("src", re.compile("heat=1"))
    page.tab.keyboard.press("h")
    others = [
        url
        for url in page.requests
        if httpx.URL(url).host != line.url.host and not url.startswith("data:")
    ]
    assert others == []
    assert page.problems == []


def test_a_name_is_shown_and_never_obeyed(page: Page, line: Daemon) -> None:
    line.classify(image("dent"), HOSTILE)
    expect(page.tab.locator("#image")).to_contain_text("onerror")
    assert page.tab.title() == "Line line-1"
    sent = line.client.get("/line/").headers["content-security-policy"]
    assert "default-src 'none'" in sent
    assert "unsafe" not in sent


@pytest.mark.parametrize("path", ["pictures/0", "rejects/0"])
def test_what_is_not_held_any_more_is_answered_with_what_to_do(line: Daemon, path: str) -> None:
    answer = line.client.get(f"/line/{path}")
    assert answer.status_code == 404
    assert "not held any more" in answer.json()["error"]


def test_a_picture_is_drawn_once_however_many_ask_for_it(tmp_path: Path) -> None:
    class Counting(Pipeline):
        drawn = 0

        async def run_in_decoder(self, function: Any, argument: Any) -> Any:
            self.drawn += 1
            return await super().run_in_decoder(function, argument)

    async def ask(paths: list[str]) -> list[httpx.Response]:
        transport = httpx.ASGITransport(
            App(pipeline, Metrics(), pages=[*LinePage("a", pipeline, recent, _no).routes])
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://line") as client:
            return await asyncio.gather(*map(client.get, paths))

    recent = RecentInspections(NullConsumer())
    bundle = tiny_bundle(tmp_path / "bundle", size=SIZE, extras=True).folder
    with closing(Counting(load_model(bundle), recent, monitors=[recent.observe])) as pipeline:
        pipeline.inspect_sync(Frame("part", image("dent")))
        id_ = recent.snapshot()["last"].id
        wanted = ask([f"/line/pictures/{id_}", f"/line/pictures/{id_}?heat=1"] * 10)
        with ThreadPoolExecutor(1) as thread:  # the browser's own loop runs in this one
            answers = thread.submit(asyncio.run, wanted).result()
    assert {answer.headers["content-type"] for answer in answers} == {"image/jpeg"}
    assert pipeline.drawn == 2


def _no() -> None:
    """No drift is measured."""


def test_whoever_reaches_the_line_may_watch_where_only_some_may_post(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_NODE_HTTP_TOKEN", "secret")
    with daemon(tiny_bundle(tmp_path / "bundle", size=SIZE).folder) as guarded:
        assert guarded.classify(RED).status_code == 401
        assert guarded.client.get("/line/state").json()["last"] is None


def test_a_state_that_cannot_be_shown_is_never_taken_for_the_newest(page: Page) -> None:
    page.tab.route("**/line/state", lambda route: route.fulfill(json={"line": "line-1"}))
    expect(page.tab.locator("#connection")).to_contain_text("No connection to the line")
    page.tab.unroute("**/line/state")
    expect(page.tab.locator("#connection")).not_to_contain_text("No connection")


def test_a_line_that_is_gone_is_told_and_its_last_decision_turns_gray(
    browser: Page, tmp_path: Path
) -> None:
    with daemon(tiny_bundle(tmp_path / "bundle", size=SIZE, classes=CLASSES).folder) as ending:
        ending.classify(image("dent"))
        browser.open(f"{ending.url}/line/")
        expect(browser.tab.locator("#decision")).to_have_text("Defect")
        ending.process.kill()
        expect(browser.tab.locator("#connection")).to_contain_text("No connection to the line")
        assert (
            browser.ask("getComputedStyle(document.getElementById('verdict')).filter")
            == "grayscale(1)"
        )
