"""What waits for a party of a line: so many bytes, whoever sends them."""

import queue
from contextlib import suppress
from typing import Any, cast

import pytest

from broker_config.mqtt.client import Delivery, LinkUp
from broker_config.protocol.frames import LARGEST_FRAME
from trainer.vfl.process_setup import Inbox

LINK = cast(Any, None)


def delivery(size: int) -> Delivery:
    return Delivery(LINK, "topic", bytes(size), retain=False, mid=0, qos=0)


def test_large_frames_fill_it_and_what_is_taken_makes_room() -> None:
    inbox = Inbox(10 * LARGEST_FRAME)
    for _ in range(10):
        inbox.put_nowait(delivery(LARGEST_FRAME))
    with pytest.raises(queue.Full):
        inbox.put_nowait(delivery(0))
    for _ in range(10):
        assert len(inbox.get_nowait().payload) == LARGEST_FRAME
    assert inbox.empty()
    inbox.put_nowait(delivery(LARGEST_FRAME))


def test_it_fills_with_small_things_too_and_gives_them_back_in_order() -> None:
    inbox = Inbox(100_000)
    events = [LinkUp(LINK) if number % 3 else delivery(number) for number in range(200)]
    put = []
    with suppress(queue.Full):
        for event in events:
            inbox.put_nowait(event)
            put.append(event)
    assert 50 < len(put) < 100
    assert [inbox.get_nowait() for _ in put] == put
    assert inbox.empty()
    with pytest.raises(queue.Empty):
        inbox.get(timeout=0.01)
