"""docs/add-a-source.md does what it says: its source brings pictures, fails as one may,
and is read from a table.
"""

import asyncio
import re
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

from edge.inference.pipeline import Frame
from tests.support.paths import REPOSITORY
from tests.support.tiny_bundle import RED

PAGE = (REPOSITORY / "docs" / "add-a-source.md").read_text()
(FILE,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
PROJECT, TABLE = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def module() -> dict[str, Any]:
    """The page's file."""
    found: dict[str, Any] = {"__name__": "plant_snapshot"}
    exec(compile(FILE, "add-a-source.md", "exec"), found)  # noqa: S102  (our own page)
    return found


class Camera(BaseHTTPRequestHandler):
    """Answers each request with a picture."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(RED)

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def camera() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Camera) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_it_brings_one_picture_after_the_other_until_it_is_stopped(
    module: dict[str, Any], camera: str
) -> None:
    async def look() -> list[Frame]:
        stop, seen = asyncio.Event(), []
        async for frame in module["Snapshot"](module["Settings"](url=camera, every=0.01)).frames(
            stop
        ):
            seen.append(frame)
            if len(seen) == 3:
                stop.set()
        return seen

    frames = asyncio.run(look())
    assert [frame.name for frame in frames] == ["snapshot-1", "snapshot-2", "snapshot-3"]
    assert {frame.data for frame in frames} == {RED}


def test_a_camera_that_does_not_answer_is_an_oserror_so_that_the_source_is_opened_again(
    module: dict[str, Any],
) -> None:
    async def look() -> None:
        async for _ in module["Snapshot"](module["Settings"](url="http://127.0.0.1:1/")).frames(
            asyncio.Event()
        ):
            pass

    with pytest.raises(OSError, match="refused"):
        asyncio.run(look())


def test_the_pages_table_gives_its_settings_and_its_line_registers_them(
    module: dict[str, Any],
) -> None:
    (table,) = tomllib.loads(TABLE)["sources"]
    settings = msgspec.convert(table, module["Settings"])
    assert settings == module["Settings"](url="http://camera.plant.example/snapshot.jpg", every=0.5)
    assert settings.open_source(None).name == f"snapshot {settings.url}"
    registered = tomllib.loads(PROJECT)["project"]["entry-points"]["edge_node.sources"]
    assert registered == {table["kind"]: "plant_snapshot:Settings"}
