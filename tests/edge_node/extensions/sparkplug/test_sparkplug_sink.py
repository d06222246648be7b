"""The Sparkplug sink at a real broker, watched by a host that finds everything that is wrong."""

import contextlib
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from broker_config.mqtt.endpoint import Endpoint
from edge.sinks.sink import Item, SinkDown
from edge_node.extensions.sparkplug.birth_state import BirthState
from edge_node.extensions.sparkplug.edge_node import Identity
from edge_node.extensions.sparkplug.sparkplug_sink import Sparkplug
from tests.support.mosquitto import Mosquitto
from tests.support.numbered_outcomes import OutcomeProcess
from tests.support.outcomes_at_noon import failure, verdict
from tests.support.paths import REPOSITORY
from tests.support.proxy import Proxy
from tests.support.sparkplug_host import Checker, Host
from tests.support.waiting import wait_until

ALL = "log_type all"  # every packet


@contextlib.contextmanager
def running(more: str = "") -> Iterator[Mosquitto]:
    with tempfile.TemporaryDirectory() as folder:
        broker = Mosquitto(Path(folder) / "broker", persistence=False, more=more)
        broker.start()
        try:
            yield broker
        finally:
            broker.kill()


@pytest.fixture(scope="module")
def broker() -> Iterator[Mosquitto]:
    with running(ALL) as started:
        yield started


def identity(request: pytest.FixtureRequest, host: str = "") -> Identity:
    return Identity(request.node.name, "line-1", "inspection", host)


def checker(who: Identity) -> Checker:
    return Checker(*who[:3])


@contextlib.contextmanager
def sink(port: int, who: Identity, state: Path, **options: float) -> Iterator[Sparkplug]:
    endpoint = Endpoint.parse(f"mqtt://127.0.0.1:{port}")
    running = Sparkplug(endpoint, who, BirthState(state, endpoint, who), **options)
    try:
        yield running
    finally:
        running.close()


def items(count: int, first: int = 0) -> list[Item]:
    return [
        Item(n, failure(n) if n % 7 == 3 else verdict(n), False)
        for n in range(first, first + count)
    ]


def deliver(to: Sparkplug, wanted: Sequence[Item], seconds: float = 30) -> None:
    """As the line does it: again and again, until the broker has them all."""
    deadline = time.monotonic() + seconds
    while wanted:
        try:
            to.deliver(wanted)
            wanted = []
        except SinkDown as down:
            if time.monotonic() > deadline:
                raise
            wanted = [item._replace(replayed=True) for item in wanted[down.delivered :]]
            time.sleep(0.05)  # the line rests longer


def told(seen: Checker) -> list[int]:
    return [
        each.values["Outcome/Sequence"] for each in seen.told if "Outcome/Sequence" in each.values
    ]


def test_an_edge_node_is_born_tells_its_outcomes_in_order_and_dies(broker, request, tmp_path):
    who = identity(request)
    host = Host(broker.port, checker(who))
    with sink(broker.port, who, tmp_path) as running:
        running.deliver(items(700))
        host.wait(lambda seen: told(seen) == list(range(700)))
        assert max(each.values.get("Total/Failures", 0) for each in host.checker.told) == 100
        running.deliver([])
    host.wait(lambda seen: seen.deaths)
    host.close()
    assert host.checker.kinds[:3] == ["NBIRTH", "DBIRTH", "NDATA"]
    assert host.checker.kinds[-2:] == ["DDEATH", "NDEATH"]
    assert not any(any(each.historical.values()) for each in host.checker.told)
    said = broker.log.read_text()
    client = re.search(r"as (edge-node-[0-9a-f]{16}) \(p2, c1, k20\)", said)
    assert client, "MQTT 3.1.1, clean session"
    assert re.search(r"Will message specified \(\d+ bytes\) \(r0, q1\)", said)
    # behind its last message
    wait_until(lambda: f"Received DISCONNECT from {client[1]}" in broker.log.read_text())
    assert f"spBv1.0/{who.group}/NCMD/line-1 (QoS 1)" in said


def test_what_was_only_opened_has_not_told_anybody(broker, request, tmp_path):
    who = identity(request)
    with sink(broker.port, who, tmp_path):
        pass
    assert who.group not in broker.log.read_text()


def test_a_rebirth_can_be_asked_for_at_any_time_and_costs_no_outcome(broker, request, tmp_path):
    who = identity(request)
    host = Host(broker.port, checker(who))
    with sink(broker.port, who, tmp_path) as running:
        running.deliver(items(1))
        sending = threading.Thread(target=running.deliver, args=(items(1000, 1),))
        sending.start()
        asked = 0
        while sending.is_alive():
            host.rebirth()
            asked += 1
        sending.join()
        host.wait(lambda seen: told(seen)[-1:] == [1000])
        assert 1 < len(host.checker.births) <= asked + 1
        born = len(host.checker.births)
        host.rebirth()
        host.wait(lambda seen: len(seen.births) > born and seen.kinds[-1] == "DBIRTH")
        assert (
            host.checker.current["Total/Verdicts"] + host.checker.current["Total/Failures"] == 1001
        )
    host.close()
    assert told(host.checker) == list(range(1001))
    assert set(host.checker.births) == {0}


def test_commands_that_are_no_commands_change_nothing(broker, request, tmp_path, caplog):
    who = identity(request)
    host = Host(broker.port, checker(who))
    with sink(broker.port, who, tmp_path) as running:
        running.deliver(items(1))
        for hostile in (
            b"",
            b"\xff" * 100,
            b"\x12\x05\x0a\xff\xff",
            b"\x12\xff\xff\xff\xff\x0f",
            b"\0" * 70_000,
        ):
            host.say(f"spBv1.0/{who.group}/NCMD/line-1", hostile)
            host.say(f"spBv1.0/{who.group}/NCMD/line-1", hostile, retain=True)
        running.deliver(items(10, 1))
        host.rebirth()
        host.wait(lambda seen: len(seen.births) == 2)
    host.close()
    assert told(host.checker) == list(range(11))
    assert [each.getMessage() for each in caplog.records if "ignored a message" in each.message]


def test_it_waits_for_the_primary_host_and_leaves_when_that_goes(broker, request, tmp_path):
    who = identity(request, host="scada")
    host = Host(broker.port, checker(who), "scada")
    with sink(broker.port, who, tmp_path) as running:
        with pytest.raises(SinkDown, match="scada"):
            running.deliver(items(1))
        host.online(False, 5)
        assert host.checker.kinds == []
        host.online(True, 10)
        deliver(running, items(1))
        host.online(False, 9)  # of an earlier life
        running.deliver(items(1, 1))
        host.online(False, 10)
        host.wait(lambda seen: seen.deaths == [0])
        with pytest.raises(SinkDown, match="scada"):
            running.deliver(items(1, 2))
        host.online(True, 20)
        deliver(running, items(1, 2))
        host.wait(lambda seen: told(seen) == [0, 1, 2])
    host.wait(lambda seen: seen.deaths == [0, 1])
    host.close()
    assert host.checker.births == [0, 1]


def each_is_there_in_order_and_says_when_it_comes_again(seen: Checker, count: int) -> int:
    """How many came more than once."""
    numbers: set[int] = set()
    for each in seen.told:
        if (number := each.values.get("Outcome/Sequence")) is not None:
            assert number not in numbers or each.historical["Outcome/Sequence"]
            assert number in numbers or number == len(numbers), "in order"
            numbers.add(number)
    assert numbers == set(range(count))
    return len(told(seen)) - count


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_with_the_connection_cut_again_and_again_nothing_is_lost(broker, request, tmp_path, seed):
    who, chance = identity(request), random.Random(seed)
    host = Host(broker.port, checker(who))
    with Proxy(broker.port) as proxy, sink(proxy.port, who, tmp_path) as edge_node:
        edge_node.deliver(items(10))
        sending = threading.Thread(target=deliver, args=(edge_node, items(1500, 10)))
        sending.start()
        for cut in (chance.randrange(450 * cut, 450 * cut + 400) for cut in range(3)):
            host.wait(lambda seen, cut=cut: len(told(seen)) > cut)
            proxy.cut()
        sending.join(60)
        host.wait(lambda seen: told(seen)[-1:] == [1509])
    host.wait(lambda seen: len(seen.deaths) == len(seen.births))
    host.close()
    each_is_there_in_order_and_says_when_it_comes_again(host.checker, 1510)
    assert host.checker.births == host.checker.deaths == [*range(len(host.checker.births))]
    assert len(host.checker.births) > 2


@pytest.mark.parametrize("seed", range(2))
def test_with_the_broker_killed_what_it_had_not_sent_on_comes_again(request, tmp_path, seed):
    """The host keeps up, so that the broker has nothing in its memory that it has shown to us
    alone.
    """
    who, chance = identity(request, host="scada"), random.Random(seed)
    seen = checker(who)
    with running() as broker:
        host = Host(broker.port, seen, "scada")
        host.online(True, 1)
        with sink(broker.port, who, tmp_path) as edge_node:
            for number in range(5):
                edge_node.deliver(items(20, 20 * number))
                host.wait(lambda seen, last=20 * number + 19: told(seen)[-1:] == [last])
            sending = threading.Thread(target=deliver, args=(edge_node, items(90, 100)))
            sending.start()
            some = 100 + chance.randrange(60)
            host.wait(lambda seen: told(seen)[-1] >= some)
            broker.kill()
            host.gone()
            broker.start()
            host = Host(broker.port, seen, "scada")
            host.online(True, 2)
            sending.join(60)
            host.wait(lambda seen: told(seen)[-1:] == [189] and seen.births == [0, 1])
        host.wait(lambda seen: seen.deaths)
        host.close()
    assert each_is_there_in_order_and_says_when_it_comes_again(seen, 190) <= 90


EDGE_NODE = """
import sys, threading
from pathlib import Path
from broker_config.mqtt.endpoint import Endpoint
from edge_node.extensions.sparkplug.birth_state import BirthState
from edge_node.extensions.sparkplug.edge_node import Identity
from edge_node.extensions.sparkplug.sparkplug_sink import Sparkplug
who, endpoint = Identity(sys.argv[2], "line-1", "inspection"), Endpoint.parse(sys.argv[1])
Sparkplug(endpoint, who, BirthState(Path(sys.argv[3]), endpoint, who)).deliver([])
threading.Event().wait(60)
"""


def test_of_a_killed_line_the_broker_tells_the_death_and_the_next_one_has_the_next_number(
    broker, request, tmp_path
):
    who = identity(request)
    host = Host(broker.port, checker(who))
    for life in range(2):
        place = (f"mqtt://127.0.0.1:{broker.port}", who.group, str(tmp_path))
        with subprocess.Popen([sys.executable, "-c", EDGE_NODE, *place]) as process:
            host.wait(
                lambda seen, life=life: (
                    seen.births == [*range(life + 1)] and seen.kinds[-1] == "DBIRTH"
                )
            )
            process.kill()
        host.wait(lambda seen, life=life: seen.deaths == [*range(life + 1)])
    host.close()
    assert host.checker.kinds == ["NBIRTH", "DBIRTH", "NDEATH"] * 2


def test_a_broker_that_comes_later_is_found(request, tmp_path):
    who = identity(request)
    broker = Mosquitto(tmp_path / "broker", persistence=False)
    with sink(broker.port, who, tmp_path) as edge_node:
        with pytest.raises(SinkDown, match="nothing listens"):
            edge_node.deliver(items(1))
        with pytest.raises(SinkDown):
            edge_node.deliver([])
        broker.start()
        deliver(edge_node, items(3))
    broker.kill()


@pytest.mark.parametrize("may", ["write", "read"])
def test_an_access_list_that_drops_what_it_says_is_noticed(request, tmp_path, may):
    (tmp_path / "acl").write_text(f"topic {may} spBv1.0/#")
    with (
        running(f"acl_file {tmp_path}/acl") as broker,
        sink(broker.port, identity(request), tmp_path, echo=0.5) as node,
        pytest.raises(SinkDown, match="access list"),
    ):
        deliver(node, items(1), seconds=1)


def test_the_access_list_in_the_documentation_is_all_that_it_needs(tmp_path):
    page = (REPOSITORY / "docs" / "sparkplug.md").read_text()
    (tmp_path / "acl").write_text(
        "\n".join(re.findall(r"^ *(topic .* spBv1\.0/.*)$", page, re.MULTILINE))
    )
    (tmp_path / "all").write_text(
        (tmp_path / "acl").read_text() + "\ntopic write spBv1.0/STATE/scada\n"
    )
    who = Identity("Werk 2", "press-3", "inspection", "scada")
    with running(f"acl_file {tmp_path}/all") as broker:
        host = Host(broker.port, checker(who), "scada")
        host.online(True, 1)
        with sink(broker.port, who, tmp_path) as node:
            deliver(node, items(3))
            host.rebirth()
            host.wait(lambda seen: len(seen.births) == 2 and seen.kinds[-1] == "DBIRTH")
        host.close()


def test_a_line_that_is_killed_goes_on_with_what_it_had_not_delivered(broker, request, tmp_path):
    who = identity(request)
    host = Host(broker.port, checker(who))
    sinks = [{"kind": "sparkplug", "url": f"mqtt://127.0.0.1:{broker.port}", "group": who.group}]
    line = OutcomeProcess(sinks, tmp_path, count=2000)
    host.wait(lambda seen: len(told(seen)) > 200)
    put = line.kill()
    line = OutcomeProcess(sinks, tmp_path, first=len(put), count=20).until()
    put += line.put
    host.wait(lambda seen: seen.told[-1].values.get("Verdict/Image") == str(put[-1]))
    line.end()
    host.wait(lambda seen: seen.deaths == [0, 1])
    host.close()
    first, last = told(host.checker)[0], told(host.checker)[-1]
    assert sorted(set(told(host.checker))) == list(range(first, last + 1))
    assert [int(name) for name in dict.fromkeys(seen_images(host.checker))] == put


def seen_images(seen: Checker) -> list[str]:
    return [each.values["Verdict/Image"] for each in seen.told if "Verdict/Image" in each.values]


def test_a_second_edge_node_of_the_same_name_is_noticed(broker, request, tmp_path, caplog):
    who = identity(request)
    with (
        sink(broker.port, who, tmp_path / "a") as first,
        sink(broker.port, who, tmp_path / "b") as second,
    ):
        deliver(first, items(1))
        deliver(second, items(1))
        deliver(first, items(1, 1))
    assert [each for each in caplog.records if "another edge node" in each.message]
