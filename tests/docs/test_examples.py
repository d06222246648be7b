"""Every command of README.md and docs/ is run,
in the page's order and in a folder of its own; see pages.toml.
"""

import faulthandler
import os
import re
import shutil
import tomllib
from pathlib import Path

import msgspec
import pytest

from broker_config.broker.embedded import start_broker
from edge.daemon import line_settings
from tests.support.page_reader import Reader, kind_of, lines
from tests.support.paths import REPOSITORY
from tests.support.ports import free_port
from tests.support.waiting import wait_until

PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md")))


class Rules(msgspec.Struct, forbid_unknown_fields=True):
    """What pages.toml says of a page."""

    given: str = ""  # commands for what the page's reader has already
    environment: dict[str, str] = {}  # options where the page leaves them open
    # what stands for what on the page; {port} is a free one, {broker} a broker of its own
    replace: dict[str, str] = {}
    # beginnings of commands, and why they are not run here; "": none of the page's is
    not_run: dict[str, str] = {}
    quick: bool = False


RULES = msgspec.convert(
    tomllib.loads((Path(__file__).parent / "pages.toml").read_text()), dict[str, Rules]
)
BLOCKS = {
    page: re.findall(
        r"^```(sh|python)\n(.*?)^```", (REPOSITORY / page).read_text(), re.MULTILINE | re.DOTALL
    )
    for page in PAGES
}
RUN = [
    pytest.param(page, marks=() if RULES.get(page, Rules()).quick else pytest.mark.slow)
    for page in PAGES
    if BLOCKS[page] and "" not in RULES.get(page, Rules()).not_run
]


def shortened(block: str, not_run: dict[str, str]) -> str:
    """The block without the commands that are not run."""
    if "$!" in block:  # a script, of which every command is run
        return block
    return "".join(f"{line}\n" for line in lines(block) if not line.startswith(tuple(not_run)))


def begin_anew(block: str, folder: Path) -> None:
    """Each block with a coordinator is another federation's,
    unless it goes on from the one before.
    """
    begins = [line for line in lines(block) if kind_of(line) in ("coordinate", "vfl coordinate")]
    if begins and "--new" not in begins[0]:
        for state in ("coordinator-state", "vfl-*", "edge-node-*/"):
            for each in folder.glob(state):
                shutil.rmtree(each)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", RUN)
def test_a_page_runs_from_its_first_command_to_its_last(page: str, tmp_path: Path) -> None:
    # pytest's, which would end a page that takes five minutes
    faulthandler.cancel_dump_traceback_later()
    rules = RULES.get(page, Rules())
    port = free_port()
    reader = Reader(
        tmp_path,
        {name: each.replace("{port}", str(port)) for name, each in rules.environment.items()},
    )
    try:
        reader.type(rules.given.replace("{repository}", str(REPOSITORY)))
        for number, (language, block) in enumerate(BLOCKS[page]):
            with start_broker(tmp_path / f"broker-{number}") as broker:
                text = shortened(block, rules.not_run) if language == "sh" else block
                for old, new in rules.replace.items():
                    text = text.replace(
                        old, new.replace("{broker}", broker.url).replace("{port}", str(port))
                    )
                if language == "sh":
                    begin_anew(text, reader.folder)
                    reader.type(text)
                else:
                    reader.python(text)
        reader.end()
    finally:
        reader.leave()


@pytest.mark.parametrize("page", RULES)
def test_what_is_said_of_a_page_is_of_something_on_it(page: str) -> None:
    rules, text = RULES[page], "\n".join(block for _, block in BLOCKS[page])
    assert [old for old in rules.replace if old not in text] == []
    commands = [
        line for language, block in BLOCKS[page] if language == "sh" for line in lines(block)
    ]
    assert [
        start
        for start in rules.not_run
        if start and not any(line.startswith(start) for line in commands)
    ] == []
    named = re.findall(r"tests/[\w/.]+", " ".join(rules.not_run.values()))
    assert [path for path in named if not (REPOSITORY / path).exists()] == []
    assert all(len(reason) > 10 for reason in rules.not_run.values())


def test_an_example_that_fails_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ended with 2: edge-node check nowhere"):
        Reader(tmp_path, {}).type("edge-node check nowhere\nedge-node --version")


def test_a_command_that_stays_and_fails_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ended with 2: edge-node console nowhere"):
        Reader(tmp_path, {}).type("edge-node console nowhere")


def test_nothing_is_left_of_a_page_that_fails(tmp_path: Path) -> None:
    reader = Reader(tmp_path, {})
    with pytest.raises(AssertionError, match="ended with 1"):
        reader.type("sleep 1234 & echo $! >pid\nfalse")
    pid = int((reader.folder / "pid").read_text())
    os.kill(pid, 0)
    reader.leave()
    wait_until(
        lambda: not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text()
    )


EXTENSIONS = (
    "docs/bundle-delivery.md",
    "docs/genicam.md",
    "docs/home-assistant.md",
    "docs/opc-ua.md",
    "docs/sparkplug.md",
)
TABLES = [
    (page, text)
    for page in ("docs/line.md", "docs/install.md", "docs/security.md", *EXTENSIONS)
    for text in re.findall(
        r"^```toml\n(.*?)^```", (REPOSITORY / page).read_text(), re.MULTILINE | re.DOTALL
    )
]


@pytest.mark.parametrize(("page", "text"), TABLES)
def test_every_table_of_a_line_is_read(page: str, text: str, tmp_path: Path) -> None:
    line_settings.parse(tomllib.loads(text), tmp_path / "line.toml")


def test_every_kind_and_table_that_an_extension_adds_to_a_line_is_shown_on_its_page() -> None:
    shown = {"sources": set[str](), "sinks": set[str](), "tables": set[str]()}
    for page, text in TABLES:
        if page in EXTENSIONS:
            tables = tomllib.loads(text)
            shown["tables"] |= tables.keys() - shown.keys()
            for name in ("sources", "sinks"):
                shown[name] |= {each["kind"] for each in tables.get(name, ())}
    for name, kinds in (("sources", line_settings.SOURCES), ("sinks", line_settings.SINKS)):
        added = {kind for kind, its in kinds.items() if not its.__module__.startswith("edge.")}
        assert shown[name] == added
    assert shown["tables"] == {*line_settings.ADDED_PARTS}
