"""The Sparkplug edge node without a broker: what it says byte by byte,
and in which order, whatever happens to it.
"""

import json
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.errors import UsageError
from broker_config.storage.checksums import write_record
from edge.inference.outcomes import Outcome
from edge_node.extensions.sparkplug.birth_state import BirthState
from edge_node.extensions.sparkplug.edge_node import EdgeNode, Identity, Request
from edge_node.extensions.sparkplug.payload import Metric, Type, encode, true_metrics
from tests.support.outcomes_at_noon import NOON_MS, failure, notice, verdict
from tests.support.sparkplug_host import INT64, REBIRTH, Checker, command, parse, read, state

WHO = Identity("plant", "line-1", "inspection")


class Ticking:
    """A clock that goes on by one millisecond whenever it is read."""

    def __init__(self) -> None:
        self.now = NOON_MS + 1000

    def __call__(self) -> int:
        self.now += 1
        return self.now


class Observed:
    """An edge node whose every message a host checks."""

    def __init__(self, identity: Identity = WHO) -> None:
        self.node = EdgeNode(identity, "1.2", Ticking())
        self.checker = Checker(*identity[:3])

    def take(self, messages: list) -> list:
        for message in messages:
            self.checker.take(*message)
        return messages

    def connect(self, bdseq: int = 0) -> "Observed":
        self.will = self.node.will(bdseq)
        self.take(self.node.births())
        return self

    def data(self, seq: int, outcome: Outcome, historical: bool = False) -> "Observed":
        self.take(self.node.data(seq, outcome, historical=historical))
        return self


# ---------------------------------------------------------------- bytes


def test_a_payload_is_byte_by_byte_what_the_specification_says():
    metric = Metric(Type.INT64, 7, 1, name="bdSeq", alias=300)
    assert encode([metric], 2, 3).hex(" ") == (
        "08 02 "  # 1 timestamp
        "12 10 "  # 2 metric, 16 bytes
        "0a 05 62 64 53 65 71 "  # 1 name
        "10 ac 02 "  # 2 alias
        "18 01 "  # 3 timestamp
        "20 04 "  # 4 datatype
        "58 07 "  # 11 long_value
        "18 03"  # 3 seq
    )


@pytest.mark.parametrize(
    ("type_", "value", "read_as"),
    [
        (Type.INT64, 0, 0),
        (Type.INT64, -1, -1),
        (Type.INT64, 2**63 - 1, 2**63 - 1),
        (Type.DOUBLE, 0.1, 0.1),
        (Type.DOUBLE, 1, 1.0),
        (Type.DOUBLE, float("nan"), None),
        (Type.DOUBLE, float("inf"), None),
        (Type.BOOLEAN, False, False),
        (Type.BOOLEAN, True, True),
        (Type.STRING, "", ""),
        (Type.STRING, "Kratzer äöü 傷", "Kratzer äöü 傷"),
        (Type.STRING, "half \udce9", "half ?"),
        (Type.STRING, "ä" * 2000, "ä" * 1000),
        (Type.STRING, None, None),
        (Type.DOUBLE, None, None),
    ],
)
def test_each_value_is_read_back_by_a_reader_of_its_own(type_, value, read_as):
    (metric,) = parse(encode([Metric(type_, value, 5, name="x")], 1, None)).metrics
    assert read(metric, type_) == read_as
    assert (metric.datatype, metric.timestamp, metric.historical) == (type_, 5, False)


@pytest.mark.parametrize(
    ("type_", "value"), [(Type.STRING, 1), (Type.DOUBLE, "1"), (Type.BOOLEAN, 1), (Type.INT64, 0.5)]
)
def test_a_value_of_another_type_is_refused(type_, value):
    with pytest.raises(TypeError):
        encode([Metric(type_, value, 1)], 1, 0)


# ---------------------------------------------------------------- births and deaths


def test_a_birth_declares_every_metric_with_its_datatype_and_what_is_known_of_it():
    seen = Observed().connect(bdseq=4)
    assert seen.checker.properties["bdSeq"] == 4
    assert seen.checker.properties["Properties/Version"] == "1.2"
    assert seen.checker.properties["Properties/Bundle"] is None
    assert seen.checker.current["Verdict/Label"] is None
    assert seen.checker.current["Total/Verdicts"] == 0
    seen.data(0, verdict()).take(seen.node.births())
    assert seen.checker.properties["Properties/Bundle"] == "press@3"
    assert seen.checker.current["Verdict/Label"] == "scratches"
    assert seen.checker.current["Total/Verdicts"] == 1


def test_the_will_is_the_death_of_the_birth_that_follows_it():
    seen = Observed().connect(bdseq=200)
    topic, data, qos = seen.will
    assert (topic, qos) == ("spBv1.0/plant/NDEATH/line-1", 1)
    payload = parse(data)
    assert payload.seq is None
    assert [(each.name, read(each, INT64)) for each in payload.metrics] == [("bdSeq", 200)]


def test_device_and_node_die_in_this_order_and_what_was_never_born_does_not():
    seen = Observed().connect()
    assert [message.topic.split("/")[2] for message in seen.take(seen.node.deaths())] == [
        "DDEATH",
        "NDEATH",
    ]
    seen.node.will(1)
    assert [message.topic.split("/")[2] for message in seen.node.deaths()] == ["NDEATH"]


def test_a_rebirth_begins_the_sequence_again_and_keeps_the_number_of_the_connection():
    seen = Observed().connect(bdseq=9)
    for number in range(5):
        seen.data(number, verdict(number))
    assert (
        seen.node.interpret("spBv1.0/plant/NCMD/line-1", command(REBIRTH, True)) is Request.REBIRTH
    )
    seen.take(seen.node.births())
    assert seen.checker.births == [9, 9]


def test_sequence_numbers_return_to_0_after_255():
    seen = Observed().connect()
    for number in range(600):
        seen.data(number, verdict(number))
    assert [told.values["Outcome/Sequence"] for told in seen.checker.told] == list(range(600))


# ---------------------------------------------------------------- data


def test_a_verdict_is_told_with_its_own_time_and_its_aliases_alone():
    seen = Observed().connect()
    seen.data(
        17,
        verdict(
            1,
            defect=False,
            taught=False,
            doubts=("novel", "low confidence"),
            disagreement=0.25,
            model="abc",
        ),
    )
    (told,) = seen.checker.told
    assert told.values == {
        "Outcome/Sequence": 17,
        "Outcome/Id": f"{1:032x}",
        "Verdict/Image": "part-1.png",
        "Verdict/Source": "",
        "Verdict/Label": "scratches",
        "Verdict/Confidence": 0.75,
        "Verdict/Defect": False,
        "Verdict/Taught": False,
        "Verdict/Disagreement": 0.25,
        "Verdict/Doubts": "novel, low confidence",
        "Verdict/Milliseconds": 12.5,
        "Verdict/Bundle": "press@3",
        "Verdict/Model": "abc",
        "Total/Verdicts": 1,
        "Total/Doubtful": 1,
    }
    assert set(told.times.values()) == {NOON_MS}
    assert told.sent > NOON_MS


def test_failures_and_notices_are_told_and_counted_too():
    seen = Observed().connect().data(0, failure()).data(1, notice())
    first, second = (told.values for told in seen.checker.told)
    assert (first["Failure/Error"], first["Failure/Remedy"], first["Total/Failures"]) == (
        "no image",
        "send one",
        1,
    )
    assert (second["Notice/Kind"], second["Notice/Text"]) == ("drift", "the images have changed")
    assert second["Total/Notices"] == 1


def test_what_is_late_is_historical_and_the_totals_follow_once_as_they_are_now():
    seen = Observed().connect()
    seen.data(0, verdict(0), historical=True).data(1, failure(), historical=True)
    assert all(all(told.historical.values()) for told in seen.checker.told)
    seen.take(seen.node.totals())
    told = seen.checker.told[-1]
    assert told.values == {"Total/Verdicts": 1, "Total/Defects": 1, "Total/Failures": 1}
    assert not any(told.historical.values())
    assert seen.node.totals() == []


def test_an_outcome_that_is_told_again_is_counted_once():
    seen = (
        Observed()
        .connect()
        .data(0, verdict(0))
        .data(0, verdict(0), historical=True)
        .data(1, verdict(1))
    )
    assert seen.checker.told[-1].values["Total/Verdicts"] == 2


def test_another_model_is_told_once_as_a_property_of_the_node():
    seen = (
        Observed()
        .connect()
        .data(0, verdict())
        .data(1, verdict())
        .data(2, verdict(bundle="press@4", model="d"))
    )
    assert seen.checker.kinds == ["NBIRTH", "DBIRTH", "NDATA", "DDATA", "DDATA", "NDATA", "DDATA"]
    assert (
        seen.checker.properties["Properties/Bundle"],
        seen.checker.properties["Properties/Model"],
    ) == (
        "press@4",
        "d",
    )


def test_an_older_verdict_does_not_bring_back_an_older_model():
    seen = Observed().connect().data(1, verdict(bundle="press@4"))
    seen.data(0, verdict(bundle="press@3", time="2026-03-01T11:00:00+00:00"), historical=True)
    assert seen.checker.properties["Properties/Bundle"] == "press@4"


# ---------------------------------------------------------------- commands and the primary host


@pytest.mark.parametrize(
    "payload",
    [
        command(REBIRTH, False),
        command("Node Control/Reboot", True),
        command("Node Control/rebirth", True),
        b"",
        encode([Metric(Type.STRING, "true", 1, name=REBIRTH)], 1, None),
        encode([Metric(Type.INT64, 1, 1, name=REBIRTH)], 1, None),
    ],
)
def test_only_the_rebirth_command_set_to_true_is_obeyed(payload):
    assert (
        EdgeNode(WHO, "1", Ticking()).interpret("spBv1.0/plant/NCMD/line-1", payload)
        is Request.NOTHING
    )


@given(
    st.binary(max_size=300)
    | st.builds(
        lambda a, b, c: command(REBIRTH, True)[:a] + b + command(REBIRTH, True)[c:],
        st.integers(0, 40),
        st.binary(max_size=20),
        st.integers(0, 40),
    )
)
@settings(max_examples=300)
def test_hostile_bytes_are_refused_or_read_and_nothing_else_happens(payload):
    for topic in (
        "spBv1.0/plant/NCMD/line-1",
        "spBv1.0/STATE/scada",
        "spBv1.0/plant/DDATA/line-1/inspection",
    ):
        node = EdgeNode(WHO._replace(host="scada"), "1", Ticking())
        try:
            assert isinstance(node.interpret(topic, payload), Request)
        except (ValueError, msgspec.MsgspecError):
            assert not node.host_online


def test_a_command_that_is_too_large_is_not_even_read():
    with pytest.raises(ValueError, match="70000 bytes"):
        true_metrics(b"\x00" * 70000)


def hear_state(node: EdgeNode, *said: tuple[bool, int]) -> list[Request]:
    return [node.interpret("spBv1.0/STATE/scada", state(*each)) for each in said]


def test_the_primary_host_is_waited_for_and_missed():
    node = EdgeNode(WHO._replace(host="scada"), "1", Ticking())
    node.will(0)
    assert not node.host_online
    assert hear_state(node, (False, 10), (True, 20), (True, 20)) == [
        Request.NOTHING,
        Request.ONLINE,
        Request.NOTHING,
    ]
    assert node.host_online
    assert hear_state(node, (False, 20)) == [Request.OFFLINE]
    node.will(1)
    assert hear_state(node, (False, 20), (True, 30)) == [Request.NOTHING, Request.ONLINE]


def test_what_an_older_state_message_says_of_the_primary_host_is_not_believed():
    node = EdgeNode(WHO._replace(host="scada"), "1", Ticking())
    node.will(0)
    hear_state(node, (True, 20))
    with pytest.raises(ValueError, match="older"):
        hear_state(node, (False, 19))
    assert node.host_online
    node.will(1)
    with pytest.raises(ValueError, match="older"):
        hear_state(node, (True, 19))
    assert not node.host_online


def test_another_host_is_nobody_to_wait_for():
    node = EdgeNode(WHO._replace(host="scada"), "1", Ticking())
    node.will(0)
    assert node.interpret("spBv1.0/STATE/other", state(True, 1)) is Request.NOTHING
    assert not node.host_online
    assert EdgeNode(WHO, "1", Ticking()).host_online


@pytest.mark.parametrize("what", ["group", "node", "device", "host"])
@pytest.mark.parametrize("name", ["a/b", "a+", "#", "a\n"])
def test_names_that_no_topic_can_hold_are_refused(what, name):
    with pytest.raises(UsageError, match=what):
        WHO._replace(**{what: name}).check()


def test_names_may_be_those_of_a_plant_but_must_be_there():
    assert Identity("Werk 2", "Straße 1", "Prüfung", "SCADA").check()
    with pytest.raises(UsageError):
        WHO._replace(group="").check()


# ---------------------------------------------------------------- whatever happens


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_a_host_finds_nothing_wrong(seed):
    chance = random.Random(seed)
    seen = Observed().connect()
    bdseq = number = 0
    for _ in range(2000):
        match chance.choices(
            ("data", "late", "rebirth", "totals", "lost", "closed"), (60, 20, 5, 5, 2, 2)
        )[0]:
            case "data" | "late" as what:
                outcome = chance.choice((verdict, failure))(number)
                seen.data(number - chance.choice((0, 0, 1)), outcome, historical=what == "late")
                number += 1
            case "rebirth":
                seen.take(seen.node.births())
            case "totals":
                seen.take(seen.node.totals())
            case "lost" | "closed" as what:
                seen.take(seen.node.deaths() if what == "closed" else [seen.will])
                bdseq = (bdseq + 1) % 256
                seen.connect(bdseq)
    assert seen.checker.current["Total/Verdicts"] > 100


def test_the_checker_sees_what_is_wrong():
    seen = Observed().connect()
    first, second = seen.node.data(0, verdict(), historical=False)
    with pytest.raises(AssertionError):
        seen.checker.take(*second)  # a gap in the sequence
    with pytest.raises(AssertionError):
        Checker(*WHO[:3]).take(*first)  # data before births
    with pytest.raises(AssertionError):
        seen.checker.take(*seen.will._replace(qos=0))


# ---------------------------------------------------------------- memory


def test_the_number_of_the_connection_goes_on_after_a_restart_and_returns_to_0_after_255(
    tmp_path: Path,
):
    where = Endpoint.parse("mqtt://broker"), WHO
    assert [BirthState(tmp_path / "state", *where).next_birth_death() for _ in range(3)] == [
        0,
        1,
        2,
    ]
    (path,) = (tmp_path / "state").iterdir()
    write_record(path, {**json.loads(path.read_bytes())["value"], "birth_death": 254})
    assert [BirthState(tmp_path / "state", *where).next_birth_death() for _ in range(2)] == [255, 0]
    assert len({BirthState(tmp_path / "state", *where).client for _ in range(3)}) == 1
    other = BirthState(tmp_path / "state", where[0], WHO._replace(node="line-2"))
    assert (
        other.next_birth_death(),
        other.client == BirthState(tmp_path / "state", *where).client,
    ) == (0, False)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff" * 64, b"{}", b"[" * 100_000])
def test_a_damaged_memory_does_not_keep_the_node_from_connecting(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    where = Endpoint.parse("mqtt://broker"), WHO
    BirthState(tmp_path, *where).next_birth_death()
    (path,) = tmp_path.glob("sparkplug-*.json")
    path.write_bytes(content)
    assert BirthState(tmp_path, *where).next_birth_death() == 0
    assert f"{path} is damaged" in caplog.text


def test_a_full_disk_does_not_keep_the_node_from_connecting(tmp_path: Path):
    where = Endpoint.parse("mqtt://broker"), WHO
    (tmp_path / "file").write_text("")
    assert [BirthState(tmp_path / "file", *where).next_birth_death() for _ in range(2)] == [0, 0]


# ---------------------------------------------------------------- the install


WITHOUT_PROTOBUF = """
import sys
from pathlib import Path
sys.modules["google.protobuf"] = None
from broker_config.protocol.errors import UsageError
import edge.daemon.line_settings as settings
from edge.config.instance import Instance
from edge.daemon import daemon
from edge.daemon.dispatcher import Dispatcher
found = settings.parse({"sinks": [{"kind": "sparkplug", "url": "mqtt://broker", "group": "g"}]}, \
Path("line.toml"))
try:
    Dispatcher(Instance("line-1", Path(sys.argv[1])), \
found.spool).prepare(found.sinks)
except UsageError as error:
    print(error)
"""


def test_nothing_but_a_sparkplug_sink_needs_protobuf_and_that_says_what_to_install(tmp_path):
    command = [sys.executable, "-c", WITHOUT_PROTOBUF, tmp_path]
    found = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert "pip install 'edge-node[sparkplug]'" in found.stdout
