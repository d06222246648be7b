"""`edge-node status`: what it makes of what is retained, how it looks,
and against a real broker.
"""

import itertools
import json
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker_config.broker.embedded import EmbeddedBroker
from broker_config.mqtt.client import Endpoint, MqttClient
from broker_config.protocol import topics
from broker_config.protocol.codec import encode
from broker_config.protocol.messages import (
    AnyMessage,
    NodeState,
    Overview,
    Presence,
    RoundState,
    Spec,
)
from broker_config.security import member_list
from edge.status.federations import (
    FederationStatus,
    StatusMonitor,
    fetch,
    json_object,
    json_objects,
)
from edge.status.rendering import notices, render
from tests.support.manual_clock import Clock
from tests.support.plants import CLASSES, FEDERATION, Process, draw, here, run, start
from tests.support.provisioned_federation import Guarded
from tests.support.terminal import Terminal, console, text_lines
from tests.support.trial_kind import TrialOverview, registered
from tests.support.waiting import wait_until
from tests.support.wire_messages import CASES, MANIFEST, RUN, SESSION

PLANTS = ("plant-a", "plant-b")
NOW = datetime(2026, 3, 1, 9, 30, tzinfo=UTC)
SPEC = msgspec.structs.replace(CASES[0], federation="steel", nodes=5, quorum=4)
OPEN = RoundState(run=RUN, round=9, status="open", broadcast=MANIFEST)
GATHERING = RoundState(run=RUN, round=0, status="gathering")
ONLINE = Presence(session=SESSION, online=True)
OFFLINE = Presence(session=SESSION, online=False)
NODES = (
    NodeState(
        node="plant-10",
        doing="sending",
        awaited=True,
        done=40,
        total=100,
        round=8,
        weight=0.6931,
        heard=1.0,
    ),
    NodeState(
        node="plant-2",
        doing="training",
        awaited=True,
        round=8,
        weight=0.5,
        bytes=72_500_000,
        heard=130.0,
    ),
    NodeState(node="plant-1", doing="waiting", round=9, weight=0.25, bytes=81_500_000, heard=12.0),
    NodeState(
        node="plant-3", doing="absent", round=7, heard=4000.0, error="round 8: its connection ended"
    ),
    NodeState(
        node="mallory",
        doing="refused",
        error="round 8: its message \x1b[2J cannot be read: JSON is malformed",
    ),
)
OVERVIEW = Overview(
    run=RUN,
    time=NOW,
    round=9,
    rounds=30,
    status="open",
    contributions=2,
    quorum=4,
    left=75.0,
    nodes=NODES,
)
TOPICS = {
    Spec: topics.spec,
    RoundState: topics.round_state,
    Overview: topics.status,
    Presence: lambda name: topics.presence(name, topics.COORDINATOR),
    TrialOverview: topics.status,
}
OTHER = TrialOverview()


def topic_of(message: AnyMessage, federation: str = "steel") -> str:
    return TOPICS[type(message)](federation)


def monitor(
    *messages: AnyMessage, retained: bool = True, clock: Clock | None = None, now: datetime = NOW
) -> StatusMonitor:
    found = StatusMonitor(clock=clock or Clock(), now=lambda: now)
    for message in messages:
        found.update(topic_of(message), encode(message), retained=retained)
    return found


def status(*messages: AnyMessage) -> FederationStatus:
    (found,) = monitor(*messages).statuses()
    return found


def changed(message: AnyMessage, **fields: object) -> AnyMessage:
    return msgspec.structs.replace(message, **fields)


# What is made of the messages


def test_an_older_overview_of_the_run_that_comes_again_is_not_believed() -> None:
    newer = changed(OVERVIEW, time=NOW + timedelta(seconds=9), contributions=3)
    assert status(SPEC, OPEN, ONLINE, newer, OVERVIEW) == status(SPEC, OPEN, ONLINE, newer)
    assert status(SPEC, OPEN, ONLINE, OVERVIEW, newer).contributions == 3


def test_nothing_is_shown_of_a_federation_whose_spec_is_not_there() -> None:
    assert monitor(OPEN, ONLINE, OVERVIEW).statuses() == []


def test_what_a_message_said_is_as_old_as_the_message() -> None:
    clock = Clock()
    found = monitor(SPEC, OPEN, ONLINE, OVERVIEW, clock=clock, now=NOW + timedelta(seconds=60))
    clock.now += 10
    (shown,) = found.statuses()
    assert (shown.age, shown.left) == (70, 5)
    assert [(node.node, node.heard) for node in shown.nodes] == [
        ("mallory", None),
        ("plant-1", 82),
        ("plant-2", 200),
        ("plant-3", 4070),
        ("plant-10", 71),
    ]
    clock.now += 10
    assert found.statuses()[0].left == 0


@pytest.mark.parametrize("skew", [-3600, 3600])
def test_of_what_arrives_just_now_the_age_does_not_depend_on_the_clocks(skew: float) -> None:
    found = monitor(SPEC, OVERVIEW, retained=False, now=NOW + timedelta(seconds=skew))
    assert found.statuses()[0].age == 0


def test_a_retained_overview_from_the_future_is_new() -> None:
    assert monitor(SPEC, OVERVIEW, now=NOW - timedelta(hours=1)).statuses()[0].age == 0


def test_what_is_left_of_an_earlier_run_does_not_count() -> None:
    other = changed(SPEC, run="f" * 16)
    shown = status(other, OPEN, ONLINE, OVERVIEW)
    assert (shown.status, shown.round, shown.age, shown.nodes) == ("gathering", 0, None, ())


def test_a_message_that_says_nothing_new_changes_nothing() -> None:
    found = monitor(SPEC, OVERVIEW)
    assert not found.update(topic_of(OVERVIEW), encode(OVERVIEW), retained=False)
    assert found.update(
        topic_of(OVERVIEW), encode(changed(OVERVIEW, contributions=3)), retained=False
    )
    assert found.statuses()[0].contributions == 3


def test_what_cannot_be_read_is_named_until_something_readable_comes() -> None:
    found = monitor(SPEC, OPEN)
    found.update(topic_of(OPEN), b"\x1b[2J", retained=True)
    assert found.statuses()[0].round == 9
    last = shown_lines(found, 200)[-1]
    assert last.startswith(
        "ignored an unreadable message on edge-node/v1/steel/round: JSON is malformed"
    )
    found.update(topic_of(OPEN), encode(OPEN), retained=False)
    assert not found.unreadable


def test_a_federation_of_a_further_kind_is_shown_in_its_own_words() -> None:
    with registered():
        assert shown_lines(monitor(ONLINE, OTHER), 60) == [
            "trial steel",
            "at work",
            "node   state           pulse",
            "press  absent             72",
            "press is missed",
        ]
        assert "nobody is there" in shown_lines(monitor(OFFLINE, OTHER), 60)
        assert not monitor(OTHER).ended
        assert monitor(changed(OTHER, done=True)).ended
        assert json_objects(monitor(OTHER))[0]["federation"] == "steel"
        assert json_objects(monitor(OTHER))[0]["says"] == "at work"


def test_the_words_of_a_further_kind_of_federation_cannot_move_the_cursor() -> None:
    with registered():
        shown = shown_lines(monitor(ONLINE, changed(OTHER, says="\x1b[2J")), 60)
    assert not any("\x1b" in line for line in shown)


def test_a_federation_of_a_kind_that_is_not_installed_is_named() -> None:
    with registered():
        payload = encode(OTHER)
    found = monitor(SPEC, OPEN)
    found.update(topics.status("copper"), payload, retained=True)
    last = shown_lines(found, 200)[-1]
    assert "TrialOverview" in last
    assert "install" in last
    assert found.statuses()[0].round == 9


@pytest.mark.parametrize(
    ("state", "presence", "ended"),
    [
        (OPEN, OFFLINE, False),
        (changed(OPEN, status="finished"), ONLINE, False),  # nodes still fetch the result
        (changed(OPEN, status="finished"), OFFLINE, True),
        (changed(OPEN, status="aborted"), ONLINE, True),
    ],
)
def test_a_federation_has_ended_when_nothing_more_will_come(
    state: RoundState, presence: Presence, ended: bool
) -> None:
    assert status(SPEC, state, presence, OVERVIEW).ended == ended


# What deserves attention


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ((OPEN, ONLINE, OVERVIEW), ["round 9 waits for plant-2, plant-10"]),
        (
            (OPEN, OFFLINE, changed(OVERVIEW, nodes=())),
            ["the coordinator is offline: nodes wait for it, and go on when it is back"],
        ),
        (
            (OPEN, ONLINE, changed(OVERVIEW, paused=True)),
            ["paused: round 9 waits for plant-2, plant-10 to come back"],
        ),
        (
            (OPEN, ONLINE, changed(OVERVIEW, paused=True, nodes=())),
            ["paused: round 9 waits for more nodes to come back"],
        ),
        (
            (OPEN, ONLINE, changed(OVERVIEW, nodes=(), more=7)),
            ["7 more nodes did not fit into the coordinator's message"],
        ),
        (
            (OPEN, ONLINE),
            [
                "nothing is known of the nodes: this user may not read edge-node/v1/steel/status, "
                "or the coordinator is an older one"
            ],
        ),
        ((changed(OPEN, status="finished"), OFFLINE), []),
    ],
)
def test_it_is_said_what_deserves_attention(
    messages: tuple[AnyMessage, ...], said: list[str]
) -> None:
    assert list(notices(status(SPEC, *messages), NOW)) == said


def in_days(days: float) -> datetime:
    return NOW + timedelta(days=days)


def test_certificates_that_end_within_30_days_on_the_same_day_are_told_together() -> None:
    ends = {"a": 31, "b": 29.2, "c": 5, "d": 5.1, "e": -1}
    nodes = tuple(
        NodeState(node=name, doing="waiting", expires=in_days(days)) for name, days in ends.items()
    )
    shown = status(
        SPEC, OPEN, ONLINE, changed(OVERVIEW, nodes=(*nodes, NodeState(node="f", doing="waiting")))
    )
    assert list(notices(shown, NOW)) == [
        "the certificate of e expired on 2026-02-28: new kits are needed",
        "the certificate of c, d expires on 2026-03-06, in 5 days: new kits are needed",
        "the certificate of b expires on 2026-03-30, in 29 days: new kits are needed",
    ]
    first = next(notices(shown, in_days(-2)))
    assert first == "the certificate of e expires on 2026-02-28, in 1 day: new kits are needed"


# How it looks


def shown_lines(found: StatusMonitor, width: int, height: int | None = None) -> list[str]:
    return text_lines(render(found, console(width), height), width)


SIXTY = """\
federation steel: afedcl, mobilenet_v2
round 9 of 30: 2 contributions (quorum 4), 1 min 20 s to its
deadline
round 9 waits for plant-2, plant-10
node      state            last seen  round  weight       up
mallory   refused
plant-1   waiting               12 s      9   0.250  81.5 MB
plant-2   training        2 min 10 s      8   0.500  72.5 MB
plant-3   absent          1 h 10 min      7
plant-10  sending 40%            1 s      8   0.693
mallory: round 8: its message �[2J cannot be read: JSON is …
plant-3: round 8: its connection ended
last change 0 s ago"""


def test_the_table_in_sixty_columns() -> None:
    assert "\n".join(shown_lines(monitor(SPEC, OPEN, ONLINE, OVERVIEW), 60)) == SIXTY


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_line_is_wider_than_the_terminal_and_who_does_what_has_room_in_any(width: int) -> None:
    drawn = shown_lines(monitor(SPEC, OPEN, OFFLINE, changed(OVERVIEW, paused=True, more=3)), width)
    assert all(len(line) <= width for line in drawn)
    title = next(line.split() for line in drawn if line.startswith("node"))
    assert title[:4] == ["node", "state", "last", "seen"]
    assert ("weight" in title) == (width >= 60)


@pytest.mark.parametrize("width", [60, 100])
def test_of_two_hundred_nodes_those_beyond_the_screen_are_counted(width: int) -> None:
    many = tuple(
        NodeState(
            node=f"plant-{number}",
            doing="training",
            awaited=number > 150,
            heard=number / 2,
            error="gone",
        )
        for number in range(200)
    )
    found = monitor(SPEC, OPEN, ONLINE, changed(OVERVIEW, nodes=many))
    drawn = shown_lines(found, width, 24)
    assert len(drawn) <= 23
    assert (
        "waits for plant-151, plant-152, plant-153, plant-154, plant-155 and 44 more"
        in " ".join(drawn)
    )
    assert re.search(r"^and \d+ more: \d+ training$", "\n".join(drawn), re.MULTILINE)
    assert "and 195 more errors" in drawn
    assert len(shown_lines(found, width)) > 200  # where nothing scrolls away there is room for all


@pytest.mark.parametrize(
    ("state", "overview", "said"),
    [
        (GATHERING, OVERVIEW, "waiting for its nodes: 3 of 4, 30 rounds"),
        (GATHERING, None, "waiting for its nodes: 4, 30 rounds"),
        (changed(OPEN, status="finished"), OVERVIEW, "finished: 30 rounds"),
        (
            changed(OPEN, status="aborted", reason="no\x07more"),
            OVERVIEW,
            "aborted in round 9 of 30: no�more",
        ),
        (OPEN, None, "round 9 of 30"),
    ],
)
def test_the_second_line_says_where_the_federation_stands(
    state: RoundState, overview: Overview | None, said: str
) -> None:
    assert shown_lines(monitor(SPEC, state, *([overview] if overview else [])), 80)[1] == said


def test_several_federations_have_two_lines_each_and_one_more_if_nobody_coordinates() -> None:
    found = monitor(SPEC, OPEN, ONLINE, OVERVIEW)
    found.update(topics.spec("wood"), encode(changed(SPEC, federation="wood")), retained=True)
    assert shown_lines(found, 80) == [
        "federation steel: afedcl, mobilenet_v2",
        "round 9 of 30: 2 contributions (quorum 4), 1 min 20 s to its deadline",
        "federation wood: afedcl, mobilenet_v2",
        "waiting for its nodes: 4, 30 rounds",
        "the coordinator is offline: nodes wait for it, and go on when it is back",
    ]


# Against a broker


class Coordinator:
    """Publishes what a coordinator would."""

    def __init__(self, endpoint: Endpoint):
        self._mqtt = MqttClient(
            endpoint, "coordinator", inbox=queue.Queue(), persistent=False
        ).open()

    def publish(self, *messages: AnyMessage, federation: str = "steel") -> None:
        for message in messages:
            self._mqtt.publish(topic_of(message, federation), encode(message), retain=True)
        assert self._mqtt.flush(60)

    def close(self) -> None:
        self._mqtt.close()


@pytest.fixture
def coordinator(mosquitto: EmbeddedBroker) -> Iterator[Coordinator]:
    running = Coordinator(Endpoint.parse(mosquitto.url))
    yield running
    running.close()


def just_now(**fields: object) -> AnyMessage:
    return changed(OVERVIEW, time=datetime.now(UTC), **fields)


def test_without_a_terminal_it_is_shown_once(
    coordinator: Coordinator, mosquitto: EmbeddedBroker
) -> None:
    coordinator.publish(SPEC, OPEN, ONLINE, just_now())
    result = run("status", mosquitto.url, COLUMNS="60")
    assert (result.returncode, result.stderr) == (0, "")
    assert [line.rstrip() for line in result.stdout.splitlines()[4:6]] == SIXTY.splitlines()[4:6]
    assert "\x1b" not in result.stdout


def test_an_output_without_utf_8_gets_escapes(
    coordinator: Coordinator, mosquitto: EmbeddedBroker
) -> None:
    coordinator.publish(SPEC, OPEN, ONLINE, just_now())
    result = run("status", mosquitto.url, COLUMNS="100", PYTHONIOENCODING="latin-1")
    assert (result.returncode, result.stderr) == (0, "")
    assert r"its message \ufffd[2J cannot be read" in result.stdout


def test_as_json_a_federation_is_one_object_with_all_that_is_known(
    coordinator: Coordinator, mosquitto: EmbeddedBroker
) -> None:
    coordinator.publish(SPEC, OPEN, OFFLINE, just_now())
    result = here("status", mosquitto.url, "--json")
    assert result.returncode == 0, result.stderr
    shown = json.loads(result.stdout)
    assert set(shown) == {field.name for field in msgspec.structs.fields(FederationStatus)}
    assert (shown["federation"], shown["online"], shown["status"], shown["round"]) == (
        "steel",
        False,
        "open",
        9,
    )
    assert {node["node"]: node["doing"] for node in shown["nodes"]} == {
        node.node: node.doing for node in NODES
    }
    assert all(
        set(node) == {field.name for field in msgspec.structs.fields(NodeState)}
        for node in shown["nodes"]
    )
    assert 0 <= shown["age"] < 30


def test_with_a_kit_the_end_of_its_certificate_and_charter_and_of_the_coordinator_s_are_told_too(
    provisioned: Guarded,
) -> None:
    """Each of another day, by a clock shortly before the first of them."""
    kits, key = provisioned.kits, provisioned.members.registry.key
    signed = kits["monitor"].members()
    soon = datetime.now(UTC) + timedelta(days=20)
    lasting = msgspec.structs.replace(
        signed,
        expires=soon,
        coordinator=msgspec.structs.replace(signed.coordinator, expires=soon + timedelta(days=2)),
    )
    monitor = msgspec.structs.replace(kits["monitor"], charter=member_list.sign(lasting, key))
    node = NodeState(node="plant-a", doing="waiting", expires=soon + timedelta(days=4))
    with closing(Coordinator(Endpoint.from_kit(kits["coordinator"]))) as coordinator:
        coordinator.publish(
            changed(SPEC, federation="steel"), OPEN, ONLINE, just_now(nodes=(node,))
        )
        (shown,) = fetch(Endpoint.from_kit(monitor), "steel").statuses()
    assert [
        notice.partition(":")[0]
        for notice in notices(shown, datetime.now(UTC) + timedelta(hours=1))
    ] == [
        (
            f"the certificate of coordinator expires on {lasting.coordinator.expires:%Y-%m-%d}, "
            "in 21 days"
        ),
        f"the certificate of plant-a expires on {node.expires:%Y-%m-%d}, in 23 days",
        f"the charter in this kit expires on {soon:%Y-%m-%d}, in 19 days",
    ]
    assert shown.certificates["monitor"] == kits["monitor"].expires()
    told = json.loads(msgspec.json.encode(json_object(shown)))
    assert datetime.fromisoformat(told["charter"]) == soon
    assert [datetime.fromisoformat(each["expires"]) for each in told["nodes"]] == [node.expires]


def test_one_of_several_federations_is_shown_by_its_name(
    coordinator: Coordinator, mosquitto: EmbeddedBroker
) -> None:
    coordinator.publish(SPEC, OPEN, ONLINE, just_now())
    coordinator.publish(changed(SPEC, federation="wood"), federation="wood")
    all_ = [
        json.loads(line) for line in here("status", mosquitto.url, "--json").stdout.splitlines()
    ]
    assert [each["federation"] for each in all_] == ["steel", "wood"]
    assert len(here("status", mosquitto.url).stdout.splitlines()) == 5
    assert "plant-10" in here("status", mosquitto.url, "--federation", "steel").stdout
    result = here("status", mosquitto.url, "--federation", "steal")
    assert result.returncode == 1
    assert "'steal'" in result.stderr
    assert "did you mean 'steel'?" in result.stderr


def test_where_there_is_no_federation_that_is_an_error(mosquitto: EmbeddedBroker) -> None:
    result = here("status", mosquitto.url)
    assert result.returncode == 1
    assert "no federation on" in result.stderr
    assert here("status", mosquitto.url, "--federation", "a/#").returncode == 2
    assert here("status", "mqtt://127.0.0.1:1").returncode == 69


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 100])
def test_in_a_terminal_it_follows_the_federation_to_its_end(
    columns: int, coordinator: Coordinator, mosquitto: EmbeddedBroker
) -> None:
    coordinator.publish(SPEC, OPEN, ONLINE, just_now())
    terminal = Terminal(columns, "status", mosquitto.url)
    first = int(terminal.read_until(r"^plant-1 +waiting +(\d+) s ")[1])
    terminal.read_until(rf"^plant-1 +waiting +{first + 2} s ")  # nobody has published anything
    assert terminal.screen.cursor.hidden
    coordinator.publish(just_now(paused=True, contributions=1, nodes=NODES[1:3]))
    terminal.read_until(r"^round 9 of 30: 1 contribution ")
    terminal.read_until(r"^paused: round 9 waits for plant-2 to come back")
    assert "plant-10" not in terminal.text
    coordinator.publish(OFFLINE)
    terminal.read_until(r"^the coordinator is offline: nodes wait")
    coordinator.publish(changed(OPEN, status="finished"))
    assert terminal.read_to_end() == 0
    assert "finished: 30 rounds" in terminal.text
    assert not terminal.screen.cursor.hidden


@pytest.mark.slow
def test_two_hundred_nodes_are_drawn_in_a_terminal_and_ctrl_c_leaves_it(
    coordinator: Coordinator, mosquitto: EmbeddedBroker
) -> None:
    nodes = tuple(
        NodeState(node=f"plant-{number}", doing="training", heard=1.0) for number in range(200)
    )
    coordinator.publish(SPEC, OPEN, ONLINE, just_now(nodes=nodes))
    terminal = Terminal(100, "status", mosquitto.url)
    terminal.read_until(r"^and \d+ more: \d+ training$")
    assert terminal.text.startswith("federation steel")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.read_to_end() == 130


def test_a_broker_that_restarts_is_waited_for(
    coordinator: Coordinator, mosquitto: EmbeddedBroker
) -> None:
    coordinator.publish(SPEC, OPEN, ONLINE, just_now())
    terminal = Terminal(80, "status", mosquitto.url)
    terminal.read_until("^plant-10")
    mosquitto.process.kill()
    mosquitto.process.wait()
    terminal.read_until(r"^connection lost \(connection lost\); trying again")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.read_to_end() == 130


class Followed:
    """The lines of JSON that `status` writes, as they come."""

    def __init__(self, url: str):
        command = [sys.executable, "-m", "edge_node", "status", url, "--json", "--watch"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._lines.put(line)

    def next(self, holds: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any]:
        """The next one that holds what is waited for."""
        while True:
            shown = json.loads(self._lines.get(timeout=60))
            if holds(shown):
                return shown


def test_changes_are_followed_as_lines_of_json(
    coordinator: Coordinator, mosquitto: EmbeddedBroker
) -> None:
    coordinator.publish(SPEC, OPEN, ONLINE, just_now())
    followed = Followed(mosquitto.url)
    assert followed.next()["contributions"] == 2
    coordinator.publish(just_now(contributions=3))
    assert followed.next()["contributions"] == 3
    coordinator.publish(changed(OPEN, status="aborted", reason="its operator said so"))
    last = followed.next()
    assert (last["status"], last["reason"]) == ("aborted", "its operator said so")
    assert followed.process.wait(60) == 0


# Of a real federation


class Federation:
    """Processes of a coordinator and two plants."""

    def __init__(self, url: str, folder: Path):
        self._url, self._folder = url, folder
        self._images = {
            name: draw(folder / "images" / name, 8, seed) for seed, name in enumerate(PLANTS)
        }
        self.processes: dict[str, Process] = {}
        self._count = itertools.count()

    def start(self, name: str) -> None:
        if name in PLANTS:
            command: tuple[object, ...] = (
                "join",
                self._url,
                "--name",
                name,
                "--data",
                self._images[name],
            )
        else:
            command = (
                "coordinate",
                self._url,
                "--classes",
                ",".join(CLASSES),
                "--nodes",
                2,
                *FEDERATION,
                "--method",
                "fedavg",
                "--rounds",
                14,
                "--training",
                "local_epochs=30",
                "--deadline",
                300,
            )
        log = self._folder / f"{name}-{next(self._count)}.log"
        self.processes[name] = start(*command, "--state", self._folder / name, log=log)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()


@pytest.fixture
def federation(mosquitto: EmbeddedBroker, tmp_path: Path) -> Iterator[Federation]:
    running = Federation(mosquitto.url, tmp_path)
    yield running
    for process in running.processes.values():
        process.kill()


def doings(shown: dict[str, Any]) -> dict[str, str]:
    return {node["node"]: node["doing"] for node in shown["nodes"]}


@pytest.mark.slow
def test_a_federation_is_shown_as_it_gathers_trains_loses_a_node_and_its_coordinator_and_ends(
    federation: Federation, mosquitto: EmbeddedBroker
) -> None:
    federation.start("coordinator")
    wait_until(lambda: here("status", mosquitto.url).returncode == 0)
    followed = Followed(mosquitto.url)
    shown = followed.next(lambda shown: shown["age"] is not None)
    assert (shown["status"], shown["online"], shown["round"], shown["left"]) == (
        "gathering",
        True,
        0,
        None,
    )
    assert (shown["start"], shown["nodes"]) == (2, [])

    for plant in PLANTS:
        federation.start(plant)
    shown = followed.next(lambda shown: len(shown["nodes"]) == 1)
    assert set(doings(shown).values()) == {"waiting"}
    shown = followed.next(lambda shown: shown["round"] >= 2)
    assert set(doings(shown).values()) <= {"training", "sending", "waiting"}
    assert 250 < shown["left"] <= 300
    contributed = {
        (node["weight"], node["bytes"] > 10_000, node["heard"] < 30) for node in shown["nodes"]
    }
    assert contributed == {(18.0, True, True)}

    federation.kill("plant-b")
    shown = followed.next(lambda shown: shown["paused"])
    (lost,) = (node for node in shown["nodes"] if node["node"] == "plant-b")
    assert (lost["doing"], lost["awaited"]) == ("absent", True)
    assert re.fullmatch(r"round \d+: its connection ended", lost["error"])

    federation.kill("coordinator")
    shown = followed.next(lambda shown: not shown["online"])
    assert (shown["status"], shown["paused"]) == ("open", True)
    federation.start("coordinator")
    federation.start("plant-b")
    before = shown["round"]
    shown = followed.next(lambda shown: shown["online"] and shown["round"] > before)
    assert not shown["paused"]

    shown = followed.next(lambda shown: shown["status"] == "finished" and not shown["online"])
    assert (shown["round"], doings(shown)) == (14, {"plant-a": "finished", "plant-b": "finished"})
    assert followed.process.wait(60) == 0
    assert [process.wait(60) for process in federation.processes.values()] == [0, 0, 0]
