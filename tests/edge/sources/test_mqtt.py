"""Images on a topic: each is judged once, in order, over restarts, crashes and outages."""

import asyncio
import contextlib
import queue
import socket
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import paho.mqtt.client as paho
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from broker_config.broker.embedded import start_broker
from broker_config.mqtt.client import MqttClient
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.errors import UsageError
from edge.config.instance import Instance
from edge.inference import image_decoding
from edge.inference.outcomes import Failure, Verdict
from edge.inference.pipeline import Frame
from edge.sources import mqtt as mqtt_source
from tests.support.line_sources import fed, opened
from tests.support.ports import free_port
from tests.support.tiny_bundle import BLUE, GREEN, RED
from tests.support.waiting import wait_until_async

VERDICT = Verdict(
    image="", label="", confidence=1, probabilities={}, bundle="", milliseconds=0, time=""
)


@pytest.fixture
def broker(tmp_path) -> Iterator[str]:
    with start_broker(tmp_path / "broker", kind="mosquitto") as running:
        yield running.url


def publish(
    url: str, *messages: tuple[str, bytes], name: str = "", retain: bool = False, qos: int = 1
) -> None:
    """Another program publishes; returns when the broker has all."""
    address = httpx.URL(url)
    client = paho.Client(paho.CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    client.connect(address.host, address.port)
    client.loop_start()
    properties = Properties(PacketTypes.PUBLISH)
    if name:
        properties.UserProperty = ("name", name)
    for topic, payload in messages:
        client.publish(
            topic, payload, qos=qos, retain=retain, properties=properties
        ).wait_for_publish(60)
    client.disconnect()
    client.loop_stop()


def mqtt(url: str) -> dict[str, Any]:
    return {"kind": "mqtt", "url": url, "topic": "plant/+/image"}


def met(instance: Instance, url: str) -> None:
    """The source has been there before: the broker has its session."""
    [source] = opened(instance, mqtt(url))
    assert isinstance(source, mqtt_source.Mqtt)
    with MqttClient(
        Endpoint.parse(url), source._client_id, inbox=queue.Queue(), persistent=True
    ) as session:
        session.subscribe(source._topic)
        assert session.await_subscription(60)


async def names_up_to_last(frames: AsyncGenerator[Frame], url: str) -> list[str]:
    """The names of what comes, unjudged, before an image that is published now:
    the broker keeps the order.

    It goes at QoS 0, as which it waits for no acknowledgement of others.
    """
    await asyncio.to_thread(publish, url, ("plant/a/image", RED), name="last", qos=0)
    found: list[str] = []
    while "last" not in found:
        found.append((await asyncio.wait_for(anext(frames), 60)).name)
    return found[:-1]


def test_images_on_a_topic_are_judged_in_order_also_those_of_the_time_when_the_line_was_away(
    model, instance, broker
):
    async def run(*names: str) -> list[tuple[str, str, str]]:
        async with fed(model, *opened(instance, mqtt(broker))) as outbox:
            found = await outbox.next(len(names))
        return [(outcome.image, outcome.label, outcome.source) for outcome in found + outbox.rest()]

    met(instance, broker)
    for number, image in enumerate((RED, GREEN, RED)):  # the same picture twice is two parts
        publish(broker, ("plant/a/image", image), name=f"part {number}")
    publish(broker, ("plant/b/image", BLUE), ("plant/b/other", BLUE))
    source = "mqtt plant/+/image"
    assert asyncio.run(run("1", "2", "3", "4")) == [
        ("part 0", "red", source),
        ("part 1", "green", source),
        ("part 2", "red", source),
        ("plant/b/image", "blue", source),
    ]
    publish(broker, ("plant/a/image", BLUE), name="later")
    assert asyncio.run(run("1")) == [("later", "blue", source)]


def test_only_what_was_not_judged_comes_again_even_if_its_acknowledgement_was_lost(
    instance, broker
):
    async def bring(count: int, judged: int) -> list[str]:
        [source] = opened(instance, mqtt(broker))
        async with contextlib.aclosing(source.frames(asyncio.Event())) as frames:
            found = [await asyncio.wait_for(anext(frames), 60) for _ in range(count)]
        for frame in found[:judged]:  # after the connection has gone
            source.done(frame, VERDICT)
        return [frame.name for frame in found]

    met(instance, broker)
    for number, image in enumerate((RED, GREEN, BLUE)):
        publish(broker, ("plant/a/image", image), name=str(number))
    assert asyncio.run(bring(3, judged=1)) == ["0", "1", "2"]
    assert asyncio.run(bring(2, judged=0)) == ["1", "2"]


def test_a_message_that_was_in_hand_at_a_crash_says_so_until_it_is_judged(instance, broker):
    async def bring(*, judged: bool) -> list[int]:
        [source] = opened(instance, mqtt(broker))
        async with contextlib.aclosing(source.frames(asyncio.Event())) as frames:
            found = [await asyncio.wait_for(anext(frames), 60) for _ in range(2)]
            for frame in found if judged else ():
                source.done(frame, VERDICT)
        return [frame.crashes for frame in found]

    met(instance, broker)
    for image in (RED, GREEN):
        publish(broker, ("plant/a/image", image))
    assert asyncio.run(bring(judged=False)) == [0, 0]
    assert asyncio.run(bring(judged=True)) == [1, 1]
    for image in (RED, GREEN):
        publish(broker, ("plant/a/image", image))
    assert asyncio.run(bring(judged=True)) == [0, 0]


def test_of_equal_images_each_counts_also_after_a_kill_between_them(instance, broker):
    async def bring(count: int, judged: int) -> int:
        [source] = opened(instance, mqtt(broker))
        async with contextlib.aclosing(source.frames(asyncio.Event())) as frames:
            found = [await asyncio.wait_for(anext(frames), 60) for _ in range(count)]
            for frame in found[:judged]:
                source.done(frame, VERDICT)
            return len(found) + len(await names_up_to_last(frames, broker))

    met(instance, broker)
    publish(broker, *[("plant/a/image", RED)] * 3, name="part")
    assert asyncio.run(bring(3, judged=1)) == 3
    assert asyncio.run(bring(2, judged=2)) == 2


def test_an_image_that_the_broker_repeats_while_it_is_in_hand_is_brought_once(instance, broker):
    async def run() -> None:
        [source] = opened(instance, mqtt(broker))
        stop = asyncio.Event()
        frames = source.frames(stop)
        first = await asyncio.wait_for(anext(frames), 60)
        source._in_hand[0][0].client._paho.socket().shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
        again = asyncio.create_task(anext(frames, None))
        await wait_until_async(lambda: source._in_hand[0][0].repeated)  # it has connected again
        assert not again.done()
        source.done(first, VERDICT)
        stop.set()
        assert await again is None
        source._checkpoint.prune(0)  # type: ignore[attr-defined]

    met(instance, broker)
    publish(broker, ("plant/a/image", RED), name="part")
    asyncio.run(run())
    publish(broker, ("plant/a/image", GREEN), name="another")

    async def first_name() -> str:
        [source] = opened(instance, mqtt(broker))
        return (await asyncio.wait_for(anext(source.frames(asyncio.Event())), 60)).name

    assert asyncio.run(first_name()) == "another", (
        "it was acknowledged in the connection that counts"
    )


def test_the_broker_sends_no_more_than_the_window_before_the_first_is_judged(instance, broker):
    met(instance, broker)
    publish(broker, *[("plant/a/image", RED)] * (2 * mqtt_source.WINDOW))

    async def count() -> int:
        [source] = opened(instance, mqtt(broker))
        frames = source.frames(asyncio.Event())
        await asyncio.wait_for(anext(frames), 60)
        return 1 + len(await names_up_to_last(frames, broker))

    assert asyncio.run(count()) == mqtt_source.WINDOW


def test_bad_and_too_large_images_are_failures_and_retained_ones_are_left_out(
    model, instance, broker, monkeypatch
):
    monkeypatch.setattr(mqtt_source, "MAX_BYTES", 5000)
    monkeypatch.setattr(image_decoding, "MAX_BYTES", 5000)

    async def run() -> list[Any]:
        async with fed(model, *opened(instance, mqtt(broker))) as outbox:
            await asyncio.to_thread(
                publish, broker, ("plant/a/image", b""), ("plant/a/image", b"x" * 9000)
            )
            await asyncio.to_thread(publish, broker, ("plant/a/image", RED))
            found = await outbox.next(3)
        return found + outbox.rest()

    publish(broker, ("plant/a/image", BLUE), retain=True)
    met(instance, broker)
    empty, large, good = asyncio.run(run())
    assert isinstance(empty, Failure)
    assert "is empty" in empty.error
    assert "is larger than" in large.error
    assert good.label == "red"


def test_a_broker_that_is_not_there_yet_is_told_and_tried_again(model, instance, tmp_path):
    port = free_port()

    async def run() -> None:
        async with fed(model, *opened(instance, mqtt(f"mqtt://127.0.0.1:{port}"))) as outbox:
            [notice] = await outbox.next()
            assert "nothing listens" in notice.text
            with await asyncio.to_thread(
                start_broker, tmp_path / "broker", port=port, kind="mosquitto"
            ) as running:
                verdict = None
                while verdict is None:  # until it has subscribed
                    await asyncio.to_thread(publish, running.url, ("plant/a/image", RED))
                    verdict = next(
                        (each for each in outbox.rest() if isinstance(each, Verdict)), None
                    )
                assert verdict.label == "red"

    asyncio.run(run())


def test_a_broker_that_says_nothing_does_not_hold_up_the_end(model, instance):
    with socket.create_server(("127.0.0.1", 0)) as silent:

        async def run() -> None:
            async with fed(
                model, *opened(instance, mqtt(f"mqtt://127.0.0.1:{silent.getsockname()[1]}"))
            ):
                connection, _ = await asyncio.to_thread(silent.accept)
            connection.close()

        asyncio.run(run())


@pytest.mark.parametrize("topic", ["", "a/#/b", "a+/b", "a\0"])
def test_a_topic_that_cannot_be_is_refused(instance, topic):
    with pytest.raises(UsageError, match="subscribed"):
        opened(instance, mqtt("mqtt://127.0.0.1:1") | {"topic": topic})
