"""Blobs arrive whole, whatever the channel, the broker and the process go through."""

import logging
import os
import queue
import random
import resource
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker_config.broker.embedded import EmbeddedBroker, start_broker
from broker_config.mqtt.client import Delivery, Endpoint, MqttClient
from broker_config.protocol import topics
from broker_config.protocol.codec import encode
from broker_config.protocol.errors import EdgeNodeError, PeerError
from broker_config.protocol.messages import Manifest, Want
from broker_config.transfer import send_queue
from broker_config.transfer.blob_transfer import (
    BlobStore,
    BlobTransfer,
    Damaged,
    Download,
    Fetched,
    FetchFailed,
)
from broker_config.transfer.send_queue import PERIOD, REPEATS, Allowances, SendQueue
from tests.support.chunks import KIB, chunk_of, digest_of, manifest_of
from tests.support.ports import free_port
from tests.support.proxy import Proxy
from tests.support.waiting import wait_until

SIZE = 9_000_001  # bytes: an encoder, and a last chunk that is not full


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


# The store


def test_a_blob_is_found_under_its_digest(store: BlobStore) -> None:
    digest, size = store.put(b"some bytes")
    assert (digest, size) == (digest_of(b"some bytes"), 10)
    assert digest in store
    assert store.path(digest).read_bytes() == b"some bytes"
    assert store.read(digest, 5, 100) == b"bytes"
    assert store.put(b"some bytes") == (digest, size)
    store.remove(digest)
    store.remove(digest)
    assert digest not in store


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "AB" * 32, "ab" * 31, "ab" * 32 + "\n"])
def test_only_a_digest_names_a_file(store: BlobStore, name: str) -> None:
    with pytest.raises(ValueError, match="SHA-256"):
        store.path(name)


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file may grow beyond 100 kB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_named_and_leaves_nothing_behind(store: BlobStore, small_disk: None) -> None:
    with pytest.raises(EdgeNodeError, match=str(store.folder)):
        store.put(bytes(200_000))
    assert [file for file in store.folder.rglob("*") if file.is_file()] == []


def test_of_blobs_only_what_is_damaged_is_removed_before_it_is_fetched(store: BlobStore) -> None:
    """Who asks again may do so when the blob has just arrived."""
    intact, _ = store.put(b"as it was")
    damaged, _ = store.put(b"another")
    store.path(damaged).write_bytes(b"changed")
    for digest in (intact, damaged, "0" * 64):
        store.remove_damaged(digest)
    assert store.digests() == {intact}


def test_a_fetch_that_fills_the_disk_says_so(store: BlobStore, small_disk: None) -> None:
    with pytest.raises(EdgeNodeError, match=str(store.folder)):
        Download(manifest_of(bytes(200_000)), store)


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EdgeNodeError, match=str(tmp_path / "file" / "blobs")):
        BlobStore(tmp_path / "file" / "blobs")


# The receiver


def test_a_fetch_asks_for_every_chunk_once_and_then_has_the_blob(store: BlobStore) -> None:
    data = os.urandom(50 * KIB + 1)
    download, asked = Download(manifest_of(data), store), []
    while not download.complete:
        for index in (chunks := download.chunks_to_request(0.0)):
            download.receive(index, chunk_of(data, index), 0.0)
        asked += chunks
    assert sorted(asked) == list(range(51))
    assert download.finish().read_bytes() == data
    assert digest_of(data) in store
    assert list(store.incoming.iterdir()) == []


def test_askers_of_one_blob_want_the_same_chunk_until_they_hear_something_and_then_what_follows_it(
    store: BlobStore,
) -> None:
    data = bytes(1000 * KIB)
    fetches = [
        Download(manifest_of(data, node=f"holder-{number}"), store, window=4 * KIB)
        for number in range(5)
    ]
    assert {download.chunks_to_request(0.0) for download in fetches} == {(0,)}
    # in vain; it may only be late
    assert {download.chunks_to_request(60.0) for download in fetches} == {(1,)}
    for download in fetches:
        download.receive(7, chunk_of(data, 7), 60.0)  # sent before any of them asked
    assert {download.chunks_to_request(60.0) for download in fetches} == {(8, 9, 10, 11)}


def test_who_comes_late_wants_at_the_end_what_it_has_missed(store: BlobStore) -> None:
    data = bytes(10 * KIB)
    download = Download(manifest_of(data), store, window=KIB)
    assert download.chunks_to_request(0.0) == (0,)
    download.receive(6, chunk_of(data, 6), 0.0)
    asked = []
    while not download.complete:
        (chunk,) = download.chunks_to_request(0.0)
        download.receive(chunk, chunk_of(data, chunk), 0.0)
        asked.append(chunk)
    assert asked == [7, 8, 9, 0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("window", "most"), [(8 * KIB, 8), (1, 1)])
def test_no_more_than_a_window_is_outstanding(store: BlobStore, window: int, most: int) -> None:
    data = bytes(100 * KIB)
    download, outstanding, largest = Download(manifest_of(data), store, window=window), set(), 0
    assert len(download.chunks_to_request(0.0)) <= 2
    download.restart()
    while not download.complete:
        outstanding |= set(download.chunks_to_request(0.0))
        largest = max(largest, len(outstanding))
        index = outstanding.pop()
        download.receive(index, chunk_of(data, index), 0.0)
    assert largest == most


def test_a_silent_holder_is_asked_again_more_and_more_rarely_but_at_least_every_five_seconds(
    store: BlobStore,
) -> None:
    download = Download(manifest_of(bytes(100 * KIB)), store)
    asked_at = [tenth / 10 for tenth in range(600) if download.chunks_to_request(tenth / 10)]
    pauses = [round(later - earlier, 1) for earlier, later in pairwise(asked_at)]
    assert pauses[0] <= 1.2
    assert pauses == sorted(pauses)
    assert 4 < pauses[-1] <= 5.2


def test_a_fetch_has_patience_with_a_way_that_has_shown_to_be_slow(store: BlobStore) -> None:
    data = bytes(100 * KIB)
    download, asked, pipe, delivered = Download(manifest_of(data), store), 0, [], 0
    for second in range(100 * 8 + 100):  # the pipe takes 8 seconds for a chunk
        pipe += (chunks := download.chunks_to_request(float(second)))
        asked += len(chunks)
        if second % 8 == 7 and pipe:
            delivered += 1
            download.receive(index := pipe.pop(0), chunk_of(data, index), float(second))
    assert download.complete
    assert asked < 120


def test_after_a_reconnection_a_fetch_asks_at_once(store: BlobStore) -> None:
    download = Download(manifest_of(bytes(100 * KIB)), store)
    assert download.chunks_to_request(0.0)
    assert not download.chunks_to_request(0.1)
    download.restart()
    assert download.chunks_to_request(0.1)


def test_chunks_that_another_asked_for_are_welcome(store: BlobStore) -> None:
    data = os.urandom(3 * KIB)
    download = Download(manifest_of(data), store)
    for index in range(3):
        download.receive(index, chunk_of(data, index), 0.0)
    assert download.complete
    assert download.chunks_to_request(0.0) == ()
    assert download.finish().read_bytes() == data


def test_impossible_chunks_are_ignored_and_counted(store: BlobStore) -> None:
    data = os.urandom(2 * KIB + 10)
    download = Download(manifest_of(data), store)
    for index, chunk in [
        (0, b""),
        (0, bytes(KIB - 1)),
        (0, bytes(KIB + 1)),
        (2, bytes(KIB)),
        (3, b""),
        (2**32, b"x"),
    ]:
        download.receive(index, chunk, 0.0)
    assert download.refused == 6
    for index in (0, 1, 2):
        download.receive(index, chunk_of(data, index), 0.0)
        # a duplicate does not overwrite
        download.receive(index, bytes(len(chunk_of(data, index))), 0.0)
    assert download.finish().read_bytes() == data


def test_a_blob_that_does_not_match_its_digest_is_the_holder_s_fault_and_forgotten(
    store: BlobStore,
) -> None:
    data = os.urandom(2 * KIB)
    download = Download(manifest_of(data), store)
    download.receive(0, bytes(KIB), 0.0)
    download.receive(1, chunk_of(data, 1), 0.0)
    with pytest.raises(PeerError, match="round 4") as caught:
        download.finish()
    assert caught.value.peer == "holder"
    assert digest_of(data) not in store
    assert list(store.incoming.iterdir()) == []


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    chunks=st.integers(1, 40),
    loss=st.floats(0, 0.6),
    window=st.integers(1, 20 * KIB),
)
def test_a_channel_that_loses_reorders_and_repeats_still_delivers(
    tmp_path_factory: pytest.TempPathFactory, seed: int, chunks: int, loss: float, window: int
) -> None:
    rng = random.Random(seed)
    store = BlobStore(tmp_path_factory.mktemp("blobs"))
    data = rng.randbytes(chunks * KIB - rng.randrange(KIB - 1))
    download, under_way, now = Download(manifest_of(data), store, window), [], 0.0
    while not download.complete:
        for index in download.chunks_to_request(now):
            under_way += [
                (now + rng.expovariate(5), index)
                for _ in range(rng.choice((1, 1, 2)))
                if rng.random() > loss
            ]
        due = [entry for entry in under_way if entry[0] <= now]
        under_way = [entry for entry in under_way if entry[0] > now]
        for _, index in due:
            download.receive(index, chunk_of(data, index), now)
        now += 0.05
        assert now < 10_000
    assert download.finish().read_bytes() == data


KILLED = """
import os, signal, sys
from pathlib import Path
from broker_config.transfer.blob_transfer import BlobStore, Download
from tests.support.chunks import chunk_of, manifest_of
data = Path(sys.argv[2]).read_bytes()
download = Download(manifest_of(data), BlobStore(Path(sys.argv[1])))
for index in range(0, 60, 2):
    download.receive(index, chunk_of(data, index), 0.0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_the_death_of_the_process_only_missing_chunks_are_asked_for(
    store: BlobStore, tmp_path: Path
) -> None:
    data = os.urandom(60 * KIB)
    (tmp_path / "data").write_bytes(data)
    died = subprocess.run(
        [sys.executable, "-c", KILLED, store.folder, tmp_path / "data"], check=False
    )
    assert died.returncode == -signal.SIGKILL
    download, asked = Download(manifest_of(data), store), []
    assert download.resumed
    while not download.complete:
        for index in (chunks := download.chunks_to_request(0.0)):
            download.receive(index, chunk_of(data, index), 0.0)
        asked += chunks
    assert sorted(asked) == list(range(1, 60, 2))
    assert download.finish().read_bytes() == data


def test_a_fetch_in_other_chunks_starts_over(store: BlobStore) -> None:
    data = os.urandom(8 * KIB)
    download = Download(manifest_of(data), store)
    download.receive(0, chunk_of(data, 0), 0.0)
    assert Download(manifest_of(data), store).resumed
    assert not Download(manifest_of(data, 2 * KIB), store).resumed


# The sender


def test_chunks_are_sent_in_the_order_asked_for_and_once_while_they_wait() -> None:
    sends, digest = SendQueue(), "a" * 64
    sends.add(Want(digest=digest, chunk_size=KIB, chunks=(5, 3)), 0.0)
    sends.add(Want(digest=digest, chunk_size=KIB, chunks=(3, 4, 5)), 0.0)
    assert [sends.pop(0.0).number for _ in range(len(sends))] == [5, 3, 4]
    sends.add(Want(digest=digest, chunk_size=KIB, chunks=(3,)), 1.0)
    assert len(sends) == 1


def test_what_waits_to_be_sent_is_bounded() -> None:
    sends = SendQueue()
    for start in range(0, 100_000, 1000):
        sends.add(
            Want(digest="a" * 64, chunk_size=KIB, chunks=tuple(range(start, start + 1000))), 0.0
        )
    assert len(sends) < 20_000


def test_nobody_has_each_byte_more_often_than_losses_and_restarts_explain() -> None:
    allowances, want = Allowances(), Want(digest="a" * 64, chunk_size=KIB, chunks=(0,))
    for _ in range(REPEATS):
        assert allowances.left("greedy", want, 10, 1.0) >= 10
        allowances.spend("greedy", want, 10)
    assert allowances.left("greedy", want, 10, 2.0) == 0
    assert allowances.left("other", want, 10, 2.0) == 10 * REPEATS
    assert allowances.left("greedy", want, 10, 2.0 + PERIOD) == 10 * REPEATS


def test_what_exceeds_an_allowance_is_not_queued_and_what_is_under_way_does_not_count() -> None:
    sends = SendQueue()
    assert sends.add(Want(digest="a" * 64, chunk_size=KIB, chunks=(0, 1, 2)), 0.0, 2) == 2
    assert sends.add(Want(digest="a" * 64, chunk_size=KIB, chunks=(0, 1, 2)), 0.0, 2) == 1
    assert sends.add(Want(digest="a" * 64, chunk_size=KIB, chunks=(3,)), 0.0, 0) == 0


# Both, through a broker


class Peer:
    """A blob transfer with its store and inbox."""

    def __init__(self, url: str, name: str, folder: Path, **more: Any):
        self.store = BlobStore(folder / name)
        self.inbox: queue.Queue[Fetched | FetchFailed | Damaged] = queue.Queue()
        self.transfer = BlobTransfer(Endpoint.parse(url), "f", name, self.store, self.inbox, **more)

    def offer(self, data: bytes, chunk_size: int = 0) -> Manifest:
        chunk_size = chunk_size or self.transfer.chunk_size()
        digest, _ = self.store.put(data)
        self.transfer.offer(digest, chunk_size)
        return manifest_of(data, chunk_size)

    def get(self, manifest: Manifest) -> bytes:
        self.transfer.fetch(manifest)
        assert self.inbox.get(timeout=60) == Fetched(manifest)
        return self.store.path(manifest.digest).read_bytes()


Meet = Callable[..., Peer]


@pytest.fixture
def meet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Meet]:
    """Start a blob transfer at `url`; all end with the test, without having stumbled."""
    peers: list[Peer] = []

    def start(url: str, name: str, **more: Any) -> Peer:
        peers.append(Peer(url, name, tmp_path, **more))
        peers[-1].transfer.start()
        return peers[-1]

    yield start
    for peer in peers:
        peer.transfer.close()
    assert [
        record.message for record in caplog.get_records("call") if record.levelno >= logging.ERROR
    ] == []


def test_an_encoder_travels_byte_for_byte(broker: EmbeddedBroker, meet: Meet) -> None:
    holder, asker = meet(broker.url, "holder"), meet(broker.url, "asker")
    data = os.urandom(SIZE)
    assert asker.get(holder.offer(data)) == data
    assert holder.transfer.bytes_sent >= SIZE
    assert asker.transfer.bytes_received >= SIZE
    assert list(asker.store.incoming.iterdir()) == []


def test_what_is_in_the_store_is_not_fetched_again(mosquitto: EmbeddedBroker, meet: Meet) -> None:
    asker = meet(mosquitto.url, "asker")
    asker.store.put(b"known")
    assert asker.get(manifest_of(b"known")) == b"known"


def test_a_blob_that_two_manifests_promise_is_fetched_once_and_told_twice(
    mosquitto: EmbeddedBroker, meet: Meet
) -> None:
    holder, asker = meet(mosquitto.url, "holder"), meet(mosquitto.url, "asker")
    first = holder.offer(os.urandom(SIZE))
    second = Manifest(
        **{field: getattr(first, field) for field in first.__struct_fields__} | {"round": 5}
    )
    for manifest in (first, second, first):
        asker.transfer.fetch(manifest)
    assert {asker.inbox.get(timeout=60), asker.inbox.get(timeout=60)} == {
        Fetched(first),
        Fetched(second),
    }
    assert asker.inbox.empty()
    assert holder.transfer.bytes_sent < 1.5 * SIZE


def test_several_askers_share_what_the_holder_sends(broker: EmbeddedBroker, meet: Meet) -> None:
    holder = meet(broker.url, "holder")
    askers = [meet(broker.url, f"asker-{number}") for number in range(3)]
    data = os.urandom(SIZE)
    manifest = holder.offer(data)
    for asker in askers:
        asker.transfer.fetch(manifest)
    for asker in askers:
        assert asker.inbox.get(timeout=60) == Fetched(manifest)
        assert asker.store.path(manifest.digest).read_bytes() == data
    assert holder.transfer.bytes_sent < 2.5 * SIZE


def test_chunks_fit_into_the_packets_that_the_broker_allows(tmp_path: Path, meet: Meet) -> None:
    with start_broker(tmp_path / "broker", kind="mosquitto", max_packet=131_072) as broker:
        holder, asker = meet(broker.url, "holder"), meet(broker.url, "asker")
        assert 120_000 < holder.transfer.chunk_size() < 131_072
        assert holder.transfer.chunk_size(preferred=64 * KIB) == 64 * KIB
        data = os.urandom(SIZE)
        assert asker.get(holder.offer(data)) == data


def test_a_transfer_survives_a_cut_connection_without_starting_over(
    mosquitto: EmbeddedBroker, meet: Meet
) -> None:
    with Proxy(mosquitto.port, rate=20e6) as proxy:
        holder, asker = meet(mosquitto.url, "holder"), meet(proxy.url, "asker")
        data = os.urandom(SIZE)
        manifest = holder.offer(data)
        asker.transfer.fetch(manifest)
        wait_until(lambda: asker.transfer.bytes_received > SIZE / 3)
        proxy.cut()
        assert asker.get(manifest) == data
        assert holder.transfer.bytes_sent < SIZE + 6e6  # what was under way at most twice


def test_a_transfer_survives_a_restart_of_the_broker(tmp_path: Path, meet: Meet) -> None:
    port = free_port()
    with (
        start_broker(tmp_path / "broker", port=port, kind="mosquitto") as first,
        Proxy(port, rate=20e6) as proxy,
    ):
        holder, asker = meet(first.url, "holder"), meet(proxy.url, "asker")
        data = os.urandom(SIZE)
        manifest = holder.offer(data)
        asker.transfer.fetch(manifest)
        wait_until(lambda: asker.transfer.bytes_received > SIZE / 3)
        first.stop()
        with start_broker(tmp_path / "broker", port=port, kind="mosquitto"):
            assert asker.get(manifest) == data


def test_a_transfer_goes_on_where_an_earlier_one_stopped(
    mosquitto: EmbeddedBroker, meet: Meet, tmp_path: Path
) -> None:
    with Proxy(mosquitto.port, rate=20e6) as proxy:
        holder, early = meet(mosquitto.url, "holder"), Peer(proxy.url, "asker", tmp_path)
        data = os.urandom(SIZE)
        manifest = holder.offer(data)
        early.transfer.start()
        early.transfer.fetch(manifest)
        wait_until(lambda: early.transfer.bytes_received > SIZE / 2)
        early.transfer.close()
    late = meet(mosquitto.url, "asker")
    assert late.get(manifest) == data
    assert late.transfer.bytes_received < 0.6 * SIZE


def test_a_blob_that_an_earlier_process_received_but_did_not_check_is_taken(
    mosquitto: EmbeddedBroker, meet: Meet
) -> None:
    asker = meet(mosquitto.url, "asker")
    data = os.urandom(3 * KIB)
    earlier = Download(manifest_of(data), asker.store)
    for index in range(3):
        earlier.receive(index, chunk_of(data, index), 0.0)
    assert asker.get(manifest_of(data)) == data


def test_a_blob_promised_in_chunks_of_two_sizes_arrives_for_both(
    mosquitto: EmbeddedBroker, meet: Meet
) -> None:
    holder, asker = meet(mosquitto.url, "holder"), meet(mosquitto.url, "asker")
    data = os.urandom(SIZE)
    manifests = holder.offer(data), holder.offer(data, 100 * KIB)
    for manifest in manifests:
        asker.transfer.fetch(manifest)
    assert {asker.inbox.get(timeout=60), asker.inbox.get(timeout=60)} == set(
        map(Fetched, manifests)
    )
    assert asker.store.path(digest_of(data)).read_bytes() == data


def test_a_holder_may_come_later_than_its_asker(mosquitto: EmbeddedBroker, meet: Meet) -> None:
    asker = meet(mosquitto.url, "asker")
    data = os.urandom(300 * KIB)
    asker.transfer.fetch(manifest_of(data, 256 * KIB))
    holder = meet(mosquitto.url, "holder")
    assert asker.get(holder.offer(data)) == data


def test_absurd_requests_are_ignored(mosquitto: EmbeddedBroker, meet: Meet) -> None:
    holder, asker = meet(mosquitto.url, "holder"), meet(mosquitto.url, "asker")
    data = os.urandom(300 * KIB)
    manifest = holder.offer(data)
    absurd = [
        b"",
        b"\xff" * 1000,
        b"x" * 300_000,
        b'{"type":"Finished","session":"0000000000000000","run":"0000000000000000"}',
        f'{{"type":"Want","digest":"{"0" * 64}","chunk_size":1024,"chunks":[0]}}'.encode(),
        (
            f'{{"type":"Want","digest":"{manifest.digest}","chunk_'
            f'size":1024,"chunks":[1073741824]}}'
        ).encode(),
        (
            f'{{"type":"Want","digest":"{manifest.digest}","chunk_size":16777216,"chunks":[1]}}'
        ).encode(),
        *(
            (
                f'{{"type":"Want","digest":"{manifest.digest}","chunk_size":{size},"chunks":[0]}}'
            ).encode()
            for size in (1024, 300 * KIB, 256 * KIB - 1)  # it is offered in chunks of another size
        ),
    ]
    inbox: queue.Queue[object] = queue.Queue()
    with MqttClient(
        Endpoint.parse(mosquitto.url), "vandal", inbox=inbox, persistent=False
    ) as vandal:
        vandal.max_payload = SIZE
        vandal.subscribe(topics.chunks("f", "holder", "+", "+"))
        for payload in absurd:
            vandal.publish(topics.want("f", "holder", "vandal"), payload)
        vandal.publish(topics.chunks("f", "holder", manifest.digest, manifest.chunk_size), b"\0\0")
        assert vandal.flush(60)
        assert asker.get(manifest) == data
        # nothing but what the vandal and the asker asked for
        wanted = {2, 44 * KIB + 4, 256 * KIB + 4}

        def seen() -> set[int]:
            return {
                len(event.payload) for event in list(inbox.queue) if isinstance(event, Delivery)
            }

        wait_until(lambda: seen() >= wanted)  # the vandal may hear of a chunk after the asker
        assert seen() == wanted


def test_a_flood_of_nonsense_costs_one_line_in_the_log_for_each_peer(
    mosquitto: EmbeddedBroker, meet: Meet, caplog: pytest.LogCaptureFixture
) -> None:
    holder, asker = meet(mosquitto.url, "holder"), meet(mosquitto.url, "asker")
    manifest = holder.offer(data := os.urandom(300 * KIB))
    chunks = topics.chunks("f", "holder", "0" * 64, manifest.chunk_size)
    with MqttClient(
        Endpoint.parse(mosquitto.url), "vandal", inbox=queue.Queue(), persistent=False
    ) as vandal:
        asker.transfer.fetch(msgspec.structs.replace(manifest, digest="0" * 64))
        wait_until(lambda: list(asker.store.incoming.iterdir()) != [])
        for _ in range(100):
            for name in ("vandal", "other"):
                vandal.publish(topics.want("f", "holder", name), b"{")
            vandal.publish(chunks, b"")
        assert vandal.flush(60)
        assert asker.get(manifest) == data
    named = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sorted(line.split("cannot be read")[0] for line in named) == [
        "'other' asks for chunks in a way that ",
        "'vandal' asks for chunks in a way that ",
        "a chunk from holder ",
    ]


def _has_sent(holder: Peer, size: int) -> bool:
    return holder.transfer.bytes_sent >= size


@pytest.mark.parametrize(
    ("admitted", "had", "told"),
    [(False, 0, "without taking part"), (True, REPEATS, f"{REPEATS} times in 60 s")],
)
def test_a_flood_of_requests_costs_little_and_is_told_once(
    admitted: bool,
    had: int,
    told: str,
    mosquitto: EmbeddedBroker,
    meet: Meet,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(send_queue, "HOLD_OFF", 0.0)  # a patient vandal
    holder = meet(mosquitto.url, "holder", may_ask=lambda asker: admitted or asker == "asker")
    asker = meet(mosquitto.url, "asker")
    data = os.urandom(300 * KIB)
    manifest = holder.offer(data)
    want = encode(Want(digest=manifest.digest, chunk_size=manifest.chunk_size, chunks=(0, 1)))
    with MqttClient(
        Endpoint.parse(mosquitto.url), "vandal", inbox=queue.Queue(), persistent=False
    ) as vandal:
        for _ in range(50):
            expected = min(had * len(data), holder.transfer.bytes_sent + len(data))
            vandal.publish(topics.want("f", "holder", "vandal"), want)
            assert vandal.flush(60)
            wait_until(partial(_has_sent, holder, expected))
        wait_until(lambda: told in caplog.text)
        assert holder.transfer.bytes_sent == had * len(data)
        assert asker.get(manifest) == data
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


def test_what_is_not_offered_any_more_is_not_served(mosquitto: EmbeddedBroker, meet: Meet) -> None:
    holder, asker = meet(mosquitto.url, "holder"), meet(mosquitto.url, "asker")
    secret = holder.offer(os.urandom(70 * KIB))
    holder.transfer.withdraw(secret.digest)
    asker.transfer.fetch(secret)
    data = os.urandom(50 * KIB)
    assert asker.get(holder.offer(data)) == data
    assert holder.transfer.bytes_sent in (len(data), 2 * len(data))  # a busy machine may ask twice


def test_a_cancelled_fetch_is_forgotten(mosquitto: EmbeddedBroker, meet: Meet) -> None:
    holder, asker = meet(mosquitto.url, "holder"), meet(mosquitto.url, "asker")
    asker.transfer.fetch(manifest := manifest_of(bytes(100 * KIB), node="nobody"))
    wait_until(lambda: len(list(asker.store.incoming.iterdir())) == 1)
    asker.transfer.cancel(manifest)
    data = os.urandom(50 * KIB)
    assert asker.get(holder.offer(data)) == data
    assert list(asker.store.incoming.iterdir()) == []


@pytest.mark.parametrize(
    "change", [lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda _: b"", None]
)
def test_a_holder_whose_file_has_changed_notices_before_it_sends_it(
    change: Callable[[bytes], bytes] | None, mosquitto: EmbeddedBroker, meet: Meet
) -> None:
    """It has changed while it was offered; then it is offered again as it is,
    and after it was put again.
    """
    holder, asker = meet(mosquitto.url, "holder"), meet(mosquitto.url, "asker")
    data = os.urandom(100 * KIB)
    manifest = holder.offer(data)
    path = holder.store.path(manifest.digest)
    path.write_bytes(change(data)) if change else path.unlink()
    asker.transfer.fetch(manifest)
    assert holder.inbox.get(timeout=60) == Damaged(manifest.digest)
    assert not holder.transfer.offer(manifest.digest, manifest.chunk_size)
    holder.offer(data)
    assert asker.get(manifest) == data


def test_a_holder_of_false_bytes_is_named(
    mosquitto: EmbeddedBroker, meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, asker = meet(mosquitto.url, "holder"), meet(mosquitto.url, "asker")
    data = os.urandom(100 * KIB)
    false = bytes(len(data))
    monkeypatch.setattr(holder.store, "checksums", lambda *_: [zlib.crc32(false)])  # it lies
    manifest = holder.offer(data)
    holder.store.path(manifest.digest).write_bytes(false)
    asker.transfer.fetch(manifest)
    news = asker.inbox.get(timeout=60)
    assert isinstance(news, FetchFailed)
    assert news.manifest == manifest
    assert "holder in round 4" in str(news.error)
    assert manifest.digest not in asker.store


def test_a_full_disk_of_the_asker_is_told_with_its_own_remedy(
    mosquitto: EmbeddedBroker, meet: Meet, request: pytest.FixtureRequest
) -> None:
    holder, asker = meet(mosquitto.url, "holder"), meet(mosquitto.url, "asker")
    manifest = holder.offer(os.urandom(200 * KIB))
    request.getfixturevalue("small_disk")
    asker.transfer.fetch(manifest)
    news = asker.inbox.get(timeout=60)
    assert isinstance(news, FetchFailed)
    ours = news.ours("then start again")
    assert ours is not None
    assert str(asker.store.folder) in ours.what
    assert ours.remedy == "free some space there, or make it writable; then start again"


def test_a_torn_rest_of_an_earlier_process_is_not_the_holder_s_fault(
    mosquitto: EmbeddedBroker, meet: Meet
) -> None:
    holder, asker = meet(mosquitto.url, "holder"), meet(mosquitto.url, "asker")
    data = os.urandom(1000 * KIB)
    manifest = holder.offer(data)
    earlier = Download(manifest, asker.store)
    earlier.receive(0, bytes(256 * KIB), 0.0)
    assert asker.get(manifest) == data
