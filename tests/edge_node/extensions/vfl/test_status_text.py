"""What `edge-node status` says of sensors that learn together."""

from datetime import UTC, datetime

import msgspec

from broker_config.protocol import topics
from broker_config.protocol.codec import encode
from broker_config.protocol.messages import Message, Presence, Validation
from edge.status.federations import StatusMonitor, json_objects
from edge.status.rendering import render
from edge_node.extensions.vfl.messages import SensorState, VflOverview
from tests.support.terminal import console, text_lines
from tests.support.wire_messages import RUN, SESSION

NOW = datetime(2026, 3, 1, 9, 30, tzinfo=UTC)
ONLINE = Presence(session=SESSION, online=True)
OFFLINE = Presence(session=SESSION, online=False)
LINE = VflOverview(
    run=RUN,
    time=NOW,
    round=41,
    status="open",
    loss=0.25,
    rate=212.5,
    sensors=(
        SensorState(name="press", present=True, latency=0.0304, iterations=2),
        SensorState(name="oven", present=False),
    ),
)


def monitor(*messages: Message) -> StatusMonitor:
    found = StatusMonitor(now=lambda: NOW)
    for message in messages:
        topic = topics.status("steel")
        if isinstance(message, Presence):
            topic = topics.presence("steel", topics.COORDINATOR)
        found.update(topic, encode(message), retained=True)
    return found


def changed(message: VflOverview, **fields: object) -> VflOverview:
    return msgspec.structs.replace(message, **fields)


def shown_lines(found: StatusMonitor, width: int) -> list[str]:
    return text_lines(render(found, console(width)), width)


def test_of_a_line_that_learns_its_sensors_rounds_loss_and_latencies_are_shown() -> None:
    assert shown_lines(monitor(ONLINE, LINE), 60) == [
        "vertical federation steel: 2 sensors",
        "learning: 41 rounds closed, loss 0.250, 212.5 rounds per",
        "second",
        "node   state           latency  iterations",
        "press                    30 ms           2",
        "oven   absent",
    ]
    assert not monitor(LINE).ended
    assert monitor(changed(LINE, status="finished")).ended
    assert json_objects(monitor(LINE))[0]["sensors"][1]["name"] == "oven"


def test_of_a_line_it_is_shown_whether_its_model_is_worth_anything() -> None:
    judged = Validation(products=1000, accuracy=0.861, recall=0.41, baseline=0.85)
    assert shown_lines(monitor(ONLINE, changed(LINE, validation=judged)), 160)[2] == (
        "of the newest 1000 products, judged before they were learnt from, 86.1 % right "
        "(always the most frequent class: 85.0 %), mean recall 41.0 %"
    )
    judged = Validation(products=1, rmse=21.5, baseline=40.125)
    assert shown_lines(monitor(ONLINE, changed(LINE, validation=judged)), 160)[2] == (
        "of the newest 1 product, judged before they were learnt from, RMSE 21.5 (always their "
        "mean: 40.12)"
    )


def test_of_a_line_it_is_shown_what_it_waits_for() -> None:
    line = changed(LINE, rate=0.25, paused=True, awaited="more products with a label")
    assert shown_lines(monitor(ONLINE, line), 80)[1:3] == [
        "paused: 41 rounds closed, loss 0.250, 4.0 s a round",
        "waiting for more products with a label",
    ]
    gone = shown_lines(monitor(OFFLINE, LINE), 80)
    assert gone[1] == "learning: 41 rounds closed, loss 0.250", "nobody closes rounds"
    assert gone[2] == "the head is offline: sensors wait for it, and go on when it is back"


def test_what_a_sensor_waits_for_is_said_once() -> None:
    sensors = (SensorState(name="press", present=True, lacks="product P7: append its row"),)
    line = changed(LINE, paused=True, awaited="press", sensors=sensors)
    assert [each for each in shown_lines(monitor(ONLINE, line), 80) if "waiting" in each] == [
        "waiting for press, which lacks product P7: append its row"
    ]


def test_of_a_head_that_nothing_is_known_of_nothing_is_said() -> None:
    assert not any("offline" in each for each in shown_lines(monitor(LINE), 80))


def test_a_line_that_is_over_lacks_nobody() -> None:
    over = changed(LINE, status="finished", paused=True, awaited="oven")
    assert shown_lines(monitor(OFFLINE, over), 80)[1:] == [
        "finished: 41 rounds closed, loss 0.250",
        "node   latency  iterations",
        "press    30 ms           2",
        "oven",
    ]
