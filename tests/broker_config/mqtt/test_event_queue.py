"""The queue of MQTT events: full at so many bytes,
whether in few large events or in many small ones.
"""

import queue
from contextlib import suppress
from typing import Any, cast

import pytest

from broker_config.mqtt.client import Connected, Delivery
from broker_config.mqtt.event_queue import EVENT_OVERHEAD, EventQueue
from broker_config.transfer.blob_transfer import EVENT_QUEUE

CLIENT = cast(Any, None)
FRAME = 1 << 20  # bytes


def delivery(size: int) -> Delivery:
    return Delivery(CLIENT, "topic", bytes(size), retain=False, mid=0, qos=0)


def test_large_frames_fill_it_and_what_is_taken_makes_room() -> None:
    events = EventQueue(10 * FRAME)
    for _ in range(10):
        events.put_nowait(delivery(FRAME))
    with pytest.raises(queue.Full):
        events.put_nowait(delivery(0))
    for _ in range(10):
        assert len(events.get_nowait().payload) == FRAME
    assert events.empty()
    events.put_nowait(delivery(FRAME))


def test_it_fills_with_small_things_too_and_gives_them_back_in_order() -> None:
    events = EventQueue(100_000)
    mixed = [Connected(CLIENT) if number % 3 else delivery(number) for number in range(200)]
    put = []
    with suppress(queue.Full):
        for event in mixed:
            events.put_nowait(event)
            put.append(event)
    assert 50 < len(put) < 100
    assert [events.get_nowait() for _ in put] == put
    assert events.empty()
    with pytest.raises(queue.Empty):
        events.get(timeout=0.01)


def test_chunks_that_wait_for_a_blob_transfer_are_bounded_by_bytes() -> None:
    events, held = EventQueue(EVENT_QUEUE), 0
    for size in (100, 1 << 24):
        while not events.full():
            events.put_nowait(delivery(size))
            held += size + EVENT_OVERHEAD
        assert EVENT_QUEUE / 2 < held <= EVENT_QUEUE + size + EVENT_OVERHEAD
    while held:
        held -= len(events.get_nowait().payload) + EVENT_OVERHEAD
    with pytest.raises(queue.Empty):
        events.get_nowait()
