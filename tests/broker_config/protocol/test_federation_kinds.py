"""A kind of federation that a package brings has its messages, topics and rights;
one that nobody has installed is named.
"""

import json
from collections.abc import Iterator

import pytest

from broker_config.protocol import messages, topics
from broker_config.protocol.codec import DecodeError, decode, decode_any, encode
from broker_config.protocol.errors import UsageError
from broker_config.protocol.federation_kinds import kind_of, kind_of_topic
from broker_config.security.access_list import acl, rights
from tests.support.paths import WIRE_FILE
from tests.support.trial_kind import KIND, TrialCall, TrialOverview, TrialSpec, registered

SPEC = TrialSpec(federation="steel", run="0" * 16, software="1", parties=3)
MESSAGES = (SPEC, TrialOverview(), TrialCall(text="ho"))


@pytest.fixture
def trial() -> Iterator[None]:
    with registered():
        yield


@pytest.mark.usefixtures("trial")
@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_its_messages_come_back_as_they_were(message: messages.Message) -> None:
    assert decode(encode(message), messages.Message) == message
    assert kind_of(message) == "trial"
    with pytest.raises(DecodeError, match="'trial'"):
        decode_any(encode(message))


@pytest.mark.usefixtures("trial")
def test_the_kernel_s_own_messages_belong_to_no_kind() -> None:
    said = messages.Presence(session="0" * 16, online=True)
    assert kind_of(said) == ""
    assert decode_any(encode(said)) == said


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_of_a_kind_that_is_not_installed_is_named(message: messages.Message) -> None:
    with pytest.raises(DecodeError, match=f"(?s){type(message).__name__}.*install"):
        decode(encode(message), messages.Message)


@pytest.mark.parametrize("payload", [b'{"type": 3}', b'{"type": "Spec"}', b"[]", b"{}"])
def test_what_is_wrong_otherwise_is_not_taken_for_one(payload: bytes) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(payload, messages.Message)
    assert "install" not in str(caught.value)


@pytest.mark.usefixtures("trial")
def test_each_of_its_topics_has_one_signer() -> None:
    below = f"{topics.ROOT}/steel/trial"
    signers = {
        f"{below}/call": "coordinator",
        f"{below}/result": "coordinator",
        f"{below}/press/answer": "press",
        f"{below}/press/secret": "coordinator",
        f"{below}/press/other": None,
        f"{below}/call/more": None,
        below: None,
        f"{topics.ROOT}/steel/other/call": None,
    }
    assert {topic: topics.expected_signer(topic) for topic in signers} == signers
    assert kind_of_topic(f"{below}/call") == "trial"
    assert kind_of_topic(topics.up("steel", "press")) == ""


@pytest.mark.usefixtures("trial")
@pytest.mark.parametrize(
    ("name", "writes", "reads", "denied"),
    [
        ("coordinator", {"call", "result", "+/secret"}, {"result", "+/answer"}, set()),
        (
            "monitor",
            set(),
            {"result"},
            {"call", "monitor/answer", "monitor/secret"},
        ),
        ("press", {"press/answer"}, {"call", "result", "press/secret"}, set()),
    ],
)
def test_a_right_follows_from_who_writes_and_who_reads(
    name: str, writes: set[str], reads: set[str], denied: set[str]
) -> None:
    below = f"{topics.ROOT}/steel/trial/"
    given = rights(name, "steel")
    found = [
        {topic.removeprefix(below) for topic in part if topic.startswith(below)} for part in given
    ]
    assert found == [writes, reads, denied]
    assert f"{below}%u/answer" in acl("steel")


def test_two_kinds_cannot_bring_messages_of_one_name() -> None:
    with (
        registered(),
        registered("zeal", KIND),
        pytest.raises(UsageError, match=r"TrialSpec.*'zeal'"),
    ):
        decode(encode(SPEC), messages.Message)


def test_a_kind_cannot_bring_a_message_of_the_kernel_s_name() -> None:
    spec = json.loads(WIRE_FILE.read_text())["Spec"]
    taken = KIND._replace(others=(messages.Hello,))
    with registered(kind=taken), pytest.raises(UsageError, match="Hello"):
        decode_any(json.dumps(spec).encode())
