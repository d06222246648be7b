"""Home Assistant finds a line by its broker, and shows its state."""

import contextlib
import json
import threading
from collections.abc import Callable
from typing import Any

import paho.mqtt.client as paho

from broker_config.broker.embedded import EmbeddedBroker
from edge.config.instance import Instance
from edge.daemon.line_settings import parse
from edge.outbox.limits import Limits
from edge.outbox.outbox import open_outbox
from edge_node.extensions.home_assistant.sink import topic
from tests.support.numbered_outcomes import OutcomeProcess
from tests.support.paths import REPOSITORY
from tests.support.waiting import PATIENCE


class Watcher:
    """The latest message of each topic."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self.latest: dict[str, Any] = {}
        self._news = threading.Condition()
        self._client = paho.Client(paho.CallbackAPIVersion.VERSION2)
        self._client.on_message = self._on_message
        self._client.on_connect = lambda client, *_: client.subscribe("#", qos=1)
        self._client.connect("127.0.0.1", broker.port)
        self._client.loop_start()

    def _on_message(self, _client: object, _data: object, message: paho.MQTTMessage) -> None:
        with self._news:
            text = message.payload.decode()
            self.latest[message.topic] = json.loads(text) if text.startswith("{") else text
            self._news.notify_all()

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        with self._news:
            assert self._news.wait_for(lambda: wanted(self.latest), PATIENCE), self.latest

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


BASE = "edge-node/v1/lines/line-1/homeassistant"


def test_another_user_of_the_same_broker_is_the_same_sink_and_none_of_verdicts(tmp_path):
    with open_outbox(tmp_path / "spool", Limits()) as outbox:
        names = set()
        for url in ("mqtt://broker", "mqtt://line:secret@broker:1883"):
            (wanted,) = parse(
                {"sinks": [{"kind": "homeassistant", "url": url}]}, tmp_path / "line.toml"
            ).sinks
            names.add(wanted.open_sink(Instance("line-1", tmp_path), outbox).name)
    assert names == {"homeassistant:mqtt://broker:1883"}


def test_the_topic_of_its_state_is_on_the_page():
    page = (REPOSITORY / "docs" / "home-assistant.md").read_text()
    assert f"`{topic('LINE')}`" in page


def test_home_assistant_finds_the_line_sees_its_state_and_hears_when_it_is_gone(
    mosquitto, tmp_path
):
    with contextlib.closing(Watcher(mosquitto)) as watcher:
        sink = {"kind": "homeassistant", "url": mosquitto.url}
        process = OutcomeProcess([sink], tmp_path / "state", count=7).until()
        watcher.until(lambda latest: latest.get(f"{BASE}/state", {}).get("parts") == 7)
        found = watcher.latest["homeassistant/device/edge-node-line-1/config"]
        assert watcher.latest[found["availability_topic"]] == "online"
        state = watcher.latest[found["state_topic"]]
        shown = {
            name: state[each["value_template"].removeprefix("{{ value_json.").removesuffix(" }}")]
            for name, each in found["components"].items()
        }
        assert shown == {
            "label": "scratches",
            "confidence": 90.0,
            "defect": "ON",
            "untaught": "OFF",
            "problem": "OFF",
            "message": None,
            "parts": 7,
            "defects": 7,
            "failures": 0,
        }
        assert {each["platform"] for each in found["components"].values()} == {
            "sensor",
            "binary_sensor",
        }
        assert len({each["unique_id"] for each in found["components"].values()}) == len(
            found["components"]
        )
        assert found["device"]["identifiers"] == ["edge-node-line-1"]
        assert found["origin"]["name"] == "edge-node"

        process.kill()
        watcher.until(lambda latest: latest[f"{BASE}/availability"] == "offline")  # the will
        again = OutcomeProcess([sink], tmp_path / "state", first=7, count=0).until()
        watcher.until(lambda latest: latest[f"{BASE}/availability"] == "online")
        again.end()
        watcher.until(lambda latest: latest[f"{BASE}/availability"] == "offline")
