"""A subscriber to one topic, by another client library's own means."""

import contextlib
import queue
import threading
from collections.abc import Iterator

import httpx
import paho.mqtt.client as paho


@contextlib.contextmanager
def subscriber(url: str, topic: str) -> Iterator[queue.Queue[paho.MQTTMessage]]:
    """What arrives on a topic, seen by another program's client."""
    messages: queue.Queue[paho.MQTTMessage] = queue.Queue()
    subscribed = threading.Event()
    broker = httpx.URL(url)
    watcher = paho.Client(paho.CallbackAPIVersion.VERSION2)
    watcher.on_message = lambda _client, _data, message: messages.put(message)
    watcher.on_subscribe = lambda *_: subscribed.set()
    watcher.connect(broker.host, broker.port)
    watcher.subscribe(topic, qos=1)
    watcher.loop_start()
    assert subscribed.wait(60)
    yield messages
    watcher.disconnect()
    watcher.loop_stop()
