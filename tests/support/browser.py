"""A real browser for tests: chromium without a window, driven by Playwright."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page as Tab
from playwright.sync_api import expect, sync_playwright

from tests.support.programs import find_chromium
from tests.support.waiting import wait_until

# A page on a busy machine may be slow to show what is waited for.
MILLISECONDS = 120_000


class Page:
    """One tab.

    `problems` are errors and warnings of the console, `requests` the URLs that were asked for.
    """

    def __init__(self, tab: Tab):
        self.tab = tab
        self.problems: list[str] = []
        self.requests: list[str] = []
        tab.on("request", lambda request: self.requests.append(request.url))
        tab.on("pageerror", lambda error: self.problems.append(str(error)))
        tab.on(
            "console",
            lambda told: (
                self.problems.append(told.text) if told.type in ("error", "warning") else None
            ),
        )

    def open(self, url: str) -> None:
        """Load a page, to its end."""
        self.requests.clear()
        self.tab.goto(url)

    def ask(self, expression: str) -> Any:
        """What an expression of JavaScript gives."""
        return self.tab.evaluate(expression)

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait until something holds, while the page and its requests go on."""
        wait_until(condition, meanwhile=lambda: self.tab.wait_for_timeout(10) is None)

    @contextmanager
    def another(self, **context: Any) -> Iterator["Page"]:
        """A tab of another person, or one whose clock is moved; `context` as `browse` takes it."""
        browser = self.tab.context.browser
        assert browser
        with browser.new_context(**context) as found:
            yield Page(found.new_page())

    def look(self, *, width: int = 1200, height: int = 900, theme: Any = "light") -> None:
        """Change the window's size and the system's theme."""
        self.tab.set_viewport_size({"width": width, "height": height})
        self.tab.emulate_media(color_scheme=theme)

    def picture(self) -> bytes:
        """The whole page as PNG."""
        return self.tab.screenshot(full_page=True)

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return self.tab.pdf(print_background=True)

    def violations(self) -> list[str]:
        """What axe-core finds wrong for people who see, hear or move otherwise: rules,
        and where they are broken.
        """
        found = Axe().run(self.tab).response["violations"]
        return [f"{each['id']}: {[node['html'] for node in each['nodes']]}" for each in found]


@contextmanager
def browse(**context: Any) -> Iterator[Page]:
    """A fresh browser, and a tab in it; `context` as Playwright's `new_context` takes it:
    locale, viewport.
    """
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        try:
            tab = browser.new_context(**context).new_page()
            tab.set_default_timeout(MILLISECONDS)
            expect.set_options(timeout=MILLISECONDS)
            yield Page(tab)
        finally:
            browser.close()
