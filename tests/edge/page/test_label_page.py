"""The page of labels, of a live line in a real browser: one image after another,
many at once, and what it takes.
"""

import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Route, expect

from edge.http.login import Accounts
from tests.support.browser import Page
from tests.support.classified_images import judged_bundle, picture
from tests.support.daemon_process import Daemon, serving_daemon
from tests.support.waiting import wait_until

PASSWORD = "correct horse"  # noqa: S105  (of a line that lives for this test)
SEND = """([path, content]) => fetch(path, {method: "POST", body: JSON.stringify(content),
  headers: {"Content-Type": "application/json"}}).then(async (answer) => [answer.status, \
await answer.json()])"""
KEPT = re.compile(r"\d{8}T\d{9}-[0-9a-f]{8}\.png")


class Line:
    """A running line that keeps all images, and the plant's image folder."""

    def __init__(self, running: Daemon, folder: Path) -> None:
        self.running, self.images, self.kept = running, folder / "images", folder / "kept"
        self.random = np.random.default_rng(5)

    def inspect(self, label: int, *, strong: float = 80, name: str = "part") -> dict[str, Any]:
        """The verdict on an image of a class, once its image is kept."""
        Image.fromarray(picture(self.random, label, strong=strong)).save(out := io.BytesIO(), "PNG")
        verdict: dict[str, Any] = self.running.classify(out.getvalue(), name).json()
        wait_until(lambda: verdict["kept"] in self.waiting)
        return verdict

    @property
    def waiting(self) -> list[str]:
        return [row[0] for row in self.running.client.get("/labels/queue").json()["images"]]

    def copy(self, count: int) -> None:
        """Have so many copies of a kept image wait, too."""
        first = self.kept / self.waiting[0]
        told = json.loads(first.with_suffix(".json").read_text())
        for number in range(count):
            stem = f"20260102T{number:09d}-{os.urandom(4).hex()}"
            (self.kept / f"{stem}.json").write_text(json.dumps(told | {"kept": f"{stem}.png"}))
            os.link(first, self.kept / f"{stem}.png")

    @property
    def labelled(self) -> dict[str, str]:
        return {path.name: path.parent.name for path in self.images.glob("*/*")}

    @property
    def history(self) -> list[dict[str, Any]]:
        return [
            json.loads(line)["value"]
            for line in (self.images / "labels-line-1.jsonl").read_text().splitlines()
        ]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Path]]:
    folder = tmp_path_factory.mktemp("line")
    (folder / "line.toml").write_text(
        '[keep]\npath = "kept"\nwhat = "all"\nsample = 1.0\n[labels]\npath = "images"\n'
    )
    for name in ("anna", "ben"):
        Accounts(folder / "state").set(name, PASSWORD)
    bundle = judged_bundle(folder / "bundle")
    with serving_daemon(folder / "state", bundle, "--config", folder / "line.toml") as found:
        yield found, folder


@pytest.fixture
def line(running: tuple[Daemon, Path]) -> Line:
    """The line, with six new images that wait, and no other."""
    found = Line(*running)
    for file in found.kept.glob("*"):
        file.unlink()
    for number in range(6):
        found.inspect(number % 3, name=f"part {number}")
    return found


@pytest.fixture
def page(browser: Page, line: Line) -> Page:
    """The page, after a login."""
    browser.problems.clear()
    browser.look()
    browser.open(f"{line.running.url}/labels/")
    log_in(browser)
    expect(browser.tab.locator("#waiting")).to_have_text("Waiting: 6")
    asked(browser)
    return browser


def log_in(page: Page) -> None:
    expect(page.tab.locator("#login")).not_to_be_empty()
    if page.tab.locator("#login").inner_text() == "Log in":
        page.tab.locator("#login").click()
        page.tab.get_by_label("Name").fill("anna")
        page.tab.get_by_label("Password").fill(PASSWORD)
        page.tab.keyboard.press("Enter")
        expect(page.tab.locator("#login")).to_have_text("Log anna out")


def current(page: Page) -> str:
    """The file of the image that is asked about."""
    [name] = KEPT.findall(page.tab.locator("#picture").get_attribute("src") or "")
    return str(name)


def test_a_key_gives_the_image_a_class_and_the_next_one_is_asked_about(
    page: Page, line: Line
) -> None:
    first = current(page)
    page.tab.keyboard.press("3")
    expect(page.tab.locator("#said")).to_contain_text("blue: 1 labelled")
    assert current(page) != first
    assert line.labelled[first] == "blue"
    assert (line.history[-1]["person"], line.history[-1]["label"]) == ("anna", "blue")
    expect(page.tab.locator("#waiting")).to_have_text("Waiting: 5")


def test_enter_confirms_what_the_model_says(page: Page, line: Line) -> None:
    first = current(page)
    verdict = page.tab.locator("#classes button[data-verdict]").inner_text().split()[-1]
    expect(page.tab.locator("#asked")).to_contain_text(f"{verdict}, ")
    page.tab.keyboard.press("Enter")
    expect(page.tab.locator("#said")).to_contain_text(f"{verdict}: 1 labelled")
    assert line.labelled[first] == verdict


def test_undo_brings_the_image_back_to_be_asked_about(page: Page, line: Line) -> None:
    first = current(page)
    page.tab.keyboard.press("1")
    expect(page.tab.locator("#waiting")).to_have_text("Waiting: 5")
    page.tab.keyboard.press("u")
    expect(page.tab.locator("#said")).to_have_text("Waiting again: 1")
    expect(page.tab.locator("#waiting")).to_have_text("Waiting: 6")
    assert current(page) == first
    assert first not in line.labelled


def test_an_image_is_left_for_later_or_laid_aside(page: Page, line: Line) -> None:
    first = current(page)
    page.tab.keyboard.press("s")
    expect(page.tab.locator("#picture")).not_to_have_attribute("src", f"pictures/{first}")
    second = asked(page)
    page.tab.keyboard.press("x")
    expect(page.tab.locator("#said")).to_contain_text("Laid aside")
    assert {first, second} - {*line.waiting} == {second}
    assert second not in line.labelled


def test_in_the_grid_similar_images_stand_together_and_are_labelled_at_once(
    page: Page, line: Line
) -> None:
    page.tab.keyboard.press("g")
    expect(page.tab.locator(".cell")).to_have_count(6)
    labels = page.tab.locator(".cell b").all_inner_texts()
    assert labels[::2] == labels[1::2]
    assert len(set(labels)) == 3
    page.tab.keyboard.press("a")
    expect(page.tab.locator(".cell[aria-selected=true]")).to_have_count(2)
    chosen = page.ask(
        "[...document.querySelectorAll('.cell[aria-selected=true]')].map((cell) => "
        "cell.dataset.kept)"
    )
    page.tab.keyboard.press("2")
    expect(page.tab.locator("#said")).to_contain_text("green: 2 labelled")
    assert [line.labelled[name] for name in chosen] == ["green", "green"]
    expect(page.tab.locator(".cell")).to_have_count(4)
    page.tab.keyboard.press("u")
    expect(page.tab.locator(".cell")).to_have_count(6)
    assert line.history[-1]["action"] == "undo"


def test_images_are_selected_by_mouse_and_by_keyboard(page: Page) -> None:
    selected = page.tab.locator("#many-title")
    page.tab.keyboard.press("g")
    page.tab.locator(".cell").nth(1).click()
    page.tab.locator(".cell").nth(3).click(modifiers=["Shift"])
    expect(selected).to_have_text("Selected: 3")
    page.tab.keyboard.press("Escape")
    expect(selected).to_have_text("Selected: 0")
    page.tab.keyboard.press("Home")
    page.tab.keyboard.press("Space")
    page.tab.keyboard.press("Shift+ArrowRight")
    page.tab.keyboard.press("Shift+ArrowRight")
    expect(selected).to_have_text("Selected: 3")
    page.tab.keyboard.press("Space")
    expect(selected).to_have_text("Selected: 2")


# A person's action is for the images that they saw


def asked(page: Page) -> str:
    """The file of the image that is asked about, once it can be seen."""
    picture = page.tab.get_by_role("img")
    expect(picture).to_be_visible()
    picture.evaluate("picture => picture.decode()")
    [name] = KEPT.findall(picture.get_attribute("src") or "")
    return str(name)


def labellings(line: Line) -> list[list[str]]:
    """The images of each label that was given since the fixture's images were kept."""
    there = set(line.waiting) | {file.name for file in line.kept.glob("*.png")}
    entries = [each for each in line.history if each["action"] == "label"]
    found = [[image["kept"] for image in each["images"]] for each in entries]
    return [names for names in found if set(names) <= there]


def test_ten_quick_enters_label_ten_images_in_the_order_in_which_they_are_shown(
    page: Page, line: Line
) -> None:
    line.copy(10)
    page.tab.reload()
    expect(page.tab.get_by_text("Waiting: 16")).to_be_visible()
    expected = line.waiting[:10]
    page.tab.wait_for_load_state("networkidle")  # a person would not press faster than that
    page.tab.route(
        "**/labels/label", lambda route: page.tab.wait_for_timeout(50) or route.continue_()
    )
    for _ in range(10):
        page.tab.keyboard.press("Enter")
    expect(page.tab.get_by_role("status")).to_contain_text("saved")
    expect(page.tab.get_by_text("Waiting: 6")).to_be_visible()
    page.wait_until(lambda: len(labellings(line)) == 10)
    page.tab.unroute("**/labels/label")
    assert labellings(line) == [[name] for name in expected]


def test_no_key_labels_an_image_before_it_is_seen(page: Page, line: Line) -> None:
    stalled: list[Route] = []

    def stall(route: Route) -> None:
        stalled.append(route)

    first, second = line.waiting[:2]
    page.tab.route(f"**/labels/pictures/{second}*", stall)
    page.tab.reload()
    assert asked(page) == first
    page.tab.keyboard.press("1")
    expect(page.tab.get_by_role("status")).to_contain_text("saved")
    page.tab.keyboard.press("1")
    expect(page.tab.get_by_role("status")).to_contain_text("not here yet")
    assert second in line.waiting
    for route in stalled:
        route.continue_()
    assert asked(page) == second
    page.tab.keyboard.press("1")
    page.wait_until(lambda: line.labelled.get(second) == "red")
    page.tab.unroute(f"**/labels/pictures/{second}*")


@pytest.mark.parametrize("button", ["Log in", "Later", "Grid", "Language"])
def test_enter_labels_whatever_was_clicked_last(browser: Page, line: Line, button: str) -> None:
    with browser.another(locale="en") as page:
        page.open(f"{line.running.url}/labels/")
        page.tab.get_by_role("button", name="Log in").click()
        page.tab.get_by_label("Name").fill("anna")
        page.tab.get_by_label("Password").fill(PASSWORD)
        page.tab.keyboard.press("Enter")
        leave = page.tab.get_by_role("button", name="anna")
        expect(leave).to_be_visible()
        if button == "Language":
            page.tab.get_by_label(button).click()
            page.tab.get_by_label(button).select_option("de")
        elif button != "Log in":
            page.tab.get_by_role("button", name=button).click()
        if button == "Grid":
            page.tab.get_by_role("button", name=button).click()
        name = asked(page)
        page.tab.keyboard.press("Enter")
        page.wait_until(lambda: name in line.labelled)
        expect(leave).to_be_visible()
        asked(page)
        page.tab.keyboard.press("Enter")
        expect(page.tab.get_by_text(re.compile("(Waiting|Es warten): 4"))).to_be_visible()
        expect(leave).to_be_visible()


def test_many_images_at_once_get_a_label_after_a_question_alone(page: Page, line: Line) -> None:
    line.copy(15)
    page.tab.reload()
    expect(page.tab.get_by_text("Waiting: 21")).to_be_visible()
    page.tab.keyboard.press("g")
    page.tab.keyboard.press("Home")
    page.tab.keyboard.press("Shift+End")
    page.tab.keyboard.press("3")
    question = page.tab.get_by_role("dialog", name=re.compile("blue.*21"))
    expect(question).to_be_visible()
    assert page.violations() == []
    page.tab.keyboard.press("Enter")  # by habit: it must not mean yes
    expect(question).to_be_hidden()
    assert (len(line.waiting), labellings(line)) == (21, [])
    page.tab.keyboard.press("3")
    question.get_by_role("button", name="Yes").click()
    expect(page.tab.get_by_role("status")).to_contain_text("21")
    assert [len(names) for names in labellings(line)] == [21]


def test_undo_takes_back_ones_own_label_and_nobody_elses(page: Page, line: Line) -> None:
    mine = asked(page)
    page.tab.keyboard.press("1")
    expect(page.tab.get_by_role("status")).to_contain_text("saved")
    theirs = asked(page)
    with httpx.Client(base_url=line.running.url) as ben:
        ben.post("/login", json={"name": "ben", "password": PASSWORD}).raise_for_status()
        answer = ben.post("/labels/label", json={"images": [theirs, mine], "label": "green"})
        assert answer.json() == {"labelled": 1, "gone": [mine]}
    page.tab.keyboard.press("1")  # of what ben has labelled meanwhile
    expect(page.tab.get_by_role("alert")).to_contain_text("Not labelled: 1")
    page.tab.keyboard.press("u")
    expect(page.tab.get_by_role("status")).to_contain_text("again")
    assert asked(page) == mine
    assert (mine in line.labelled, line.labelled[theirs]) == (False, "green")


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
def test_a_label_that_is_not_saved_is_told_and_kept_until_it_is(
    page: Page, line: Line, is_done: bool
) -> None:
    def lose(route: Route) -> None:
        """Lose the request on its way, or the answer on its way back."""
        if is_done:
            route.fetch()
        route.abort()

    first = asked(page)
    page.tab.route("**/labels/label", lose, times=1)
    page.tab.keyboard.press("1")
    expect(page.tab.get_by_role("alert")).to_contain_text("Not saved")
    expect(page.tab.get_by_role("status")).not_to_contain_text("saved")
    assert page.violations() == []
    second = asked(page)
    page.tab.keyboard.press("2")
    expect(page.tab.get_by_role("status")).to_contain_text("green: 1 labelled, saved")
    expect(page.tab.get_by_role("alert")).to_be_empty()
    assert {name: line.labelled.get(name) for name in (first, second)} == {
        first: "red",
        second: "green",
    }
    page.problems.clear()  # the browser logs what is lost


def test_what_changes_something_needs_a_login_and_looking_does_not(line: Line) -> None:
    client = line.running.client
    for path, content in {
        "label": {"images": [], "label": "red"},
        "undo": {},
        "overrule": {"id": "0"},
    }.items():
        assert client.post(f"/labels/{path}", json=content).status_code == 401
    assert client.get("/labels/queue?count=1").json() == {"line": "line-1", "waiting": 6}


def test_the_first_label_asks_who_gives_it(browser: Page, line: Line) -> None:
    context = browser.tab.context.browser.new_context(locale="de-AT")  # type: ignore[union-attr]
    tab = context.new_page()
    tab.goto(f"{line.running.url}/labels/")
    expect(tab.locator("#waiting")).to_have_text("Es warten: 6")
    tab.get_by_role("img").evaluate("picture => picture.decode()")
    tab.keyboard.press("1")
    tab.get_by_role("button", name="Abbrechen").click()
    expect(tab.get_by_role("alert")).to_contain_text("Nicht gespeichert")
    expect(tab.locator("#waiting")).to_have_text("Es warten: 6")
    tab.keyboard.press("1")
    tab.get_by_label("Name").fill("anna")
    tab.get_by_label("Passwort").fill(PASSWORD)
    tab.keyboard.press("Enter")
    expect(tab.locator("#said")).to_contain_text("red: 1 beschriftet")
    context.close()


def test_a_class_that_the_model_lacks_and_an_image_that_is_gone_are_refused_with_a_remedy(
    page: Page, line: Line
) -> None:
    status, told = page.tab.evaluate(
        SEND, ["label", {"images": line.waiting, "label": "../../etc"}]
    )
    assert (status, told["remedy"]) == (
        400,
        "take one of red, green, blue, or make its folder first",
    )
    assert page.tab.evaluate(SEND, ["overrule", {"id": "0"}])[0] == 404
    assert line.running.client.get("/labels/pictures/..%2Fx").status_code == 404
    assert line.running.client.get(f"/labels/pictures/{line.waiting[0]}?size=9").status_code == 400
    page.problems.clear()  # the browser logs what is refused


def test_a_verdict_is_overruled_on_the_line_s_page_and_gets_its_class_there(
    page: Page, line: Line
) -> None:
    page.open(f"{line.running.url}/line/")
    verdict = line.inspect(0, name="part 9.png")
    expect(page.tab.locator("#image")).to_contain_text("part 9.png")
    page.tab.keyboard.press("w")
    expect(page.tab.locator("#overruled")).to_be_visible()
    expect(page.tab.get_by_text("Decide later")).to_be_focused()  # Enter gives no class by accident
    assert page.violations() == []
    assert line.waiting[0] == verdict["kept"]
    page.tab.keyboard.press("3")
    expect(page.tab.locator("#overruled")).to_be_hidden()
    assert line.labelled[verdict["kept"]] == "blue"
    assert "overruled" in line.history[-1]["images"][0]["doubts"]


def test_wrong_is_said_of_the_image_that_is_seen_whatever_comes_meanwhile(
    page: Page, line: Line
) -> None:
    stalled: list[Route] = []

    def stall(route: Route) -> None:
        stalled.append(route)

    page.open(f"{line.running.url}/line/")
    verdict = line.inspect(0, name="seen.png")
    expect(page.tab.get_by_role("img", name="seen.png")).to_be_visible()
    page.tab.route("**/line/pictures/*", stall, times=1)
    line.inspect(1, name="next.png")
    page.wait_until(lambda: stalled)
    page.tab.get_by_role("button", name="Wrong").click()
    question = page.tab.get_by_role("dialog")
    expect(question).to_contain_text("seen.png")
    stalled[0].continue_()
    for number in range(6):
        line.inspect(2, name=f"later {number}")
        expect(page.tab.get_by_role("region", name="Live")).to_contain_text(f"later {number}")
    expect(question).to_contain_text("seen.png")
    page.tab.keyboard.press("3")
    expect(question).to_be_hidden()
    expect(page.tab.get_by_role("region", name="Live")).to_contain_text("blue, saved")
    overruled = [each for each in line.history if "overruled" in str(each)]
    assert [each["images"][0]["image"] for each in overruled[-1:]] == ["seen.png"]
    assert line.labelled[verdict["kept"]] == "blue"


def test_wrong_that_is_not_saved_is_told_in_the_question_and_tried_again(
    page: Page, line: Line
) -> None:
    page.open(f"{line.running.url}/line/")
    verdict = line.inspect(0, name="seen.png")
    expect(page.tab.get_by_role("img", name="seen.png")).to_be_visible()
    page.tab.route("**/labels/overrule", lambda route: route.abort(), times=1)
    page.tab.keyboard.press("w")
    question = page.tab.get_by_role("dialog")
    expect(question.get_by_role("alert")).to_contain_text("Not saved")
    assert page.violations() == []
    question.get_by_role("button", name="Try again").click()
    page.tab.route("**/labels/label", lambda route: route.abort(), times=1)
    question.get_by_role("button", name="blue").click()
    expect(question.get_by_role("alert")).to_contain_text("Not saved")
    question.get_by_role("button", name="Try again").click()
    expect(question).to_be_hidden()
    assert line.labelled[verdict["kept"]] == "blue"
    page.problems.clear()  # the browser logs what is lost


def test_enter_after_a_login_on_the_line_s_page_does_not_log_out_again(
    browser: Page, line: Line
) -> None:
    with browser.another(locale="en") as page:
        page.open(f"{line.running.url}/line/")
        page.tab.get_by_role("button", name="Log in").click()
        page.tab.get_by_label("Name").fill("anna")
        page.tab.get_by_label("Password").fill(PASSWORD)
        page.tab.keyboard.press("Enter")
        leave = page.tab.get_by_role("button", name="Log anna out")
        expect(leave).to_be_visible()
        page.tab.keyboard.press("Enter")
        assert page.ask("fetch('/login').then((answer) => answer.json())")["name"] == "anna"
        expect(leave).to_be_visible()


def test_an_overruled_verdict_may_wait_for_its_class_before_all_others(
    page: Page, line: Line
) -> None:
    page.open(f"{line.running.url}/line/")
    verdict = line.inspect(1, name="part 9.png")
    expect(page.tab.locator("#image")).to_contain_text("part 9.png")
    page.tab.keyboard.press("p")
    for number in range(6):
        with page.tab.expect_response(re.compile(r"/line/state\?held=")):
            line.inspect(2, name=f"later {number}")
    page.tab.keyboard.press("w")
    expect(page.tab.locator("#overruled")).to_be_visible()
    page.tab.keyboard.press("Escape")
    page.tab.locator("#labels").click()
    expect(page.tab.locator("#facts")).to_contain_text("A person does not believe it")
    assert current(page) == verdict["kept"]


def test_the_line_says_what_it_reaches_in_service(page: Page, line: Line) -> None:
    for name in line.waiting:
        label = next(
            row[2]
            for row in line.running.client.get("/labels/queue").json()["images"]
            if row[0] == name
        )
        page.tab.evaluate(SEND, ["label", {"images": [name], "label": label}])
    page.open(f"{line.running.url}/line/")
    expect(page.tab.locator("#field")).to_have_text(
        re.compile(r"\d+\.\d% \(\d+% to \d+%\), \d+ labelled")
    )
    field = line.running.client.get("/line/state").json()["field"]
    assert field["accuracy"]["images"] >= 6
    assert page.violations() == []
    page.look(width=1280, height=800)
    assert page.ask("document.documentElement.scrollHeight") <= 800  # all is still seen at once
    assert field["promise"] is None  # this bundle promises nothing


# Everybody, everywhere


@pytest.mark.parametrize("mode", ["one", "grid"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_fits_and_axe_finds_nothing_wrong(page: Page, theme: str, mode: str) -> None:
    if mode == "grid":
        page.tab.keyboard.press("g")
        page.tab.keyboard.press("a")
    for width, height in ((390, 844), (768, 1024), (1280, 800), (3840, 2160)):
        page.look(width=width, height=height, theme=theme)
        expect(page.tab.locator("#picture" if mode == "one" else ".cell >> nth=0")).to_be_visible()
        assert page.ask("document.documentElement.scrollWidth <= innerWidth")
    assert page.violations() == []


def test_nothing_is_asked_of_another_host_and_the_console_is_silent(page: Page, line: Line) -> None:
    page.tab.keyboard.press("g")
    expect(page.tab.locator(".cell")).to_have_count(6)
    assert {httpx.URL(url).host for url in page.requests if not url.startswith("data:")} == {
        line.running.url.host
    }
    assert page.problems == []
    sent = line.running.client.get("/labels/").headers["content-security-policy"]
    assert "default-src 'none'" in sent
    assert "unsafe" not in sent


@pytest.mark.slow
def test_with_ten_thousand_images_the_document_stays_small_and_keys_are_answered(
    browser: Page, line: Line
) -> None:
    line.copy(10_000)
    assert len(line.waiting) == 10_006
    browser.open(f"{line.running.url}/labels/")
    log_in(browser)
    browser.tab.keyboard.press("g")
    expect(browser.tab.locator(".cell").first).to_be_visible()
    assert browser.tab.locator(".cell").count() < 200
    browser.tab.keyboard.press("End")
    expect(browser.tab.locator(".cell.current")).to_have_attribute("aria-posinset", "10006")
    assert browser.tab.locator(".cell").count() < 200
    most = browser.ask("""async () => {
      const grid = document.getElementById("grid");
      let most = 0;
      for (let step = 0; step < 60; step += 1) {
        grid.scrollTop = (step * 7919) % 100 / 100 * grid.scrollHeight;
        await new Promise(requestAnimationFrame);
        most = Math.max(most, document.querySelectorAll(".cell").length);
      }
      return most;
    }""")
    assert 0 < most < 200
    browser.tab.keyboard.press("Home")
    browser.tab.keyboard.press("Shift+End")
    expect(browser.tab.locator("#many-title")).to_have_text("Selected: 10,006")
