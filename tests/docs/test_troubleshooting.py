"""docs/troubleshooting.md has messages that there are, and links that lead somewhere;
every error has a remedy.
"""

import ast
import re
from collections import Counter

from broker_config.protocol.errors import BrokerError, BugError, EdgeNodeError, UsageError
from tests.support.paths import REPOSITORY

PAGE = REPOSITORY / "docs" / "troubleshooting.md"
ROOMS = ("broker_config", "edge", "edge_node", "export", "trainer", "research")
ENTRY = re.compile(r"^- `([^`]+)`\n((?:  .*\n)*)", re.MULTILINE)


def headings(text: str) -> set[str]:
    """The anchors of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_entry_is_of_a_message_that_there_is() -> None:
    """The longest part of it that never differs stands in the source."""
    sources = [path for room in ROOMS for path in (REPOSITORY / room).rglob("*.py")]
    constants = [node for path in sources for node in ast.walk(ast.parse(path.read_text()))]
    said = "\n".join(
        " ".join(node.value.split())
        for node in constants
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    parts = {
        template: re.split(r"\{[^}]*\}", template)
        for template, _ in ENTRY.findall(PAGE.read_text())
    }
    longest = {template: max(each, key=len).strip() for template, each in parts.items()}
    assert [template for template, part in longest.items() if part not in said] == []


def test_every_entry_explains_something_and_stands_once() -> None:
    entries = ENTRY.findall(PAGE.read_text())
    assert len(entries) > 50
    assert [template for template, text in entries if len(text) < 40 or "TODO" in text] == []
    written = Counter(re.sub(r"\{[^}]*\}", "{}", template) for template, _ in entries)
    assert [template for template, count in written.items() if count > 1] == []


def test_every_link_leads_to_a_page_and_a_heading() -> None:
    for page, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", PAGE.read_text()):
        target = PAGE.parent / page if page else PAGE
        assert target.exists(), page
        assert not anchor or anchor in headings(target.read_text()), f"{page}#{anchor}"


def test_each_section_is_found_by_its_command() -> None:
    page = PAGE.read_text()
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    linked = re.findall(r"\[([^]]+)\]\(#([^)]+)\)", page.partition("\n## ")[0])
    assert sorted(name for name, _ in linked) == sorted(headings)
    assert all(
        anchor == re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name, anchor in linked
    )


def test_the_exit_codes_are_those_of_the_table() -> None:
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE.read_text(), re.MULTILINE)}
    classes = (EdgeNodeError, UsageError, BrokerError, BugError)
    assert codes == {0, 130} | {each.exit_code for each in classes}


def test_every_error_of_ours_comes_with_a_remedy() -> None:
    for room in ("broker_config", "edge", "edge_node", "export", "trainer"):
        for path in (REPOSITORY / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith(
                    (
                        "EdgeNodeError",
                        "UsageError",
                        "BrokerError",
                        "BundleError",
                        "ImageError",
                        "ParityError",
                        "BugError",
                    )
                ):
                    assert len(node.args) == 2, f"{path}:{node.lineno} {ast.unparse(node)}"
