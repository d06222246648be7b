"""A new bundle comes to a line over the plant's own broker; whatever else comes is refused,
and the line lives on.
"""

import contextlib
import hashlib
import json
import os
import queue
import random
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import paho.mqtt.client as paho
import pytest

from broker_config.broker.embedded import start_broker
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.security import access_list, trust
from broker_config.transfer import blob_transfer
from edge.bundle.verification import Verifier
from edge.config.instance import Instance
from edge.daemon.daemon import serve
from edge.daemon.line_settings import parse
from edge.daemon.service_install import find_needs
from edge.registry.bundle_store import line_store
from edge.registry.pre_rollout_checks import Gate
from edge_node.extensions.bundle_delivery import bundle_messages, bundle_receiver, bundle_sender
from edge_node.extensions.bundle_delivery import topics as delivery
from edge_node.extensions.bundle_delivery.bundle_messages import Answer, File, Offer
from edge_node.extensions.bundle_delivery.bundle_receiver import BundleReceiver
from tests.support.bundle_stores import stored, tiny
from tests.support.daemon_process import serving_daemon
from tests.support.federation_keys import FederationKeys
from tests.support.mqtt_subscriber import subscriber
from tests.support.plants import here
from tests.support.running_pipeline import Running, running
from tests.support.tiny_bundle import RED
from tests.support.waiting import PATIENCE


@pytest.fixture(scope="module")
def ours() -> FederationKeys:
    return FederationKeys()


@pytest.fixture(scope="module")
def plant(tmp_path_factory) -> Iterator[str]:
    """The URL of the plant's own broker."""
    with start_broker(tmp_path_factory.mktemp("plant"), kind="mosquitto") as broker:
        yield broker.url


class Receiving(Running):
    """A line that takes bundles; each has a name of its own, since they share a broker."""

    name = ""
    url = ""

    def send(self, folder: Path) -> Answer:
        return bundle_sender.send_bundle(
            folder, Endpoint.parse(self.url), self.name, lambda _: None
        )


DEFAULT = Gate()


@contextlib.contextmanager
def receiving(
    ours: FederationKeys,
    url: str,
    folder: Path,
    *,
    activate: bool = True,
    gate: Gate = DEFAULT,
    **timing: float,
) -> Iterator[Receiving]:
    store, digests = stored(folder / "memory" / "bundles", ours.bundle(folder / "first", version=7))
    verifier = Verifier(ours.trust(), folder / "memory")
    name = f"line-{secrets.token_hex(4)}"
    with running(store, digests, gate, verifier) as line:
        wanted = bundle_receiver.Settings(url=url, activate=activate)
        taking = BundleReceiver(wanted, name, line.rollout, verifier, **timing)
        with taking.run_in_background():
            found = Receiving(line.rollout, line.line, line.outbox, digests)
            found.name, found.url = name, url
            yield found


@pytest.fixture
def line(request, ours, plant, tmp_path) -> Iterator[Receiving]:
    """With the silence that a test names as parameter."""
    with receiving(ours, plant, tmp_path, **getattr(request, "param", {})) as found:
        yield found


# ---------------------------------------------------------------- what comes


def test_a_bundle_that_the_lines_own_node_has_signed_comes_and_is_served(line, ours, tmp_path):
    folder = ours.bundle(tmp_path / "next", version=8)
    answer = line.send(folder)
    assert (answer.state, answer.remedy) == ("active", "")
    assert answer.findings[0].startswith("its signature is right")
    state = line.store.state()
    assert line.line.model.digest == state.active != line.digests[0]
    assert state.history[-1].by == f"{answer.sender}, over MQTT"
    kept = line.store.path(state.active)
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }
    assert line.send(folder).state == "active"  # again: nothing is to be done
    assert list((line.store.folder / "arriving" / "incoming").iterdir()) == []


def test_a_bundle_of_many_chunks_comes_whole(line, ours, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle_sender.BlobTransfer, "chunk_size", lambda *_: 1024)
    assert line.send(ours.bundle(tmp_path / "next", version=8, size=160)).state == "active"


def test_a_line_may_only_store_what_comes(ours, plant, tmp_path):
    with receiving(ours, plant, tmp_path, activate=False) as line:
        answer = line.send(ours.bundle(tmp_path / "next", version=8))
        assert answer.state == "stored"
        assert line.store.state().active == line.digests[0]
        assert len(line.store.digests()) == 2


def refusal(line: Receiving, folder: Path) -> str:
    """Why a bundle is not taken; the line has what it had."""
    before = line.store.digests()
    answer = line.send(folder)
    assert answer.state == "refused"
    assert answer.remedy
    assert line.store.digests() == before
    assert line.line.model.digest == line.digests[0]
    return answer.text


def test_what_is_not_of_this_lines_node_or_older_is_refused_before_its_graph_is_fetched(
    line, ours, tmp_path, monkeypatch
):
    served = []
    read = bundle_sender.BlobStore.read
    monkeypatch.setattr(
        bundle_sender.BlobStore,
        "read",
        lambda self, *which: served.append(which[0]) or read(self, *which),
    )
    theirs = FederationKeys()
    for number, (folder, reason) in enumerate(
        [
            (
                ours.bundle(tmp_path / "0", key=ours.keys["plant-b"], node="plant-b"),
                "is of plant-b",
            ),
            (ours.bundle(tmp_path / "1", key=ours.keys["plant-b"]), "not signed by plant-a"),
            (theirs.bundle(tmp_path / "2"), "charter cannot be relied on"),
            (ours.bundle(tmp_path / "3", version=6), "is older"),
            (
                ours.bundle(tmp_path / "4", version=9, broadcast=None),
                "its coordinator has signed none",
            ),
        ]
    ):
        assert reason in refusal(line, folder), number
        assert hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest() in served
        assert hashlib.sha256((folder / "model.onnx").read_bytes()).hexdigest() not in served


def test_a_bundle_that_has_failed_in_service_does_not_come_again(line, ours, tmp_path):
    folder = ours.bundle(tmp_path / "next", version=8)
    line.send(folder)
    line.line.on_model_error(line.line.model, RuntimeError("no memory"))
    line.until(line.digests[0])
    answer = line.send(folder)
    assert (answer.state, "it cannot compute" in answer.text) == (
        "refused",
        True,
    )


def test_what_the_gate_refuses_is_told_with_what_it_has_found(ours, plant, tmp_path):
    with receiving(ours, plant, tmp_path, gate=Gate(latency=1e-9)) as line:
        answer = line.send(ours.bundle(tmp_path / "next", version=8))
        assert answer.state == "refused"
        assert "[gate] latency allows" in answer.text
        assert len(answer.findings) == 4


def test_an_unsigned_bundle_is_not_even_offered(line, tmp_path):
    with pytest.raises(UsageError, match="not signed"):
        line.send(tiny(tmp_path / "tiny"))


def test_a_line_that_is_not_there_is_told(plant, ours, tmp_path):
    with pytest.raises(EdgeNodeError, match=r"'nowhere'.*answer"):
        bundle_sender.send_bundle(
            ours.bundle(tmp_path / "next"), Endpoint.parse(plant), "nowhere", print, patience=0.5
        )


# ---------------------------------------------------------------- who must not


def test_a_line_that_checks_no_signatures_takes_nothing_from_a_broker(tmp_path):
    settings = parse({"arrival": {"url": "mqtt://127.0.0.1:1"}}, tmp_path / "line.toml")
    with pytest.raises(UsageError, match="signature") as caught:
        serve(tiny(tmp_path / "tiny"), settings, Instance("line-1", tmp_path / "state"), port=0)
    assert "--trust" in caught.value.remedy


def test_a_lines_service_may_read_the_files_of_that_broker(tmp_path):
    tables = {"arrival": {"url": "mqtts://plant.local", "ca": "ca.pem"}}
    settings = parse(tables, tmp_path / "line.toml")
    options = dict.fromkeys(
        ("bundle", "trust", "watch", "ca", "cert", "key", "output", "state"), None
    )
    needs = find_needs(tmp_path / "line.toml", {**options, "port": 0}, settings, {})
    assert needs.reads == (tmp_path / "ca.pem",)


def test_over_a_federations_broker_nothing_is_sent(provisioned, ours, tmp_path, plant):
    """On one that asks nobody the federation is found; on one that does,
    no member may speak or listen there.
    """
    folder = ours.bundle(tmp_path / "next")
    spec = topics.spec("steel")
    client = paho.Client(paho.CallbackAPIVersion.VERSION2)
    broker = Endpoint.parse(plant)
    client.connect(broker.host, broker.port)
    client.loop_start()
    try:
        client.publish(spec, b"{}", 1, retain=True).wait_for_publish(60)
        with subscriber(plant, "edge-node/v1/lines/#") as messages:
            with pytest.raises(UsageError, match="leave the plant"):
                bundle_sender.send_bundle(folder, broker, "line-1", print)
            assert messages.empty()
    finally:
        client.publish(spec, b"", 1, retain=True).wait_for_publish(60)
        client.disconnect()
    with pytest.raises(EdgeNodeError):
        bundle_sender.send_bundle(
            folder, Endpoint.parse(provisioned.url), "line-1", print, patience=1.0
        )
    member = Endpoint.from_kit(provisioned.kits["plant-a"], with_signer=False)
    with pytest.raises(EdgeNodeError):
        bundle_sender.send_bundle(folder, member, "line-1", print, patience=1.0)


def test_no_member_of_any_federation_may_speak_or_listen_where_bundles_travel():
    names = ("line-1", "nodes", "blobs", "lines")
    sender, digest = "sender-0123456789abcdef", "0" * 64
    used = [each for name in names for each in (delivery.offers(name), delivery.answers(name))]
    used += [topics.want(delivery.namespace(name), sender, "line-x") for name in names]
    used += [topics.chunks(delivery.namespace(name), sender, digest, 262_144) for name in names]
    for federation in ("+", "lines", "steel"):
        for member in (topics.COORDINATOR, topics.MONITOR, "plant-a", "nodes", "bundles", "blobs"):
            given = access_list.rights(member, federation)
            for topic in used:
                assert [
                    each
                    for each in (*given.reads, *given.writes)
                    if paho.topic_matches_sub(each, topic)
                ] == []


# ---------------------------------------------------------------- hostile senders


class Hostile:
    """A client on the plant's broker that says what it likes."""

    def __init__(self, line: Receiving, client: paho.Client, heard: Any) -> None:
        self.line, self._client, self._heard = line, client, heard
        self.sender = f"sender-{secrets.token_hex(8)}"

    def say(self, payload: bytes, topic: str = "") -> None:
        self._client.publish(topic or delivery.offers(self.line.name), payload, 1).wait_for_publish(
            60
        )

    def refused(self, payload: bytes) -> str:
        """Why the line refuses an offer, which is repeated until the line hears it."""
        sender = json.loads(payload)["sender"]
        while True:
            self.say(payload)
            with contextlib.suppress(queue.Empty):
                said = json.loads(self._heard.get(timeout=2).payload)
                # a late answer to an offer before, which was repeated
                while said["sender"] != sender:
                    said = json.loads(self._heard.get(timeout=2).payload)
                assert said["state"] == "refused"
                return str(said["text"])

    def offer(self, **changes: Any) -> bytes:
        files = [
            {"name": name, "digest": hashlib.sha256(name.encode()).hexdigest(), "size": 60}
            for name in ("manifest.json", "manifest.sig", "charter", "model.onnx", "golden.png")
        ]
        # another one each time, by which its answer is known
        sender = f"sender-{secrets.token_hex(8)}"
        return json.dumps(
            {"sender": sender, "chunk_size": 262_144, "files": files} | changes
        ).encode()


@pytest.fixture
def hostile(line) -> Iterator[Hostile]:
    client = paho.Client(paho.CallbackAPIVersion.VERSION2)
    broker = Endpoint.parse(line.url)
    client.max_queued_messages_set(0)
    client.connect(broker.host, broker.port)
    client.loop_start()
    with subscriber(line.url, delivery.answers(line.name)) as heard:
        yield Hostile(line, client, heard)
    client.disconnect()
    client.loop_stop()


def file(name: str, size: int = 60) -> dict[str, Any]:
    return {"name": name, "digest": secrets.token_hex(32), "size": size}


def test_offers_that_cannot_be_are_refused_by_name(line, hostile, ours, tmp_path):
    signed = [file(name) for name in ("manifest.json", "manifest.sig", "charter")]
    for changes, reason in (
        ({"chunk_size": 1}, "chunk_size"),
        ({"chunk_size": 1 << 24}, "chunk_size"),
        ({"files": []}, "files"),
        ({"files": [file("x")] * 100}, "files"),
        ({"files": [file("x", 1 << 50)]}, "size"),
        ({"files": [{"name": "x", "digest": "../../etc/passwd", "size": 3}]}, "digest"),
        (
            {"files": [*signed, file("model.onnx", 300 << 20), file("golden.png", 300 << 20)]},
            "more than 512 MiB",
        ),
        ({"files": [file("model.onnx")]}, "no manifest.json"),
        ({"files": [*signed, signed[0]]}, "no manifest.json"),
        (
            {"files": [file("manifest.json", 2 << 20), *signed[1:]]},
            "no manifest.json, or one that is too large",
        ),
        ({"files": 3}, "files"),
    ):
        assert reason in hostile.refused(hostile.offer(**changes))
    for payload in (b"", b"\xff", b"{", b"[" * 90_000, b"x" * 1_000_000, b'{"sender": "../x"}'):
        hostile.say(payload)
    assert line.send(ours.bundle(tmp_path / "next", version=8)).state == "active"


@contextlib.contextmanager
def twisted(change: Callable[[Offer], Offer], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The sender offers something else than it has."""
    with monkeypatch.context() as patch:
        patch.setattr(bundle_sender, "encode", lambda offer: bundle_messages.encode(change(offer)))
        yield


def renamed(old: str, new: str) -> Callable[[Offer], Offer]:
    def change(offer: Offer) -> Offer:
        files = tuple(
            File(new if each.name == old else each.name, each.digest, each.size)
            for each in offer.files
        )
        return msgspec.structs.replace(offer, files=files)

    return change


def resized(name: str, by: int) -> Callable[[Offer], Offer]:
    def change(offer: Offer) -> Offer:
        files = tuple(
            File(each.name, each.digest, each.size + by * (each.name == name))
            for each in offer.files
        )
        return msgspec.structs.replace(offer, files=files)

    return change


def test_names_and_files_other_than_the_manifests_are_refused(line, ours, tmp_path, monkeypatch):
    folder = ours.bundle(tmp_path / "next", version=8)
    extra = File("../../../etc/cron.d/x", "0" * 64, 7)
    for change, reason in (
        (renamed("model.onnx", "../model.onnx"), "../model.onnx"),
        (renamed("golden.png", "/etc/passwd"), "/etc/passwd"),
        (renamed("golden.png", "model.onnx"), "not what the manifest lists"),
        (
            lambda offer: msgspec.structs.replace(offer, files=(*offer.files, extra)),
            "../../../etc/cron.d/x",
        ),
        (
            lambda offer: msgspec.structs.replace(offer, files=offer.files[:-1]),
            "not what the manifest lists",
        ),
    ):
        with twisted(change, monkeypatch):
            assert reason in refusal(line, folder)
    assert line.send(folder).state == "active"


@pytest.mark.slow
@pytest.mark.parametrize("line", [{"silence": 1.5}], indirect=True)
def test_sizes_that_are_not_those_of_the_files_end_in_a_refusal(line, ours, tmp_path, monkeypatch):
    folder = ours.bundle(tmp_path / "next", version=8)
    for by in (-1, random.choice((1, 1 << 20))):
        with twisted(resized("model.onnx", by), monkeypatch):
            assert "the bundle" in refusal(line, folder)
    assert line.send(folder).state == "active"


def test_chunks_that_are_wrong_are_refused_and_the_next_sender_is_heard(
    line, ours, tmp_path, monkeypatch
):
    folder, honest = ours.bundle(tmp_path / "next", version=8), blob_transfer.encode_chunk

    def forged(number: int, data: bytes) -> bytes:
        wrong = bytearray(data)
        wrong[random.randrange(len(wrong))] ^= 1 << random.randrange(8)
        return honest(number, bytes(wrong))

    with monkeypatch.context() as patch:
        patch.setattr(blob_transfer, "encode_chunk", forged)
        assert "could not be fetched" in refusal(line, folder)
    assert line.send(folder).state == "active"


@pytest.mark.parametrize("line", [{"silence": 1.0}], indirect=True)
def test_a_flood_of_offers_and_chunks_does_not_keep_a_bundle_away(line, hostile, ours, tmp_path):
    for _ in range(300):
        hostile.say(hostile.offer())  # nobody is behind it
        hostile.say(os.urandom(3000))
    for _ in range(100):
        topic = topics.chunks(
            delivery.namespace(line.name), hostile.sender, secrets.token_hex(32), 262_144
        )
        hostile.say(os.urandom(100_000), topic)
    deadline = time.monotonic() + PATIENCE
    while (answer := line.send(ours.bundle(tmp_path / "next", version=8))).state != "active":
        assert time.monotonic() < deadline, answer
    assert line.judge()[0].model == line.store.state().active
    with contextlib.suppress(FileNotFoundError):
        assert (
            sum(
                path.stat().st_size
                for path in (line.store.folder / "arriving").rglob("*")
                if path.is_file()
            )
            < 1e6
        )


# ---------------------------------------------------------------- as processes


def test_send_reaches_a_daemon_and_its_exit_code_says_what_became_of_it(ours, plant, tmp_path):
    (tmp_path / "plant-a.trust").write_bytes(trust.encode(ours.trust()))
    (tmp_path / "line.toml").write_text(
        f'line = "press-3"\ntrust = "plant-a.trust"\n[arrival]\nurl = "{plant}"\n'
    )
    first, next_ = (ours.bundle(tmp_path / str(version), version=version) for version in (7, 8))
    with serving_daemon(tmp_path / "memory", first, "--config", tmp_path / "line.toml") as running_:
        sent = here("bundle", "send", next_, plant, "--line", "press-3")
        assert sent.returncode == 0, sent.stderr
        assert "plant-a@30" in sent.stdout
        assert (
            running_.classify(RED).json()["model"]
            == line_store(tmp_path / "memory", "press-3").state().active
        )
        refused = here("bundle", "send", first, plant, "--line", "press-3", "--json")
        assert refused.returncode == 1
        assert "is older" in json.loads(refused.stdout)["text"]
        assert "What to do:" in refused.stderr
        assert running_.end()[0] == 0
    with serving_daemon(tmp_path / "memory", "--config", tmp_path / "line.toml") as running_:
        assert running_.client.get("/").json()["verified"]


def test_a_broker_that_is_away_does_not_keep_the_line_from_its_work(ours, tmp_path):
    (tmp_path / "plant-a.trust").write_bytes(trust.encode(ours.trust()))
    (tmp_path / "line.toml").write_text(
        'trust = "plant-a.trust"\n[arrival]\nurl = "mqtt://127.0.0.1:1"\n'
    )
    with serving_daemon(
        tmp_path / "memory", ours.bundle(tmp_path / "7"), "--config", tmp_path / "line.toml"
    ) as running_:
        assert running_.classify(RED).json()["label"] == "red"
        assert running_.end()[0] == 0
