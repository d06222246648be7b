"""docs/add-a-sink.md does what it says: its sink delivers defects,
and its settings are those of the page.
"""

import re
import socket
import tomllib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from edge.sinks.sink import Item
from tests.support.outcomes_at_noon import notice, verdict
from tests.support.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "add-a-sink.md").read_text()
(FILE,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
PROJECT, TABLE = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def module() -> dict[str, Any]:
    """The page's file."""
    found: dict[str, Any] = {"__name__": "plant_syslog"}
    exec(compile(FILE, "add-a-sink.md", "exec"), found)  # noqa: S102  (our own page)
    return found


@pytest.fixture
def receiver() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.settimeout(30)
        yield listening


def test_defects_arrive_and_nothing_else_does(
    module: dict[str, Any], receiver: socket.socket
) -> None:
    sink = module["Syslog"](module["Settings"](port=receiver.getsockname()[1]))
    good, defect = verdict(1, defect=False), verdict(2, defect=True)
    sink.deliver([Item(seq, each, False) for seq, each in enumerate((good, notice(), defect), 1)])
    sink.close()
    assert receiver.recv(1000) == b"<132>edge-node[3]: part-2.png: scratches"
    receiver.setblocking(False)
    with pytest.raises(BlockingIOError):
        receiver.recv(1000)


def test_a_receiver_that_is_away_is_reported_with_what_was_delivered(
    module: dict[str, Any],
) -> None:
    sink = module["Syslog"](module["Settings"](host="nowhere.invalid"))
    with pytest.raises(module["SinkDown"]) as down:
        sink.deliver(
            [Item(1, verdict(1, defect=False), False), Item(2, verdict(2, defect=True), False)]
        )
    assert down.value.delivered == 1


def test_the_pages_table_gives_its_settings_and_its_line_registers_them(
    module: dict[str, Any],
) -> None:
    (table,) = tomllib.loads(TABLE)["sinks"]
    settings = msgspec.convert(table, module["Settings"])
    assert settings == module["Settings"](host="logs.plant.example")
    assert settings.open_sink(None, None).name == "syslog:logs.plant.example:514"
    registered = tomllib.loads(PROJECT)["project"]["entry-points"]["edge_node.sinks"]
    assert registered == {table["kind"]: "plant_syslog:Settings"}
