"""Many blobs, many holders, many askers: each is scheduled,
and memory and bytes do not grow with their number.
"""

import heapq
import logging
import os
import queue
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_config.broker.embedded import EmbeddedBroker
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.messages import Manifest, Want
from broker_config.transfer.blob_transfer import (
    MAX_DOWNLOADS,
    BlobStore,
    BlobTransfer,
    Download,
    Fetched,
    FetchFailed,
)
from broker_config.transfer.send_queue import HOLD_OFF, Chunk, SendQueue
from broker_config.transfer.transfer_slots import TransferSlots
from tests.support.chunks import KIB, chunk_of, digest_of, manifest_of
from tests.support.waiting import wait_until

DIGEST = "a" * 64


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


# The slots


def waiting(places: int, *names: str) -> TransferSlots[str]:
    slots: TransferSlots[str] = TransferSlots(places)
    for name in names:
        slots.add(name)
    return slots


def served(slots: TransferSlots[str]) -> list[str]:
    while slots.start_next():
        pass
    return slots.active


def test_no_more_are_served_than_there_are_places_and_the_first_come_first() -> None:
    slots = waiting(2, "a", "b", "c", "d")
    assert served(slots) == ["a", "b"]
    slots.remove("a")
    assert served(slots) == ["b", "c"]


def test_who_is_served_or_waits_does_not_queue_twice() -> None:
    slots = waiting(2, "a", "b", "c", "c", "a")
    assert served(slots) == ["a", "b"]
    for name in ("a", "b", "c"):
        slots.remove(name)
    assert served(slots) == []


def test_a_silent_one_gives_way_and_waits_behind_all_who_have_not_been_silent() -> None:
    slots = waiting(1, "silent", "a")
    served(slots)
    slots.demote("silent")
    slots.add("b")
    order = []
    while one := slots.start_next():
        order.append(one)
        slots.remove(one)
    assert order == ["a", "b", "silent"]


def test_a_silent_one_keeps_its_place_while_nobody_waits_for_it() -> None:
    slots = waiting(2, "silent", "a")
    served(slots)
    slots.demote("silent")
    assert slots.active == ["silent", "a"]


def test_a_silent_one_that_is_heard_of_waits_like_the_others() -> None:
    slots = waiting(1, "dead", "alive", "a")
    served(slots)
    slots.demote("dead")
    served(slots)
    slots.demote("alive")
    slots.add("alive")
    slots.remove("a")
    assert served(slots) == ["alive"]
    slots.remove("dead")
    slots.demote("alive")
    assert slots.active == ["alive"]  # nobody waits, not even itself


def test_who_leaves_while_it_waits_is_not_served() -> None:
    slots = waiting(1, "a", "b", "c")
    served(slots)
    slots.remove("b")
    slots.demote("a")
    slots.remove("a")
    assert served(slots) == ["c"]
    slots.remove("c")
    assert served(slots) == []


@given(st.integers(1, 4), st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)))
def test_all_but_the_dead_are_served_however_many_are_dead(
    places: int, everyone: set[int], dead: set[int]
) -> None:
    slots: TransferSlots[str] = TransferSlots(places)
    for one in everyone:
        slots.add(str(one))
    done: set[int] = set()
    for _ in range(2 * len(everyone) + 1):
        served(slots)
        assert len(slots.active) <= places
        for name in list(slots.active):
            if int(name) in dead:
                slots.demote(name)
            else:
                slots.remove(name)
                done.add(int(name))
    assert done == everyone - dead


# The holder


def want(*chunks: int, newest: int = -1) -> Want:
    return Want(digest=DIGEST, chunk_size=KIB, chunks=chunks, newest=newest)


def after(*sent: int) -> SendQueue:
    """A queue that has sent these, one a millisecond."""
    sends = SendQueue()
    for millisecond, number in enumerate(sent):
        sends.add(want(number), 100.0)  # so late that it is not held back
        assert sends.pop(millisecond / 1000) == Chunk(DIGEST, KIB, number)
    return sends


def test_a_chunk_that_is_under_way_to_its_asker_is_not_sent_again() -> None:
    sends = after(1, 2, 3, 4)
    sends.add(want(3, 4, newest=2), 50.0)
    assert len(sends) == 0


def test_a_chunk_is_sent_again_to_who_has_received_a_later_one() -> None:
    sends = after(1, 2, 3, 4)
    sends.add(want(1, 2, newest=3), 0.004)
    assert [sends.pop(0.004).number for _ in range(2)] == [1, 2]


def test_a_chunk_that_was_just_sent_is_sent_again_only_after_a_moment() -> None:
    sends = after(1, 2, 3, 4)
    sends.add(want(1, 4, 5), 0.004)
    assert sends.pop(0.004).number == 5
    sends.add(want(1, 4), 0.004 + HOLD_OFF)
    assert [sends.pop(1.0).number for _ in range(2)] == [1, 4]


def test_after_a_lost_connection_nothing_counts_as_under_way() -> None:
    sends = after(1, 2)
    sends.clear()
    sends.add(want(1, 2), 0.002)
    assert len(sends) == 2


@pytest.mark.parametrize("seed", range(5))
def test_a_fleet_that_fetches_one_blob_over_a_congested_way_does_not_have_it_sent_twice(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    count, askers, latency = 40, 30, 4.0
    data = rng.randbytes(count * KIB)
    manifest = manifest_of(data)
    fetches = [Download(manifest, BlobStore(tmp_path / str(number))) for number in range(askers)]
    joined = [rng.uniform(0, 0.3) for _ in fetches]
    sends, sent, under_way = SendQueue(), [], []
    for step in range(10_000):
        now = step / 20
        for number, download in enumerate(fetches):
            if joined[number] <= now and (chunks := download.chunks_to_request(now)):
                sends.add(
                    Want(
                        digest=manifest.digest,
                        chunk_size=KIB,
                        chunks=chunks,
                        newest=download.newest,
                    ),
                    now,
                )
        if sends:  # 20 chunks a second
            heapq.heappush(under_way, (now + latency, len(sent), sends.pop(now).number))
            sent.append(now)
        while under_way and under_way[0][0] <= now:
            _, order, index = heapq.heappop(under_way)
            for number, download in enumerate(fetches):
                if joined[number] <= sent[order]:
                    download.receive(index, chunk_of(data, index), now)
        if all(download.complete for download in fetches):
            break
    assert all(download.finish().read_bytes() == data for download in fetches)
    assert len(sent) < 2 * count


# The asker


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_fetch_holds_no_file_open_while_it_waits(store: BlobStore) -> None:
    data = bytes(4 * KIB)
    before = open_files()
    fetches = [Download(manifest_of(data, node=f"holder-{number}"), store) for number in range(50)]
    for download in fetches:
        download.receive(0, chunk_of(data, 0), 0.0)
    assert open_files() == before


def test_a_fetch_tells_the_newest_chunk_until_it_has_to_ask_again(store: BlobStore) -> None:
    data = os.urandom(9 * KIB)
    download = Download(manifest_of(data), store)
    assert download.chunks_to_request(0.0)
    assert download.newest == -1
    for index in (7, 3, 7):  # a repeated one tells as much
        download.receive(index, chunk_of(data, index), 0.0)
        assert download.newest == index
    assert download.chunks_to_request(0.0)
    assert download.newest == 7
    assert download.chunks_to_request(100.0)
    assert (download.newest, download.unanswered) == (-1, 1)
    download.receive(1, chunk_of(data, 1), 100.0)
    assert (download.newest, download.unanswered) == (1, 0)


# Through a broker


class Peer:
    """A blob transfer with its store and inbox."""

    def __init__(self, url: str, name: str, folder: Path):
        self.name = name
        self.store = BlobStore(folder / name)
        self.inbox: queue.Queue[Fetched | FetchFailed] = queue.Queue()
        self.transfer = BlobTransfer(Endpoint.parse(url), "f", name, self.store, self.inbox)

    def offer(self, data: bytes) -> Manifest:
        digest, _ = self.store.put(data)
        self.transfer.offer(digest, chunk_size := self.transfer.chunk_size())
        return manifest_of(data, chunk_size, node=self.name)

    def is_fetching(self, manifest: Manifest) -> bool:
        return any(path.name.startswith(manifest.digest) for path in self.store.incoming.iterdir())


@pytest.fixture
def meet(
    tmp_path: Path, mosquitto: EmbeddedBroker, caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[[str], Peer]]:
    """Start a blob transfer; all end with the test, without having stumbled."""
    peers: list[Peer] = []

    def start(name: str) -> Peer:
        peers.append(Peer(mosquitto.url, name, tmp_path))
        peers[-1].transfer.start()
        return peers[-1]

    yield start
    for peer in peers:
        peer.transfer.close()
    assert [
        record.message for record in caplog.get_records("call") if record.levelno >= logging.ERROR
    ] == []


Meet = Callable[[str], Peer]


def never_answered(count: int) -> list[Manifest]:
    return [manifest_of(b"%d" % number * KIB, node=f"dead-{number}") for number in range(count)]


def test_a_few_blobs_are_fetched_at_a_time_and_all_arrive(meet: Meet) -> None:
    asker, holders = meet("asker"), [meet(f"holder-{number}") for number in range(5)]
    manifests = [holder.offer(os.urandom(600 * KIB)) for holder in holders for _ in range(8)]
    for manifest in manifests:
        asker.transfer.fetch(manifest)
    most, arrived = 0, set()
    while len(arrived) < len(manifests):
        most = max(most, len(list(asker.store.incoming.iterdir())))
        try:
            arrived.add(asker.inbox.get(timeout=0.001))
        except queue.Empty:
            assert len(arrived) < len(manifests)
    assert arrived == set(map(Fetched, manifests))
    assert most <= MAX_DOWNLOADS
    assert list(asker.store.incoming.iterdir()) == []


def test_a_dead_holder_does_not_keep_its_place_from_others_and_is_heard_when_it_comes_back(
    meet: Meet,
) -> None:
    asker, late = meet("asker"), os.urandom(100 * KIB)
    forgotten = manifest_of(late, 256 * KIB, node="late")
    for manifest in [forgotten, *never_answered(MAX_DOWNLOADS - 1)]:
        asker.transfer.fetch(manifest)
    wait_until(lambda: len(list(asker.store.incoming.iterdir())) == MAX_DOWNLOADS)
    alive = meet("alive").offer(os.urandom(300 * KIB))
    asker.transfer.fetch(alive)
    assert asker.inbox.get(timeout=60) == Fetched(alive)
    meet("late").offer(late)
    asker.transfer.fetch(forgotten)
    assert asker.inbox.get(timeout=60) == Fetched(forgotten)


def test_a_blob_that_is_cancelled_while_it_waits_is_never_asked_for(meet: Meet) -> None:
    asker, holder = meet("asker"), meet("holder")
    dead = never_answered(MAX_DOWNLOADS)
    for manifest in dead:
        asker.transfer.fetch(manifest)
    cancelled, wanted = holder.offer(os.urandom(70 * KIB)), holder.offer(os.urandom(50 * KIB))
    asker.transfer.fetch(cancelled)
    asker.transfer.cancel(cancelled)
    asker.transfer.fetch(wanted)
    for manifest in dead:
        asker.transfer.cancel(manifest)
    assert asker.inbox.get(timeout=60) == Fetched(wanted)
    assert holder.transfer.bytes_sent % (50 * KIB) == 0  # a busy machine may ask twice
    assert list(asker.store.incoming.iterdir()) == []
    assert asker.inbox.empty()


def test_a_newer_manifest_of_a_holder_takes_the_place_of_the_older_one(meet: Meet) -> None:
    asker, holder = meet("asker"), meet("holder")
    older = manifest_of(b"withdrawn" * KIB, 256 * KIB)
    asker.transfer.fetch(older)
    wait_until(lambda: asker.is_fetching(older))
    asker.transfer.cancel(older)
    newer = holder.offer(os.urandom(100 * KIB))
    asker.transfer.fetch(newer)
    assert asker.inbox.get(timeout=60) == Fetched(newer)
    assert not asker.is_fetching(older)
    assert asker.inbox.empty()


def test_to_cancel_one_holder_s_blob_leaves_another_s_equal_one(meet: Meet) -> None:
    asker, holder = meet("asker"), meet("holder")
    data = os.urandom(100 * KIB)
    of_dead = manifest_of(data, 256 * KIB, node="dead")
    asker.transfer.fetch(of_dead)
    wait_until(lambda: asker.is_fetching(of_dead))
    of_holder = manifest_of(data, 256 * KIB)
    asker.transfer.fetch(of_holder)
    asker.transfer.cancel(of_dead)
    assert holder.offer(data) == of_holder
    assert asker.inbox.get(timeout=60) == Fetched(of_holder)
    assert digest_of(data) in asker.store


def test_who_asks_when_others_have_just_been_served_does_not_starve(meet: Meet) -> None:
    holder = meet("holder")
    manifest = holder.offer(os.urandom(2000 * KIB))
    for number in range(4):
        asker = meet(f"asker-{number}")
        asker.transfer.fetch(manifest)
        assert asker.inbox.get(timeout=60) == Fetched(manifest)
