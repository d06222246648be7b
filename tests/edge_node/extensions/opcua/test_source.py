"""A real OPC UA server triggers a camera: a frame each, named by the part,
also after the server was killed.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker_config.protocol.errors import UsageError
from edge.inference.outcomes import Notice, Verdict
from edge_node.extensions.opcua import source as opcua
from tests.support.line_sources import fed, opened
from tests.support.network_camera import NetworkCamera, network_camera
from tests.support.opcua_server import OpcUaServer, node
from tests.support.waiting import wait_until_async


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpcUaServer]:
    server = OpcUaServer(tmp_path_factory.mktemp("opcua") / "server").start()
    yield server
    server.kill()


@pytest.fixture
def stream() -> Iterator[NetworkCamera]:
    with network_camera() as camera:
        yield camera


def table(server: OpcUaServer, camera: NetworkCamera, **others: Any) -> dict[str, Any]:
    return {
        "kind": "opcua",
        "url": server.url,
        "trigger": node("counter"),
        "input": camera.url,
    } | others


async def watching(source: Any) -> None:
    """Return when the source has subscribed."""
    await wait_until_async(lambda: source._last is not None)


def test_each_step_of_a_counter_takes_a_frame_of_that_moment_named_by_the_part(
    model, instance, server, stream
):
    async def run() -> list[Any]:
        [source] = opened(instance, table(server, stream, part=node("part")))
        found = []
        async with fed(model, source) as outbox:
            await watching(source)
            for number, color in enumerate([(255, 0, 0), (0, 255, 0), (255, 0, 0), (0, 255, 0)], 1):
                stream.show(color)
                # what was held of before has then been decoded
                await wait_until_async(lambda: stream.sent >= 20)
                await server.write(part=f"part {number}")
                await server.write(counter=number)
                found += await outbox.next()
            return found + outbox.rest()

    found = asyncio.run(run())
    assert [(each.image, each.label) for each in found] == [
        ("part 1", "red"),
        ("part 2", "green"),
        ("part 3", "red"),
        ("part 4", "green"),
    ]


def test_a_boolean_triggers_when_it_rises(model, instance, server, stream):
    async def run() -> list[Any]:
        await server.write(ready=True)
        [source] = opened(instance, table(server, stream, trigger=node("ready")))
        async with fed(model, source) as outbox:
            await watching(source)
            found = []
            for _ in range(2):
                await server.write(ready=False)
                await server.write(ready=True)
                found += await outbox.next()
            return found + outbox.rest()

    found = asyncio.run(run())
    assert len(found) == 2, "the first value is no trigger, nor is a fall"
    assert {each.source for each in found} == {f"opcua {server.url} {node('ready')}"}


def test_parts_that_came_too_fast_are_dropped_and_counted(server, stream):
    async def run() -> tuple[int, list[str]]:
        settings = opcua.Settings(url=server.url, trigger=node("counter"), input=stream.url)
        source, stop = opcua.OpcUa(settings, ahead=2), asyncio.Event()
        frames = source.frames(stop)
        first = asyncio.ensure_future(anext(frames))
        await watching(source)
        await server.write(counter=100)
        names = [(await first).name]
        for number in range(101, 106):
            await server.write(counter=number)  # while nobody asks for a frame
        await wait_until_async(lambda: source.dropped == 3)
        names += [(await anext(frames)).name for _ in range(2)]
        stop.set()
        await frames.aclose()
        return source.dropped, names

    assert asyncio.run(run()) == (3, ["#100", "#101", "#102"])


def test_triggers_that_came_while_nobody_watched_are_counted_in_the_log(
    instance, server, stream, caplog
):
    async def run() -> None:
        [source] = opened(instance, table(server, stream))
        for value in (200, 203):
            await server.write(counter=value)
            stop = asyncio.Event()
            coming = asyncio.ensure_future(anext(source.frames(stop), None))
            await wait_until_async(lambda source=source, value=value: source._last == value)
            stop.set()
            assert await coming is None

    asyncio.run(run())
    [told] = caplog.messages
    assert told.endswith("3 trigger(s) were missed; these parts were not inspected")


@pytest.mark.slow
def test_a_server_that_is_killed_is_told_and_taken_up_again(model, instance, stream, tmp_path):
    server = OpcUaServer(tmp_path / "server").start()

    async def run() -> list[Any]:
        [source] = opened(instance, table(server, stream))
        async with fed(model, source) as outbox:
            await watching(source)
            await server.write(counter=1)
            found = await outbox.next()
            server.kill()
            found += await outbox.next()
            await asyncio.to_thread(server.start)
            await wait_until_async(lambda: source._last == 0)  # with which the server begins anew
            await server.write(counter=1)
            while not isinstance(found[-1], Verdict):
                found += await outbox.next()
            return found

    try:
        found = asyncio.run(run())
    finally:
        server.kill()
    texts = [each.text for each in found if isinstance(each, Notice)]
    assert "brings no images" in texts[0]
    assert isinstance(found[-1], Verdict)


def test_what_cannot_be_used_is_told_with_a_remedy(model, instance, server, stream, tmp_path: Path):
    async def told(**others: Any) -> str:
        async with fed(model, *opened(instance, table(server, stream, **others))) as outbox:
            [notice] = await outbox.next()
            return str(notice.text)

    wrong = asyncio.run(told(trigger="ns=2;s=triger"))
    assert "the node ns=2;s=triger at" in wrong
    assert "(BadNodeIdUnknown)" in wrong
    assert "no trigger" in asyncio.run(told(trigger=node("label")))
    with pytest.raises(UsageError, match="node id"):
        opened(instance, table(server, stream, part="part"))
