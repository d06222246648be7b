"""The broker is not trusted: what it forges, replays, swaps or keeps has no effect but delay."""

import queue
import random
import secrets
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from paho.mqtt.enums import MQTTProtocolVersion

from broker_config.mqtt.client import Delivery, MqttClient
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import (
    ENVELOPE_HEADER,
    ENVELOPE_MARK,
    decode_any,
    encode,
    encode_chunk,
)
from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.protocol.messages import (
    Accepted,
    Aggregation,
    AnyMessage,
    Codec,
    Contribution,
    Hello,
    Manifest,
    Presence,
    Refusal,
    RoundState,
    Spec,
    Welcome,
)
from broker_config.security.member_list import MemberListError
from broker_config.security.member_list import verify as verify_members
from broker_config.security.message_signing import MessageSigner, verify_broadcast, verify_head
from broker_config.security.signing import ForgedError, SigningKey, open_envelope
from broker_config.transfer.blob_transfer import BlobStore, BlobTransfer, Fetched
from export.bundle_signing import Signer
from tests.support.adversary import Adversary
from tests.support.authority import Authority
from tests.support.foreign_node import ForeignNode
from tests.support.threaded_federation import PLANTS, Federation, Session, same
from tests.support.unreliable_network import UnreliableProxy
from tests.support.waiting import wait_until
from trainer import progress
from trainer.federation.client.discovery import Joinable, discover
from trainer.federation.server.connection import publish_retained
from trainer.federation.server.coordinator.process import Outcome, coordinate
from trainer.federation.server.ledger import Ledger
from trainer.federation.server.membership import MAX_MESSAGES
from trainer.federation.server.spec import Participation
from trainer.federation.simulation import simulate
from trainer.models.network import to_arrays
from trainer.training.personal_model import load

# Signatures


TOPICS = {
    topics.spec("steel"): "coordinator",
    topics.round_state("steel"): "coordinator",
    topics.status("steel"): "coordinator",
    topics.down("steel", "plant-a"): "coordinator",
    topics.down("steel", "plant-b"): "coordinator",
    topics.presence("steel", "coordinator"): "coordinator",
    topics.presence("steel", "plant-a"): "plant-a",
    topics.presence("steel", "plant-b"): "plant-b",
    topics.up("steel", "plant-a"): "plant-a",
    topics.up("steel", "plant-b"): "plant-b",
}


def test_a_message_is_heard_on_its_own_topic_only_and_from_its_own_member_only() -> None:
    signers = Authority("steel").signers()
    for topic, who in TOPICS.items():
        for name, signer in signers.items():
            signed = signer.sign(topic, b"{}")
            for other in TOPICS:
                if (other, name) == (topic, who):
                    assert signers["plant-c"].verify(other, signed) == b"{}"
                else:
                    with pytest.raises(ForgedError):
                        signers["plant-c"].verify(other, signed)


def test_every_topic_is_signed_but_those_of_blobs() -> None:
    digest, names = "0" * 64, ("steel", "plant-a", "plant-b")
    assert topics.expected_signer(topics.want(*names)) is None
    assert topics.expected_signer(topics.chunks(*names[:2], digest, 1024)) is None
    assert all(topics.expected_signer(topic) == who for topic, who in TOPICS.items())


def test_a_member_of_another_federation_and_a_stranger_are_not_heard() -> None:
    # of the same name, too
    ours, theirs = Authority("steel").signers(), Authority("steel").signers()
    copper = Authority("copper").signers()
    topic = topics.up("steel", "plant-a")
    for forged in (
        theirs["plant-a"].sign(topic, b"{}"),
        copper["plant-a"].sign(topic, b"{}"),
        b"{}",
    ):
        with pytest.raises(ForgedError):
            ours["coordinator"].verify(topic, forged)
    with pytest.raises(ForgedError, match="mallory"):
        ours["coordinator"].verify(topics.up("steel", "mallory"), b"{}")
    with pytest.raises(ForgedError, match="federation steel"):
        ours["coordinator"].verify(
            topics.up("copper", "plant-a"), copper["plant-a"].sign(topic, b"{}")
        )


def test_a_changed_or_cut_message_is_not_heard() -> None:
    signers, topic, random = (
        Authority("steel").signers(),
        topics.up("steel", "plant-a"),
        secrets.SystemRandom(),
    )
    signed = signers["plant-a"].sign(topic, b'{"weight": 0.7}')
    assert signed[:1] == ENVELOPE_MARK
    assert signed[ENVELOPE_HEADER:] == b'{"weight": 0.7}'
    for place in range(len(signed)):
        changed = bytearray(signed)
        changed[place] ^= 1 << random.randrange(8)
        for forged in (bytes(changed), signed[:place] or b"\x00"):
            with pytest.raises(ForgedError):
                signers["coordinator"].verify(topic, forged)


def test_a_broadcast_is_attested_for_its_federation_run_round_and_tensors() -> None:
    authority = Authority("steel")
    signer, coordinator = (
        MessageSigner(authority.kit("coordinator")),
        authority.keys["coordinator"].public,
    )
    blank = Manifest(
        federation="steel",
        run="a" * 16,
        round=3,
        node="coordinator",
        digest="b" * 64,
        size=9,
        chunk_size=1024,
    )
    signed = msgspec.structs.replace(blank, signature=signer.sign_broadcast(blank))
    verify_broadcast(signed, coordinator)
    for change in (
        {"federation": "copper"},
        {"run": "c" * 16},
        {"round": 4},
        {"digest": "d" * 64},
        {"node": "x"},
    ):
        with pytest.raises(ForgedError):
            verify_broadcast(msgspec.structs.replace(signed, **change), coordinator)
    for signature in (
        "",
        "zz",
        signed.signature[:-2],
        MessageSigner(authority.kit("plant-a")).sign_broadcast(blank),
    ):
        with pytest.raises(ForgedError):
            verify_broadcast(msgspec.structs.replace(signed, signature=signature), coordinator)


# What a kit says and refuses


def test_who_is_no_longer_in_the_charter_cannot_use_its_kit() -> None:
    authority = Authority("steel")
    kit = authority.kit("plant-a")
    authority.revoke("plant-a")
    with pytest.raises(UsageError, match="no member"):
        MessageSigner(msgspec.structs.replace(kit, charter=authority.kit("plant-b").charter))
    revoked = MessageSigner(kit).sign(topic := topics.up("steel", "plant-a"), b"{}")
    with pytest.raises(ForgedError, match="no member"):
        MessageSigner(authority.kit("coordinator")).verify(topic, revoked)


def test_a_charter_that_is_forged_changed_or_has_expired_is_refused() -> None:
    authority, other = Authority("steel"), Authority("steel")
    data = authority.kit("plant-a").charter
    assert verify_members(data, authority.key.public, "here") == authority.charter
    for forged in (
        other.kit("plant-a").charter,
        data[:-1],
        data.replace(b"steel", b"stole"),
        b"",
        b"{}",
    ):
        with pytest.raises(MemberListError, match="relied on"):
            verify_members(forged, authority.key.public, "here")
    old = Authority("steel", expires=datetime.now(UTC) - timedelta(seconds=1))
    with pytest.raises(MemberListError, match="has expired"):
        MessageSigner(old.kit("plant-a"))


def test_a_signature_under_one_thing_is_none_under_another() -> None:
    key = SigningKey.generate()
    with pytest.raises(ForgedError):
        open_envelope(key.public, "charter", key.sign_envelope("bundle", b"{}"))
    with pytest.raises(ForgedError):
        open_envelope(key.public, "bundle", key.sign_envelope("bund", b"le{}"))


# Over a broker


class Meddler(Adversary):
    """Says everything again: as it was, without signature, changed, and in the name of others."""

    def attack(self, seen: Delivery) -> None:
        if not seen.payload.startswith(ENVELOPE_MARK):
            return
        self.say(seen.topic, seen.payload, retain=seen.retain)
        self.say(seen.topic, seen.payload[ENVELOPE_HEADER:])
        for name in PLANTS:
            self.say(topics.up(self.federation, name), seen.payload)
            self.say(topics.down(self.federation, name), seen.payload)
        for forged in self.lies(decode_any(seen.payload[ENVELOPE_HEADER:])):
            for lie in (encode(forged), seen.payload[:ENVELOPE_HEADER] + encode(forged)):
                self.say(seen.topic, lie)

    def lies(self, message: AnyMessage) -> list[AnyMessage]:
        change = msgspec.structs.replace
        match message:
            case Spec():
                return [change(message, rounds=1), change(message, run="f" * 16)]
            case RoundState():
                return [
                    RoundState(
                        run=message.run, round=message.round, status="aborted", reason="a lie"
                    ),
                    change(message, round=message.round + 1),
                    change(message, delta=None),
                ]
            case Contribution():
                return [change(message, weight=0.001)]
            case Welcome():
                return [Refusal(session=message.session, reason="a lie", remedy="believe it")]
            case Accepted():
                return [change(message, counted=False), change(message, round=message.round + 1)]
            case Presence():
                return [change(message, online=not message.online)]
        return []


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "int4"])
def test_a_meddling_broker_changes_no_byte_of_what_is_learnt(
    codec: Codec, endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    authority = Authority("meddled")
    signers = authority.signers()
    federation = Federation(
        endpoint, plants, tmp_path, "meddled", 3, Participation(), signers=signers, codec=codec
    )
    meddler = Meddler(endpoint, "meddled")
    sessions = [federation.coordinator(), *(federation.node(name) for name in PLANTS)]
    outcome = sessions[0].end()
    for session in sessions[1:]:
        session.end()
    meddler.close()
    images = {name: federation.images(name) for name in PLANTS}
    simulated = simulate(federation.spec, federation.first, images, compare=True)
    assert isinstance(outcome, Outcome)
    assert same(outcome.broadcast, simulated.broadcast)
    assert all(
        same(federation.personal(name), to_arrays(simulated.models[name].tensors))
        for name in PLANTS
    )
    kinds = {
        type(decode_any(seen.payload[ENVELOPE_HEADER:]))
        for seen in meddler.seen
        if seen.payload.startswith(ENVELOPE_MARK)
    }
    assert {Spec, RoundState, Contribution, Welcome, Accepted, Presence} <= kinds
    heads = []
    for name in PLANTS:  # and each model can show what it was made from, tensor by tensor
        metadata, tensors, *_ = load(source := federation.folder / name / "model")
        broadcast = Signer(authority.kit(name), days=9).check(metadata, tensors, source).broadcast
        verify_broadcast(broadcast, authority.charter.coordinator.key)
        assert (broadcast.run, broadcast.round) == (federation.spec.run, 3)
        assert broadcast.record
        verify_head(
            broadcast.record, authority.charter.coordinator.key, "meddled", topics.COORDINATOR
        )
        heads.append(broadcast.record)
    # and each knows the same record
    assert heads == [heads[0]] * len(PLANTS)
    assert heads[0].entries == 5


class Splitter(Adversary):
    """Shows each member a past of its own: what was said to it before comes twice more,
    later and in any order.

    But for contributions: one that is asked for more than four times has to wait for a minute.
    """

    def __init__(self, broker: Endpoint, federation: str, proxies: Mapping[str, UnreliableProxy]):
        super().__init__(broker, federation)
        self._random, self._proxies = random.Random(3), proxies
        self._over = threading.Event()
        self.repeated = 0
        self._repeater = threading.Thread(target=self._repeat, daemon=True)
        self._repeater.start()

    def close(self) -> list[Delivery]:
        self._over.set()
        self._repeater.join()
        return super().close()

    def _repeat(self) -> None:
        said = Counter[tuple[str, bytes]]()
        while not self._over.wait(0.02):
            for member, proxy in self._proxies.items():
                heard = [
                    each
                    for each in [*self.seen]
                    if self._is_for(member, each) and len(each.payload) < 9000
                ]
                if heard := [each for each in heard if said[member, each.payload] < 2]:
                    again = self._random.choice(heard)
                    proxy.say(again.topic, again.payload)
                    said[member, again.payload] += 1
                    self.repeated += 1

    def _is_for(self, member: str, seen: Delivery) -> bool:
        topic = seen.topic
        if member == topics.COORDINATOR:
            return b"Contribution" not in seen.payload and topic in {
                each(self.federation, name)
                for each in (topics.up, topics.presence)
                for name in PLANTS
            }
        return topic in (
            topics.spec(self.federation),
            topics.round_state(self.federation),
            topics.down(self.federation, member),
            topics.presence(self.federation, topics.COORDINATOR),
            topics.presence(self.federation, member),
        )


@pytest.mark.slow
def test_a_broker_that_shows_each_member_a_past_of_its_own_changes_no_byte_and_blames_nobody(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        proxies = {
            name: stack.enter_context(UnreliableProxy(endpoint.port))
            for name in (topics.COORDINATOR, *PLANTS)
        }
        reached = {name: Endpoint.parse(proxy.url) for name, proxy in proxies.items()}
        signers = Authority("split").signers()
        federation = Federation(
            reached, plants, tmp_path, "split", 3, Participation(), signers=signers
        )
        splitter = Splitter(endpoint, "split", proxies)
        coordinator = federation.coordinator()
        nodes = [federation.node(name) for name in PLANTS]
        outcome = coordinator.end()
        for node in nodes:
            node.end()
        splitter.close()
    assert splitter.repeated
    images = {name: federation.images(name) for name in PLANTS}
    simulated = simulate(federation.spec, federation.first, images, compare=True)
    assert isinstance(outcome, Outcome)
    assert same(outcome.broadcast, simulated.broadcast)
    assert all(
        same(federation.personal(name), to_arrays(simulated.models[name].tensors))
        for name in PLANTS
    )
    told = [event for session in (coordinator, *nodes) for event in session.all_told()]
    assert not any(isinstance(event, progress.NodeRefused) for event in told)
    assert not any("older copy" in event.text for event in told if isinstance(event, progress.Note))


def test_a_coordinator_that_changes_the_spec_of_a_run_is_noticed(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    signers = Authority("altered").signers()
    federation = Federation(
        endpoint, plants, tmp_path, "altered", 500, Participation(), signers=signers
    )
    coordinator, node = federation.coordinator(), federation.node(PLANTS[0])
    coordinator.wait_for(progress.NodeJoined)
    changed = msgspec.structs.replace(federation.spec, seed=8)
    with MqttClient(
        federation.endpoint(topics.COORDINATOR), "", inbox=queue.Queue(), persistent=False
    ) as unfaithful:
        unfaithful.publish(topics.spec("altered"), encode(changed), retain=True)
        told = node.wait_for(progress.Note)
    assert "changed the spec" in told.text  # type: ignore[union-attr]
    for session in (node, coordinator):
        session.stop()


@pytest.mark.slow
def test_a_node_that_starts_again_notices_a_spec_that_was_changed_meanwhile(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    """It says what has changed, and goes on once the coordinator has said what the run began
    with.
    """
    federation = Federation(endpoint, plants, tmp_path, "altered-later", 500, Participation())
    first = federation.spec
    coordinator, nodes = federation.coordinator(), [federation.node(name) for name in PLANTS]
    coordinator.wait_for(progress.RoundClosed)
    for session in (*nodes, coordinator):
        session.stop()
    changed = msgspec.structs.replace(first, seed=8)
    assert publish_retained(endpoint, {topics.spec("altered-later"): encode(changed)})

    def node() -> Session:
        found = discover(endpoint, "altered-later", 5, print, lambda: False, tmp_path / PLANTS[0])
        assert found is not None
        federation.spec = found.spec
        return federation.node(PLANTS[0])

    with pytest.raises(UsageError, match=r"seed.*7.*8") as refused:
        node().end()
    assert "--state" in refused.value.remedy
    federation.spec = first
    coordinator = federation.coordinator()
    again = node()
    coordinator.wait_for(progress.NodeJoined)
    for session in (again, coordinator):
        session.stop()


def test_without_signatures_the_same_meddling_ends_a_federation(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    """Else the test above would prove nothing."""
    federation = Federation(endpoint, plants, tmp_path, "unsigned", 3, Participation())
    coordinator = federation.coordinator()
    liar = Adversary(endpoint, "unsigned")
    node = federation.node(PLANTS[0])
    coordinator.wait_for(progress.NodeJoined)
    liar.say(
        topics.round_state("unsigned"),
        RoundState(run=federation.spec.run, round=1, status="aborted", reason="!"),
    )
    with pytest.raises(EdgeNodeError, match="ended early: !"):
        node.end()
    liar.close()
    coordinator.stop()


@pytest.mark.slow
def test_a_federation_that_is_played_back_trains_nobody(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spec, round and broadcast of an earlier run, all of them right:
    only a coordinator that answers is there now.
    """
    authority = Authority("past")
    federation = Federation(
        endpoint, plants, tmp_path, "past", 500, Participation(), signers=authority.signers()
    )
    listener = Adversary(endpoint, "past")
    coordinator = federation.coordinator()
    nodes = [federation.node(name) for name in PLANTS]
    coordinator.wait_for(progress.RoundClosed)
    for session in (*nodes, coordinator):
        session.stop()
    listener.close()
    played = [each.payload for each in listener.seen if each.topic == topics.round_state("past")][
        -1
    ]
    blob = decode_any(played[ENVELOPE_HEADER:]).broadcast  # type: ignore[union-attr]
    player = BlobTransfer(
        endpoint,
        "past",
        topics.COORDINATOR,
        BlobStore(tmp_path / "coordinator" / "blobs"),
        queue.Queue(),
    )
    player.start()
    player.offer(blob.digest, blob.chunk_size)
    federation.folder = tmp_path / "later"
    monkeypatch.setattr("trainer.federation.client.session_state.SILENCE", 2.0)
    fooled = federation.node(PLANTS[0])
    note = fooled.wait_for(progress.Note)
    while "has not let us in" not in note.text:  # type: ignore[union-attr]
        note = fooled.wait_for(progress.Note)
    assert not any(
        isinstance(event, progress.Received | progress.Measured) for event in fooled.told
    )
    fooled.stop()
    player.close()


def test_on_topics_that_nobody_signs_or_has_asked_for_nothing_is_heard(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    """A broker may send what nobody has subscribed to: beside the topics that are signed,
    or where chunks belong.
    """
    strays = [
        "x",
        "",
        "a/b/c/d/e/f/g/h",
        *(f"{topic}/x" for topic in (*TOPICS, topics.spec("steel"))),
    ]
    strays += [topics.want("steel", name, "x") for name in ("coordinator", *PLANTS)]
    with UnreliableProxy(endpoint.port) as proxy:
        reached = Endpoint.parse(proxy.url)
        federation = Federation(
            reached,
            plants,
            tmp_path,
            "steel",
            2,
            Participation(),
            signers=Authority("steel").signers(),
        )
        coordinator, node = federation.coordinator(), federation.node(PLANTS[0])
        coordinator.wait_for(progress.NodeJoined)
        run = federation.spec.run
        for message in (
            RoundState(run=run, round=1, status="aborted", reason="a lie"),
            Hello(session="a" * 16, run=run, software=""),
        ):
            for topic in strays:
                proxy.say(topic, encode(message))
        sessions = [coordinator, node, *(federation.node(name) for name in PLANTS[1:])]
        ends = [session.end() for session in sessions]
    assert all(ends)
    assert [event.node for event in coordinator.told if isinstance(event, progress.NodeJoined)] == [
        PLANTS[0]
    ]


def test_a_broker_cannot_have_a_member_refused_by_forging_its_chunks(
    endpoint: Endpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Chunks bear no signature, so bytes that do not fit prove nothing about their holder."""
    signers, news, data = (
        Authority("steel").signers(),
        queue.Queue[object](),
        secrets.token_bytes(5000),
    )
    holder, asker = (
        BlobTransfer(
            replace(endpoint, signer=signers[name]), "steel", name, BlobStore(tmp_path / name), news
        )
        for name in ("plant-a", "coordinator")
    )
    digest, size = holder._store.put(data)
    manifest = Manifest(
        federation="steel",
        run="a" * 16,
        round=1,
        node="plant-a",
        digest=digest,
        size=size,
        chunk_size=8192,
    )
    forger = MqttClient(endpoint, "forger", inbox=queue.Queue(), persistent=False).open()
    asker.start()
    asker.fetch(manifest)

    def noticed() -> bool:  # the asker may not listen yet
        forger.publish(
            topics.chunks("steel", "plant-a", digest, 8192), encode_chunk(0, bytes(size)), qos=0
        )
        return bool(caplog.records)

    wait_until(noticed)
    assert news.empty()
    holder.start()
    holder.offer(digest, 8192)
    assert news.get(timeout=60) == Fetched(manifest)
    for each in (forger, holder, asker):
        each.close()
    assert {record.getMessage() for record in caplog.records} == {
        "what arrives from plant-a is not the blob that it has signed; asking for it again"
    }


@pytest.mark.slow
def test_a_broker_cannot_have_a_member_refused_by_repeating_its_messages(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    federation = Federation(
        endpoint,
        plants,
        tmp_path,
        "repeated",
        1,
        Participation(),
        signers=Authority("repeated").signers(),
    )
    listener = Adversary(endpoint, "repeated")
    coordinator, node = federation.coordinator(), federation.node(PLANTS[0])
    coordinator.wait_for(progress.NodeJoined)
    hello = listener.wait_for(topics.up("repeated", PLANTS[0]))
    for _ in range(2 * MAX_MESSAGES + 1):  # enough even if the coordinator's window ends amid them
        listener.say(hello.topic, hello.payload, qos=0)
    note = coordinator.wait_for(progress.Note)
    assert f"ignoring {PLANTS[0]} for a while" in note.text  # type: ignore[union-attr]
    assert node.stop() is None  # was not refused
    coordinator.stop()
    listener.close()
    assert not any(isinstance(event, progress.NodeRefused) for event in coordinator.told)


def test_with_a_kit_only_its_signed_federation_is_joined_and_without_one_none_that_is_signed(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, said = Authority("closed"), list[str]()

    def join(at: Endpoint, name: str) -> Joinable | None:
        return discover(at, name, 0.5, said.append, lambda: False, tmp_path)

    signed = Federation(
        endpoint, plants, tmp_path / "1", "closed", 1, Participation(), signers=authority.signers()
    )
    session = signed.coordinator()
    with_kit = replace(endpoint, signer=MessageSigner(authority.kit(PLANTS[0])))
    assert join(with_kit, "closed") == (signed.spec, False)
    with pytest.raises(UsageError, match=r"signed.*kit"):
        join(endpoint, "closed")
    session.stop()
    unsigned = Federation(endpoint, plants, tmp_path / "2", "closed", 1, Participation())
    session = unsigned.coordinator()
    with pytest.raises(UsageError, match="no coordinator"):
        join(with_kit, "closed")
    session.stop()
    told = [
        record.getMessage() for record in caplog.records if "closed/spec" in record.getMessage()
    ]
    assert told == [f"ignored a message on {topics.spec('closed')}: it is not signed"]


def test_a_node_written_from_the_page_takes_part_in_a_signed_federation(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    authority = Authority("default")
    signers = {
        name: signer
        for name, signer in authority.signers().items()
        if name in (topics.COORDINATOR, PLANTS[0])
    }
    federation = Federation(
        endpoint,
        plants,
        tmp_path,
        "default",
        2,
        Participation(),
        "fedavg",
        signers=signers,
        codec="int4",
        epochs="1",
    )  # that the page's node knows no codec is nobody's concern
    coordinator, node = federation.coordinator(), federation.node(PLANTS[0])
    others = [
        ForeignNode(
            endpoint.port,
            name,
            MQTTProtocolVersion.MQTTv5,
            weight=9,
            shift=0.01,
            key=Ed25519PrivateKey.from_private_bytes(authority.keys[name].raw),
            coordinator=Ed25519PrivateKey.from_private_bytes(
                authority.keys["coordinator"].raw
            ).public_key(),
        )
        for name in PLANTS[1:]
    ]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(ForeignNode.run, others))
    outcome = coordinator.end()
    node.end()
    assert isinstance(outcome, Outcome)
    assert all(same(outcome.broadcast, result) for result in results)
    assert federation.contributors() == [{*PLANTS}] * 2
    first, *later = [
        event.bytes for event in node.all_told() if isinstance(event, progress.Received)
    ]
    assert later
    assert max(later) < first / 5


@pytest.mark.slow
def test_who_is_revoked_in_a_run_has_no_part_in_it_any_more_and_the_others_go_on(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    """Its contribution to the open round does not count either;
    the quorum follows the members that are left.
    """
    authority = Authority("purged")
    signers = authority.signers()
    federation = Federation(
        endpoint, plants, tmp_path, "purged", 40, Participation(), signers=signers
    )
    coordinator = federation.coordinator()
    nodes = {name: federation.node(name) for name in PLANTS}
    coordinator.wait_for(progress.RoundClosed)
    nodes[PLANTS[0]].stop()
    while coordinator.wait_for(progress.Contribution).node != PLANTS[2]:  # type: ignore[union-attr]
        pass
    coordinator.stop()
    before = len(federation.contributors())
    authority.revoke(PLANTS[2])
    signers[topics.COORDINATOR] = MessageSigner(authority.kit(topics.COORDINATOR))
    coordinator = federation.coordinator()
    said = coordinator.wait_for(progress.Note)
    while ("no member any more: plant-c; the others go on, 2 close a round") not in said.text:  # type: ignore[union-attr]
        said = coordinator.wait_for(progress.Note)
    nodes[PLANTS[0]] = federation.node(PLANTS[0])
    assert isinstance(coordinator.end(), Outcome)
    for name in PLANTS[:2]:
        nodes[name].end()
    nodes[PLANTS[2]].stop()
    assert federation.contributors()[:before] == [{*PLANTS}] * before
    assert federation.contributors()[before:] == [{*PLANTS[:2]}] * (40 - before)


def test_a_run_that_has_lost_too_many_members_for_its_rule_is_not_gone_on_with(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    authority = Authority("few")
    signers = authority.signers()
    federation = Federation(endpoint, plants, tmp_path, "few", 40, Participation(), signers=signers)
    federation.spec = msgspec.structs.replace(
        federation.spec, aggregation=Aggregation("multi_krum")
    )
    sessions = [federation.coordinator(), *(federation.node(name) for name in PLANTS)]
    sessions[0].wait_for(progress.RoundClosed)
    for session in sessions:
        session.stop()
    authority.revoke(PLANTS[2])
    signers[topics.COORDINATOR] = MessageSigner(authority.kit(topics.COORDINATOR))
    with (
        Ledger(tmp_path / "coordinator") as ledger,
        pytest.raises(UsageError, match="2 of 3"),
    ):
        coordinate(
            ledger,
            federation.spec,
            federation.first,
            federation.endpoint(topics.COORDINATOR),
            print,
        )


def test_members_cannot_guess_each_others_client_ids() -> None:
    authority = Authority("steel")
    ids = {
        MessageSigner(authority.kit(name)).derive_secret("edge-node/steel/plant-a")
        for name in authority.keys
    }
    assert len(ids) == len(authority.keys)
    assert MessageSigner(authority.kit("plant-a")).derive_secret("x") == MessageSigner(
        authority.kit("plant-a")
    ).derive_secret("x")
