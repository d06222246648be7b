"""docs/troubleshooting.md has every message that a user can meet, and no other."""

import ast
import re
from collections import Counter

from broker_config.protocol.errors import BrokerError, BugError, EdgeNodeError, UsageError
from tests.support.paths import REPOSITORY
from tests.support.user_messages import PAGE, anonymous, entries, messages, missing, skeleton


def test_every_message_has_an_entry() -> None:
    lacking = missing()
    assert lacking == [], f"fill in and add to {PAGE.name}, where a user would look for it:\n\n{skeleton(lacking)}"


def test_every_entry_has_a_message() -> None:
    said = {anonymous(each.template) for each in messages()}
    assert sorted(entries().keys() - said) == []


def test_every_entry_explains_something_and_stands_once() -> None:
    assert [template for template, text in entries().items() if len(text) < 10 or "TODO" in text] == []
    written = re.findall(r"^- `([^`]+)`", PAGE.read_text(), re.MULTILINE)
    assert [template for template, count in Counter(map(anonymous, written)).items() if count > 1] == []


def test_messages_of_every_kind_are_found() -> None:
    found = {each.template for each in messages()}
    assert {
        "{folder} is not a folder",  # one of two that a condition chooses from
        "nothing listens at {place}: connection refused",  # assigned before it is raised
        "the request is larger than {bytes} MiB",  # of an error that derives from ours
        "that run of the federation is over",  # a refusal
        "a discrimination loss cannot be {raw}",  # passed on to a node
        "{} refuses a subscription: {}",  # logged
        "all images are of {name}; there is nothing to tell apart",  # found in the images
        "{groups} image(s) are the same in two classes:{groups}",  # likewise, in a function that makes the finding
        "{warnings} warning(s) and {hints} hint(s) on the images; {command} shows all",  # told when joining
        "connection lost ({reason}); trying again",  # said by a node
        "{node} is gone (round {round}): its connection ended",  # an event
    } <= found
    assert len(found) > 140


def test_each_section_is_found_by_its_command() -> None:
    page = PAGE.read_text()
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    linked = re.findall(r"\[([^]]+)\]\(#([^)]+)\)", page.partition("\n## ")[0])
    assert sorted(name for name, _ in linked) == sorted(headings)
    assert all(anchor == re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name, anchor in linked)


def test_the_exit_codes_are_those_of_the_table() -> None:
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE.read_text(), re.MULTILINE)}
    classes = (EdgeNodeError, UsageError, BrokerError, BugError)
    assert codes == {0, 130} | {each.exit_code for each in classes}


def test_every_error_of_ours_comes_with_a_remedy() -> None:
    for room in ("broker_config", "edge", "export", "trainer"):
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
