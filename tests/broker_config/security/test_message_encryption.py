"""What is learnt is read by a federation's members alone:
the broker between them sees who speaks when, how much.
"""

import json
import queue
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.enums import MQTTProtocolVersion

from broker_config.broker.embedded import start_broker
from broker_config.mqtt.client import LARGEST_PACKET, Delivery, MqttClient
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import (
    ENCRYPTED_MARK,
    ENCRYPTION_OVERHEAD,
    decode,
    decode_any,
    encode,
    encode_chunk,
)
from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.protocol.messages import (
    AnyMessage,
    Codec,
    Delta,
    Encryption,
    Hello,
    Manifest,
    RoundState,
    Want,
    Welcome,
)
from broker_config.security.group_key import KeyPair, MasterKey, NodeKeys, Recipient, SharedKey
from broker_config.security.message_encryption import (
    CoordinatorEncryption,
    MessageEncryption,
    NodeEncryption,
    read_open_part,
)
from broker_config.security.message_signing import MessageSigner
from broker_config.security.signing import ForgedError, UnknownKeyError
from broker_config.transfer.blob_transfer import BlobStore, BlobTransfer, Fetched
from edge.status import federations
from tests.support.adversary import Adversary
from tests.support.authority import Authority
from tests.support.foreign_node import ForeignNode
from tests.support.plants import draw
from tests.support.threaded_federation import PLANTS, Federation, same
from tests.support.waiting import wait_until
from tests.support.wire_messages import CASES, DIGEST, MANIFEST, RUN, SESSION
from trainer import progress
from trainer.federation.client.discovery import discover
from trainer.federation.server.coordinator.process import Outcome
from trainer.federation.server.operator_actions import request
from trainer.federation.server.spec import Participation
from trainer.federation.simulation import simulate
from trainer.models.network import to_arrays

SERVER = "aaaaaaaaaaaaaaaa"
UP, DOWN = topics.up("steel", "plant-a"), topics.down("steel", "plant-a")
ROUND, WANT = topics.round_state("steel"), topics.want("steel", "coordinator", "plant-a")
CHUNKS = topics.chunks("steel", "coordinator", DIGEST, 4096)
STATE = RoundState(
    run=RUN, round=3, status="open", broadcast=MANIFEST, delta=Delta(base="cd" * 32, blob=MANIFEST)
)
ASKED = Want(digest=DIGEST, chunk_size=4096, chunks=(0, 7))


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Endpoint]:
    """A broker that has kept nothing for nodes that are written from the page:
    they have one name in all tests.
    """
    with start_broker(tmp_path / "broker", kind="mosquitto") as running:
        yield Endpoint.parse(running.url)


def encrypted(group: MessageEncryption, topic: str, payload: bytes) -> bytes:
    found = group.encrypt(topic, payload)
    assert found is not None
    assert found[0] == group.wire_topic(topic)
    return found[1]


def topic_of(message: AnyMessage) -> str:
    """The topic on which such a message travels."""
    match type(message).__name__:
        case "RoundState":
            return ROUND
        case "Want":
            return WANT
        case "Welcome" | "Accepted" | "Refusal" | "MaskingStep":
            return DOWN
        case "Spec":
            return topics.spec("steel")
        case "Overview":
            return topics.status("steel")
        case "Presence":
            return topics.presence("steel", "plant-a")
    return UP


# Messages


@pytest.mark.parametrize("message", CASES, ids=lambda message: type(message).__name__)
def test_whoever_has_the_key_reads_what_was_said(message: AnyMessage) -> None:
    group, topic, payload = MessageEncryption(MasterKey.draw()), topic_of(message), encode(message)
    wire = encrypted(group, topic, payload)
    assert decode_any(group.decrypt(topic, wire)) == message
    assert len(wire) <= len(payload) + ENCRYPTION_OVERHEAD


@pytest.mark.parametrize("message", CASES, ids=lambda message: type(message).__name__)
def test_of_what_is_learnt_nothing_is_open_and_the_rest_is(message: AnyMessage) -> None:
    """What must be understood before a process has the key is open,
    and who speaks when is no secret.
    """
    payload, topic = encode(message), topic_of(message)
    wire = encrypted(MessageEncryption(MasterKey.draw()), topic, payload)
    is_confidential = type(message).__name__ in (
        "Contribution",
        "Telemetry",
        "Accepted",
        "Want",
        "RoundState",
        "MaskingStep",
        "MaskingAnswer",
    )
    assert (wire == payload) != is_confidential
    assert (DIGEST.encode() in wire) == (not is_confidential and DIGEST.encode() in payload)


def test_without_the_key_a_round_state_has_no_blob_and_is_otherwise_as_it_was() -> None:
    wire = encrypted(MessageEncryption(MasterKey.draw()), ROUND, encode(STATE))
    expected = msgspec.structs.replace(STATE, broadcast=None, delta=None)
    for reader in (MessageEncryption(), MessageEncryption(MasterKey.draw())):
        assert decode(reader.decrypt(ROUND, wire), RoundState) == expected
    assert decode(read_open_part(wire), RoundState) == expected


def test_a_round_state_without_blob_is_open() -> None:
    for status in ("gathering", "aborted"):
        payload = encode(RoundState(run=RUN, round=0, status=status))  # type: ignore[arg-type]
        assert MessageEncryption().encrypt(ROUND, payload) == (ROUND, payload)


def test_nothing_confidential_leaves_a_process_that_has_no_key_yet() -> None:
    fresh = NodeEncryption("steel", RUN, "plant-a", SESSION)
    for topic, payload in ((UP, encode(CASES[4])), (ROUND, encode(STATE)), (WANT, encode(ASKED))):
        assert fresh.encrypt(topic, payload) is None
    assert fresh.encrypt(CHUNKS, encode_chunk(0, b"data")) is None
    assert fresh.wire_topic(CHUNKS) is None


def test_what_was_encrypted_with_another_key_is_no_forgery() -> None:
    wire = encrypted(MessageEncryption(MasterKey.draw()), UP, encode(CASES[4]))
    for reader in (MessageEncryption(), MessageEncryption(MasterKey.draw())):
        with pytest.raises(UnknownKeyError):
            reader.decrypt(UP, wire)
    with pytest.raises(UnknownKeyError):
        read_open_part(wire)


@pytest.mark.parametrize(("topic", "message"), [(UP, CASES[4]), (ROUND, STATE), (WANT, ASKED)])
def test_a_changed_or_cut_message_does_not_decrypt(topic: str, message: AnyMessage) -> None:
    group, random = MessageEncryption(MasterKey.draw()), secrets.SystemRandom()
    wire = encrypted(group, topic, encode(message))
    # with a changed id: who has another key
    before = [None, read_open_part(wire)] if topic == ROUND else [None]

    def read(forged: bytes) -> bytes | None:
        try:
            return group.decrypt(topic, forged)
        except ForgedError:
            return None

    for place in range(1, len(wire)):
        changed = bytearray(wire)
        changed[place] ^= 1 << random.randrange(8)
        is_id = 0 < place <= 8
        assert read(bytes(changed)) in (before if is_id else [None])
        assert read(wire[:place]) is None


def test_a_message_is_read_on_its_own_topic_only() -> None:
    group = MessageEncryption(MasterKey.draw())
    wire = encrypted(group, UP, encode(CASES[4]))
    with pytest.raises(ForgedError, match="member"):
        group.decrypt(DOWN, wire)


def test_a_request_for_chunks_that_no_member_has_encrypted_is_not_heard() -> None:
    """It bears no signature either: nothing of it may stand in the open."""
    group, plain = MessageEncryption(MasterKey.draw()), encode(ASKED)
    of_a_stranger = ENCRYPTED_MARK + bytes(20) + len(plain).to_bytes(4, "big") + plain
    for forged in (plain, of_a_stranger):
        with pytest.raises(ForgedError, match="not encrypted"):
            group.decrypt(WANT, forged)


MASTER = MasterKey.draw()


@given(st.sampled_from([ROUND, UP, DOWN, WANT, CHUNKS]), st.booleans(), st.binary(max_size=120))
def test_whatever_bytes_come_are_ignored_or_read_as_they_are(
    topic: str, is_marked: bool, data: bytes
) -> None:
    if is_marked:
        data = ENCRYPTED_MARK + MASTER.of(topics.private_to(topic)).id + data
    try:
        assert MessageEncryption(MASTER).decrypt(topic, data) == read_open_part(data)
        assert topic not in (WANT, CHUNKS)
    except ForgedError:
        assert topic in (WANT, CHUNKS) or data.startswith(ENCRYPTED_MARK)


# Chunks


def test_topics_of_chunks_hide_the_digest_and_differ_with_each_key_holder_and_size() -> None:
    groups = [MessageEncryption(MasterKey.draw()) for _ in range(2)]
    plain = [
        CHUNKS,
        topics.chunks("steel", "plant-a", DIGEST, 4096),
        topics.chunks("steel", "coordinator", DIGEST, 8192),
    ]
    hidden = [topics.blob(str(group.wire_topic(topic))) for group in groups for topic in plain]
    assert len({*hidden, DIGEST}) == 7
    assert all(len(each) == 64 for each in hidden)
    assert str(groups[0].wire_topic(CHUNKS)).replace(hidden[0], DIGEST) == CHUNKS
    assert groups[0].wire_topic(UP) == UP


def test_a_chunk_decrypts_as_what_it_is_only() -> None:
    group, chunk = MessageEncryption(MasterKey.draw()), encode_chunk(7, b"what was learnt")
    wire = encrypted(group, CHUNKS, chunk)
    assert group.decrypt(CHUNKS, wire) == chunk
    assert encrypted(group, CHUNKS, chunk) == wire  # sent to a second asker: it tells nothing new
    assert len(wire) == len(chunk) + 16
    assert b"learnt" not in wire
    elsewhere = topics.chunks("steel", "plant-a", DIGEST, 4096)
    for topic, forged in (
        (elsewhere, wire),
        (CHUNKS, encode_chunk(6, wire[4:])),
        (CHUNKS, wire[:-1]),
        (CHUNKS, b"\0\0"),
        (CHUNKS, chunk),
    ):
        with pytest.raises(ForgedError):
            group.decrypt(topic, forged)
    with pytest.raises(ForgedError):
        MessageEncryption(MasterKey.draw()).decrypt(CHUNKS, wire)


# The group key


def test_a_group_key_is_for_one_process_of_one_node_in_one_run_and_from_one_coordinator() -> None:
    master, pair = MasterKey.draw(), KeyPair()
    recipient = Recipient("steel", RUN, "plant-a", SESSION, SERVER)
    given = master.encrypt_for(pair.public, recipient)
    found = pair.decrypt(given, recipient)
    assert (found.group.raw, found.own.raw) == (master.of(None).raw, master.of("plant-a").raw)
    assert master.encrypt_for(pair.public, recipient) != given
    for name in recipient._fields:
        with pytest.raises(ForgedError, match="this process"):
            pair.decrypt(given, recipient._replace(**{name: "another"}))
    for forged in ("", "00" * 112, given[:-2] + ("00" if given[-2:] != "00" else "01")):
        with pytest.raises(ForgedError, match="this process"):
            pair.decrypt(forged, recipient)
    with pytest.raises(ForgedError, match="this process"):
        KeyPair().decrypt(given, recipient)


def meet(coordinator: CoordinatorEncryption, node: NodeEncryption) -> Welcome:
    """What the coordinator answers to the node's Hello."""
    hello = Hello(session=SESSION, run=RUN, software="", key=node.public)
    return Welcome(session=SESSION, server=SERVER, key=coordinator.keys_for("plant-a", hello))


def test_no_node_can_read_what_another_says_or_contributes_and_all_read_what_is_for_all() -> None:
    """Also if it runs the broker."""
    coordinator, nodes = CoordinatorEncryption("steel", RUN, SERVER), {}
    for name in PLANTS[:2]:
        nodes[name] = NodeEncryption("steel", RUN, name, SESSION)
        hello = Hello(session=SESSION, run=RUN, software="", key=nodes[name].public)
        assert nodes[name].take_keys(
            Welcome(session=SESSION, server=SERVER, key=coordinator.keys_for(name, hello))
        )
    own, other = nodes.values()
    asked, of_a_node = (
        topics.want("steel", "plant-a", "coordinator"),
        topics.chunks("steel", "plant-a", DIGEST, 4096),
    )
    chunk = encode_chunk(7, b"what was learnt")
    for topic, payload in (
        (UP, encode(CASES[4])),
        (DOWN, encode(CASES[8])),
        (WANT, encode(ASKED)),
        (asked, encode(ASKED)),
        (of_a_node, chunk),
    ):
        for writer, reader in ((own, coordinator), (coordinator, own)):
            wire = encrypted(writer, topic, payload)
            assert reader.decrypt(topic, wire) == payload
            with pytest.raises(ForgedError):
                other.decrypt(topic, wire)
    assert own.wire_topic(of_a_node) == coordinator.wire_topic(of_a_node)
    assert other.wire_topic(of_a_node) is None
    for topic, payload in ((ROUND, encode(STATE)), (CHUNKS, chunk)):
        wire = encrypted(coordinator, topic, payload)
        assert (
            own.decrypt(topic, wire)
            == other.decrypt(topic, wire)
            == coordinator.decrypt(topic, wire)
        )


def test_a_former_key_that_somebody_plays_back_is_not_taken() -> None:
    """Else the broker and somebody who was dropped could together read what nodes say
    afterwards.
    """
    coordinator = CoordinatorEncryption("steel", RUN, SERVER)
    node = NodeEncryption("steel", RUN, "plant-a", SESSION)
    first = meet(coordinator, node)
    assert node.take_keys(first)
    assert not node.take_keys(first)
    coordinator.draw_anew()
    assert node.take_keys(meet(coordinator, node))
    with pytest.raises(ForgedError, match="former"):
        node.take_keys(first)
    assert node.keys
    assert node.keys.group.id == coordinator.keys.of(None).id


def test_without_kits_nothing_can_be_encrypted() -> None:
    with pytest.raises(UsageError, match="kit"):
        Endpoint.parse("mqtt://here").encrypting(MessageEncryption())


# Over a broker


class Recorder:
    """A broker's whole traffic, as its operator sees it."""

    def __init__(self, broker: Endpoint, folder: Path):
        self.heard: list[tuple[str, bytes]] = []
        self._inbox: queue.Queue[object] = queue.Queue()
        self._mqtt = MqttClient(
            broker, f"recorder-{folder.name}", inbox=self._inbox, persistent=False
        )
        self._mqtt.max_payload = LARGEST_PACKET
        self._mqtt.subscribe("#")
        self._mqtt.open()
        assert self._mqtt.await_subscription(60)

    def close(self) -> bytes:
        """All that has come, one after the other, topics too."""
        for number in range(2):  # the first one makes the broker read what has reached its sockets
            self._read_up_to(f"end {number}".encode())
        self._mqtt.close()
        return b"\n".join(topic.encode() + b" " + payload for topic, payload in self.heard)

    def _read_up_to(self, last: bytes) -> None:
        """Read what has come before a message of our own: the broker keeps the order."""
        self._mqtt.publish("recorder", last)
        while self.heard[-1:] != [("recorder", last)]:
            event = self._inbox.get(timeout=60)
            if isinstance(event, Delivery):
                self.heard.append((event.topic, event.payload))


class Secrets(NamedTuple):
    """What a federation has learnt, as it would stand in its messages."""

    tensors: list[bytes]  # pieces of blobs
    digests: list[bytes]
    weights: list[bytes]
    metrics: list[bytes]

    def found_in(self, traffic: bytes) -> dict[str, int]:
        """How many of each kind stand there."""
        return {
            name: sum(each in traffic for each in found) for name, found in self._asdict().items()
        }


def learnt(folder: Path, events: list[progress.AnyEvent]) -> Secrets:
    """What the coordinator has heard, and what lies at all members when the last round has
    closed.
    """
    blobs = [path.read_bytes() for path in folder.glob("*/blobs/*") if path.is_file()]
    told = [event for event in events if isinstance(event, progress.Contribution)]
    measured = [event.metrics for event in events if isinstance(event, progress.Measured)]
    return Secrets(
        [
            blob[start : start + 24]
            for blob in blobs
            for start in range(2 * len(blob) // 3, len(blob) - 24, 4096)
        ],
        [path.name.encode() for path in folder.glob("*/blobs/*") if path.is_file()],
        [json.dumps(event.weight).encode() for event in told],
        [
            json.dumps(value).encode()
            for metrics in measured
            for value in metrics.values()
            if not value.is_integer()
        ],
    )


@pytest.mark.parametrize("codec", [pytest.param("none", marks=pytest.mark.slow), "int4"])
@pytest.mark.parametrize("encryption", ["group", pytest.param("none", marks=pytest.mark.slow)])
def test_a_broker_sees_no_tensor_digest_loss_or_metric_unless_encryption_is_off(
    encryption: Encryption,
    codec: Codec,
    endpoint: Endpoint,
    plants: dict[str, Path],
    tmp_path: Path,
) -> None:
    federation = Federation(
        endpoint,
        plants,
        tmp_path,
        f"seen-{codec}",
        3,
        Participation(),
        signers=Authority(f"seen-{codec}").signers(),
        codec=codec,
        encryption=encryption,
        telemetry=True,
    )
    recorder = Recorder(endpoint, tmp_path)
    sessions = [federation.coordinator(), *(federation.node(name) for name in PLANTS)]
    outcome = sessions[0].end()
    for session in sessions[1:]:
        session.end()
    traffic, secret = recorder.close(), learnt(tmp_path, sessions[0].all_told())
    assert len(secret.tensors) > 50
    assert len(secret.digests) >= 4
    assert len(secret.weights) == 9
    assert len(secret.metrics) > 9
    found = secret.found_in(traffic)
    if encryption == "group":
        assert found == dict.fromkeys(found, 0)
    else:
        assert min(found.values()) > 0, found
    images = {name: federation.images(name) for name in PLANTS}
    simulated = simulate(federation.spec, federation.first, images, compare=True)
    assert isinstance(outcome, Outcome)
    assert same(outcome.broadcast, simulated.broadcast)
    assert all(
        same(federation.personal(name), to_arrays(simulated.models[name].tensors))
        for name in PLANTS
    )


class Scrambler(Adversary):
    """Says everything again, as it was and with a byte changed,
    chunks and requests for them too.
    """

    def __init__(self, broker: Endpoint, federation: str):
        super().__init__(broker, federation)
        self.chance = secrets.SystemRandom()

    def attack(self, seen: Delivery) -> None:
        changed = bytearray(seen.payload)
        changed[self.chance.randrange(len(changed))] ^= 0x10
        for payload in (seen.payload, bytes(changed)):
            self.say(seen.topic, payload, qos=seen.qos, retain=seen.retain)


@pytest.mark.slow
@pytest.mark.parametrize("listens_to", ["signed", "blobs"])
def test_altered_and_repeated_ciphertext_changes_no_byte_and_blames_nobody(
    listens_to: str, endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    name = f"scrambled-{listens_to}"
    federation = Federation(
        endpoint,
        plants,
        tmp_path,
        name,
        3,
        Participation(),
        signers=Authority(name).signers(),
        encryption="group",
    )
    scrambler = (
        Scrambler(endpoint, name) if listens_to == "signed" else BlobScrambler(endpoint, name)
    )
    sessions = [federation.coordinator(), *(federation.node(each) for each in PLANTS)]
    outcome = sessions[0].end()
    for session in sessions[1:]:
        session.end()
    assert scrambler.close()
    images = {each: federation.images(each) for each in PLANTS}
    assert isinstance(outcome, Outcome)
    assert same(outcome.broadcast, simulate(federation.spec, federation.first, images).broadcast)
    told = [event for session in sessions for event in session.all_told()]
    assert not any(isinstance(event, progress.NodeRefused) for event in told)


class BlobScrambler(Scrambler):
    """Says again what is said of blobs."""

    def hears(self, topic: str) -> bool:
        return topics.expected_signer(topic) is None


def test_forged_chunks_cost_nothing_and_are_told_once(
    endpoint: Endpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without encryption they would have the blob fetched again."""
    master, signers = MasterKey.draw(), Authority("steel").signers()
    news, data = queue.Queue[object](), secrets.token_bytes(50_000)

    def transfer(name: str) -> BlobTransfer:
        own = replace(endpoint, signer=signers[name], encryption=MessageEncryption(master))
        return BlobTransfer(own, "steel", name, BlobStore(tmp_path / name), news)

    holder, asker = transfer("plant-a"), transfer("coordinator")
    digest, size = holder._store.put(data)
    manifest = Manifest(
        federation="steel",
        run="a" * 16,
        round=1,
        node="plant-a",
        digest=digest,
        size=size,
        chunk_size=1024,
    )
    topic = master.of("plant-a").hide_digest(topics.chunks("steel", "plant-a", digest, 1024))
    with closing(
        MqttClient(endpoint, "forger", inbox=queue.Queue(), persistent=False).open()
    ) as forger:
        asker.start()
        asker.fetch(manifest)

        def noticed() -> bool:
            forger.publish(topic, encode_chunk(0, bytes(1040)), qos=0)
            return bool(caplog.records)

        wait_until(noticed)
        assert asker.received(digest) == 0
        holder.start()
        holder.offer(digest, 1024)
        assert news.get(timeout=60) == Fetched(manifest)
        for each in (holder, asker):
            each.close()
    said = {record.getMessage() for record in caplog.records}
    plain = topics.chunks("steel", "plant-a", digest, 1024)
    assert said == {f"ignored a message on {plain}: it was not encrypted by a member"}


def test_a_transfer_goes_on_when_the_key_is_replaced(endpoint: Endpoint, tmp_path: Path) -> None:
    signers, news, data = (
        Authority("steel").signers(),
        queue.Queue[object](),
        secrets.token_bytes(50_000),
    )
    groups = {name: MessageEncryption(MasterKey.draw()) for name in ("plant-a", "coordinator")}

    def transfer(name: str) -> BlobTransfer:
        own = replace(endpoint, signer=signers[name], encryption=groups[name])
        return BlobTransfer(own, "steel", name, BlobStore(tmp_path / name), news)

    holder, asker = transfer("plant-a"), transfer("coordinator")
    digest, size = holder._store.put(data)
    manifest = Manifest(
        federation="steel",
        run="a" * 16,
        round=1,
        node="plant-a",
        digest=digest,
        size=size,
        chunk_size=1024,
    )
    for each in (holder, asker):
        each.start()
    holder.offer(digest, 1024)
    asker.fetch(manifest)

    def unanswered() -> bool:
        return any(
            job.download and job.download.unanswered for job in list(asker._jobs.get(digest, ()))
        )

    wait_until(unanswered)  # each has a key of its own so far
    assert news.empty()
    groups["coordinator"].keys = groups["plant-a"].keys
    asker.renew_subscriptions()
    assert news.get(timeout=60) == Fetched(manifest)
    assert holder.bytes_sent == size
    for each in (holder, asker):
        each.close()


@pytest.mark.slow
def test_a_coordinator_that_is_started_again_has_another_key_and_nobody_notices(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = Federation(
        endpoint,
        plants,
        tmp_path,
        "again",
        12,
        Participation(),
        signers=Authority("again").signers(),
        encryption="group",
    )
    coordinator, nodes = federation.coordinator(), [federation.node(name) for name in PLANTS]
    for _ in range(2):
        coordinator.wait_for(progress.RoundClosed)
        coordinator.wait_for(progress.Contribution)
        coordinator.stop()
        coordinator = federation.coordinator()
    outcome = coordinator.end()
    for node in nodes:
        node.end()
    images = {name: federation.images(name) for name in PLANTS}
    assert isinstance(outcome, Outcome)
    assert same(outcome.broadcast, simulate(federation.spec, federation.first, images).broadcast)
    assert not [record.getMessage() for record in caplog.records]


@pytest.mark.slow
def test_a_newcomer_is_given_the_key_of_the_process_that_serves_the_result(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    """Which is another one than that in which the nodes have made it."""
    images = {**plants, "plant-d": draw(tmp_path / "images", 2, 9)}
    federation = Federation(
        endpoint,
        images,
        tmp_path,
        "sums",
        0,
        Participation(),
        "gaussian",
        signers=Authority("sums", nodes=tuple(images)).signers(),
        encryption="group",
    )
    sessions = [federation.coordinator(), *(federation.node(name) for name in PLANTS)]
    assert all(session.end() for session in sessions)
    coordinator = federation.coordinator(linger=60)
    assert federation.node("plant-d").end() == tmp_path / "plant-d" / "model"
    coordinator.stop()
    assert federation.contributors() == [{*PLANTS}]


def foreign(
    broker: Endpoint, authority: Authority, name: str, *, encrypts: bool = True
) -> ForeignNode:
    return ForeignNode(
        broker.port,
        name,
        MQTTProtocolVersion.MQTTv5,
        weight=9,
        shift=0.01,
        key=Ed25519PrivateKey.from_private_bytes(authority.keys[name].raw),
        coordinator=Ed25519PrivateKey.from_private_bytes(
            authority.keys["coordinator"].raw
        ).public_key(),
        encrypts=encrypts,
    )


def default_federation(
    broker: Endpoint, plants: dict[str, Path], folder: Path, authority: Authority, rounds: int
) -> Federation:
    """Which has that name, and this authority."""
    return Federation(
        broker,
        plants,
        folder,
        "default",
        rounds,
        Participation(),
        "fedavg",
        signers=authority.signers(),
        codec="int4",
        encryption="group",
        epochs="1",
    )


def test_a_node_written_from_the_page_takes_part_in_an_encrypted_federation(
    fresh: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    authority = Authority("default")
    federation = default_federation(fresh, plants, tmp_path, authority, 2)
    coordinator, node = federation.coordinator(), federation.node(PLANTS[0])
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda name: foreign(fresh, authority, name).run(), PLANTS[1:]))
    outcome = coordinator.end()
    node.end()
    assert isinstance(outcome, Outcome)
    assert all(same(outcome.broadcast, result) for result in results)
    assert federation.contributors() == [{*PLANTS}] * 2


def test_a_node_of_a_version_without_encryption_is_told_what_to_do(
    fresh: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    authority = Authority("default")
    coordinator = default_federation(fresh, plants, tmp_path, authority, 2).coordinator()
    with pytest.raises(AssertionError) as refused:
        foreign(fresh, authority, PLANTS[1], encrypts=False).run()
    (refusal,) = refused.value.args
    assert "edge-node foreign" in refusal["reason"]
    assert "install the coordinator's version" in refusal["remedy"]
    assert "--encryption none" in refusal["remedy"]
    coordinator.stop()


@pytest.mark.slow
def test_who_was_dropped_can_read_nothing_that_is_said_afterwards_and_the_others_go_on(
    fresh: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    """It listens on, as it could at a broker that has not been told."""
    authority = Authority("default")
    federation = default_federation(fresh, plants, tmp_path, authority, 15)
    federation.spec = msgspec.structs.replace(federation.spec, quorum=2)
    coordinator = federation.coordinator()
    dropped = foreign(fresh, authority, PLANTS[2])
    dropped.patience = 20.0
    with ThreadPoolExecutor(1) as pool:
        with federation.opened_by(3, coordinator):
            nodes = [federation.node(name) for name in PLANTS[:2]]
            part = pool.submit(dropped.run)
        coordinator.wait_for(progress.RoundClosed)
        keys = NodeKeys(PLANTS[2], SharedKey(dropped.group_key), SharedKey(dropped.node_key))
        assert dropped.group_key
        request(tmp_path / "coordinator", "drop", "tester", PLANTS[2])
        with pytest.raises(AssertionError, match="dropped"):
            part.result()
    recorder = Recorder(fresh, tmp_path)
    for session in (coordinator, *nodes):
        assert session.end()
    recorder.close()
    states = [
        payload
        for topic, payload in recorder.heard
        if topic.endswith("/round") and b"broadcast" not in payload
    ]
    former = MessageEncryption(keys)
    topic = topics.round_state("default")
    assert {
        decode(former.decrypt(topic, each[65:]), RoundState).broadcast for each in states[1:]
    } == {None}
    assert len(states) > 5


def test_a_key_for_which_nothing_can_be_encrypted_costs_its_sender_its_place_and_nobody_else(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    signers = Authority("weak").signers()
    federation = Federation(
        endpoint, plants, tmp_path, "weak", 2, Participation(), signers=signers, encryption="group"
    )
    coordinator = federation.coordinator()
    hello = Hello(session=SESSION, run=federation.spec.run, software="", key="00" * 32)
    with MqttClient(
        federation.endpoint(PLANTS[0]), "", inbox=queue.Queue(), persistent=False
    ) as weak:
        weak.publish(topics.up("weak", PLANTS[0]), encode(hello))
        weak.flush(60)
    refused = coordinator.wait_for(progress.NodeRefused)
    assert "encrypted for the key" in refused.reason  # type: ignore[union-attr]
    sessions = [coordinator, *(federation.node(name) for name in PLANTS)]
    assert all(session.end() for session in sessions)


@pytest.mark.slow
def test_who_has_no_key_still_sees_how_the_federation_is_doing_but_no_weight(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    """A monitor, a node that has yet to join, and a coordinator's operator who aborts the run
    from elsewhere.
    """
    authority = Authority("watched")
    signers = authority.signers()
    federation = Federation(
        endpoint,
        plants,
        tmp_path,
        "watched",
        500,
        Participation(),
        signers=signers,
        encryption="group",
    )
    coordinator, nodes = federation.coordinator(), [federation.node(name) for name in PLANTS]
    coordinator.wait_for(progress.RoundClosed)
    coordinator.wait_for(progress.RoundClosed)
    kit = msgspec.structs.replace(authority.kit(PLANTS[0]), name=topics.MONITOR)
    watching = replace(endpoint, signer=MessageSigner(kit))

    def has_contributed() -> bool:
        (status,) = federations.fetch(watching, "watched").statuses()
        return status.round >= 2 and any(node.bytes for node in status.nodes)

    wait_until(has_contributed)
    (status,) = federations.fetch(watching, "watched").statuses()
    assert status.status == "open"
    assert {node.weight for node in status.nodes} == {None}
    joinable = discover(
        federation.endpoint(PLANTS[1]), "watched", 5, print, lambda: False, tmp_path / "new"
    )
    assert joinable
    assert joinable.spec.encryption == "group"
    coordinator.stop()
    federation.abort()
    for node in nodes:
        with pytest.raises(EdgeNodeError, match="a trial"):
            node.end()
