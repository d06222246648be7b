"""What a coordinator has on disk, and what it makes of it when it is started again.

No broker here.
"""

import hashlib
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import asdict

from broker_config.protocol.codec import encode_tensors
from broker_config.protocol.errors import EdgeNodeError, PeerError, UsageError
from broker_config.protocol.messages import Contribution, ImagePrivacy, Manifest, Spec
from broker_config.protocol.retired_fields import REMEDY
from broker_config.protocol.round_contents import masked_tensors
from tests.support import class_sums
from tests.support.ledger_runs import NODES, SESSION, STATISTICS, contribution, drafted
from tests.support.wire_messages import KEYS
from trainer.federation.server.coordinator import round_state
from trainer.federation.server.coordinator.masking_state import Facts, Masking
from trainer.federation.server.journal import TRANSITIONS, Blob, Journal, history, newest_run
from trainer.federation.server.ledger import Ledger
from trainer.methods import METHODS
from trainer.models.named_tensors import Arrays, average


@pytest.fixture(
    params=[(1, "mean"), (2, "multi_krum"), (3, "statistics"), (4, "clipped_mean")],
    ids=lambda param: param[1],
)
def federation(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[Spec, Arrays]:
    class_sums.register(monkeypatch)
    return drafted(*request.param)


def begun(folder: Path, federation: tuple[Spec, Arrays]) -> Iterator[Ledger]:
    with Ledger(folder) as ledger:
        ledger.begin_or_continue(*federation, new=False)
        yield ledger


def play(
    folder: Path, federation: tuple[Spec, Arrays], *, stop_after: int, order: Sequence[str] = NODES
) -> list[bytes]:
    """Two rounds, with the ledger closed and taken up again after every `stop_after` steps;
    each round's broadcast.

    Nodes contribute in this order.
    """
    steps, broadcasts, done = 0, list[bytes](), 0
    while done < 2:
        with Ledger(folder) as ledger:
            ledger.begin_or_continue(*federation, new=False)
            state = ledger.resume()
            if state.status is round_state.Status.GATHERING:
                for node in NODES:
                    ledger.admit(node, node * 16)
                ledger.open_round(1, ())
                state = round_state.restore(state.plan, 1, NODES, (), ())
            for _ in range(stop_after):
                steps += 1
                left = [node for node in order if node not in state.contributed]
                if left:
                    ledger.add_contribution(left[0], contribution(ledger, left[0], state.round))
                    state = state._replace(contributed=state.contributed | {left[0]})
                    continue
                ledger.aggregate()
                if state.round == 2:
                    ledger.conclude()
                else:
                    ledger.open_round(2, ())
                    state = round_state.restore(state.plan, 2, NODES, (), ())
                broadcasts.append(encode_tensors(ledger.broadcast))
                done += 1
                if done == 2:
                    break
    return broadcasts


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_however_often_it_is_taken_up_again_the_averages_are_the_same_bytes(
    stop_after: int, federation: tuple[Spec, Arrays], tmp_path: Path
) -> None:
    whole = play(tmp_path / "whole", federation, stop_after=100)
    assert play(tmp_path / "pieces", federation, stop_after=stop_after) == whole
    assert whole[0] != whole[1]


def test_the_order_in_which_contributions_arrive_does_not_change_the_averages(
    federation: tuple[Spec, Arrays], tmp_path: Path
) -> None:
    came = play(tmp_path / "came", federation, stop_after=2)
    assert play(tmp_path / "otherwise", federation, stop_after=3, order=NODES[::-1]) == came


class SpecWithRegions(Spec, frozen=True, kw_only=True, tag="Spec"):
    """What an earlier version wrote down."""

    regions: dict[str, int]
    leaves: int = 0


@pytest.mark.parametrize("regions", [{}, {"north": 40}])
def test_a_run_that_an_earlier_version_began_with_regions_is_refused_by_that_name(
    regions: dict[str, int], tmp_path: Path
) -> None:
    spec, _ = drafted()
    with closing(Journal(tmp_path)) as journal:
        journal.begin(SpecWithRegions(**asdict(spec), regions=regions), Blob("0" * 64, 1))
    if not regions:
        assert newest_run(tmp_path).spec == spec
        return
    with pytest.raises(UsageError, match="regions") as caught:
        newest_run(tmp_path)
    assert caught.value.remedy == REMEDY


@pytest.mark.parametrize("rule", ["multi_krum", "clipped_mean"])
def test_a_contribution_that_was_changed_on_disk_is_not_aggregated(
    rule: str, tmp_path: Path
) -> None:
    """Rules other than the mean read it again when the round closes."""
    for ledger in begun(tmp_path, drafted(rule=rule)):
        ledger.resume()
        ledger.open_round(1, ())
        for node in NODES:
            message = contribution(ledger, node, 1)
            ledger.add_contribution(node, message)
        assert message.blob is not None
        path = ledger.store.path(message.blob.digest)
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
        with pytest.raises(EdgeNodeError, match=message.blob.digest):
            ledger.aggregate()


def test_of_tensors_only_the_open_rounds_are_kept(
    federation: tuple[Spec, Arrays], tmp_path: Path
) -> None:
    for ledger in begun(tmp_path, federation):
        ledger.resume()
        first = ledger.served
        assert len(first) == 2  # the broadcast, and the delta that makes it of nothing
        for node in NODES:
            ledger.admit(node, node * 16)
        ledger.open_round(1, ())
        messages = [contribution(ledger, node, 1) for node in NODES]
        for message in messages:
            assert message.blob is not None
            ledger.add_contribution(message.blob.node, message)
        assert ledger.store.digests() == {
            *first,
            *(message.blob.digest for message in messages if message.blob),
        }
        ledger.aggregate()
        ledger.open_round(2, ())
        assert ledger.store.digests() == ledger.served
        assert len(ledger.served) == 2  # the broadcast, and the delta to it
    (line,) = history(tmp_path)
    assert (line.round, set(line.weights)) == (1, set(NODES))


def test_what_settles_after_training_needs_the_runs_first_broadcast_which_is_kept_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class_sums.register(monkeypatch)
    spec, broadcast = drafted(rule=STATISTICS)
    spec = msgspec.structs.replace(spec, rounds=3, codec="none")  # two of training, one of sums
    first = hashlib.sha256(encode_tensors(broadcast)).hexdigest()
    entry = METHODS[class_sums.NAME]
    settling = entry._replace(factory=lambda *given: entry.factory(*given)._replace(settle=average))
    made: dict[tuple[str, int], Arrays] = {}
    for name, each in (("trained", entry), ("settled", settling)):
        monkeypatch.setitem(METHODS, class_sums.NAME, each)
        for round_ in (1, 2):
            for ledger in begun(tmp_path / name, (spec, broadcast)):
                ledger.resume()
                if round_ == 1:
                    ledger.open_round(1, ())
                for node in NODES:
                    ledger.add_contribution(node, contribution(ledger, node, round_))
                if (name, round_) == ("settled", 2):
                    change(ledger, first)
                    with pytest.raises(EdgeNodeError, match=first):
                        ledger.aggregate()
                    ledger.store.put(encode_tensors(broadcast))
                ledger.aggregate()
                made[name, round_] = ledger.broadcast
                ledger.open_round(round_ + 1, ())
    assert encode_tensors(made["settled", 1]) == encode_tensors(made["trained", 1])
    halfway = average(broadcast, made["trained", 2])
    assert encode_tensors(made["settled", 2]) == encode_tensors(halfway)


def test_a_node_that_offers_the_first_broadcast_as_its_own_does_not_take_it_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes know its digest, and the store has it: nothing need be fetched."""
    class_sums.register(monkeypatch)
    spec, broadcast = drafted(rule=STATISTICS)
    spec = msgspec.structs.replace(spec, rounds=3, codec="none")
    entry = METHODS[class_sums.NAME]
    settling = entry._replace(factory=lambda *given: entry.factory(*given)._replace(settle=average))
    monkeypatch.setitem(METHODS, class_sums.NAME, settling)
    for ledger in begun(tmp_path, (spec, broadcast)):
        ledger.resume()
        ledger.open_round(1, ())
        for node in NODES:
            ledger.add_contribution(node, contribution(ledger, node, 1))
        ledger.aggregate()
        ledger.open_round(2, ())
        for node in NODES:
            ledger.add_contribution(node, contribution(ledger, node, 2))
        digest = hashlib.sha256(encode_tensors(broadcast)).hexdigest()
        assert digest in ledger.store
        ledger.discard(digest)  # what a blob comes to that was refused, or is late
        ledger.aggregate()


def test_what_a_kill_left_behind_is_removed_and_what_had_arrived_of_a_blob_is_not(
    federation: tuple[Spec, Arrays], tmp_path: Path
) -> None:
    for ledger in begun(tmp_path, federation):
        ledger.resume()
        ledger.store.put(b"a broadcast that was never journalled")
        (ledger.store.incoming / f"{'e' * 64}-a-10-5").write_bytes(b"half")
    for ledger in begun(tmp_path, federation):
        ledger.resume()
        assert ledger.store.digests() == ledger.served
        assert len(list(ledger.store.incoming.iterdir())) == 1


def test_a_contribution_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    federation = drafted()

    def averaged(folder: Path, *, poisoned: bool) -> bytes:
        for ledger in begun(folder, federation):
            ledger.resume()
            ledger.open_round(1, ())
            ledger.add_contribution("a", contribution(ledger, "a", 1))
            if poisoned:
                bad = {name: array.copy() for name, array in ledger.broadcast.items()}
                next(iter(bad.values())).flat[0] = np.inf
                digest, size = ledger.store.put(encode_tensors(bad))
                message = contribution(ledger, "b", 1)
                assert message.blob is not None
                blob = Manifest(
                    federation="steel",
                    run=message.run,
                    round=1,
                    node="b",
                    digest=digest,
                    size=size,
                    chunk_size=1024,
                )
                with pytest.raises(PeerError, match="NaN or infinity"):
                    ledger.add_contribution(
                        "b",
                        Contribution(
                            session=SESSION, run=message.run, round=1, weight=1.0, blob=blob
                        ),
                    )
                assert not ledger.has_counted("b", 1)
            ledger.aggregate()
            return encode_tensors(ledger.broadcast)
        raise AssertionError

    assert averaged(tmp_path / "clean", poisoned=False) == averaged(
        tmp_path / "dirty", poisoned=True
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"basis": ""}, "another encoder or preprocessing"),
        ({"basis": "0" * 64}, "another encoder or preprocessing"),
        ({"weight": 2.0}, "weigh 1, not 2.0"),
        ({"blob": None}, "wrong number of blobs"),
    ],
    ids=["no basis", "another basis", "another weight", "no blob"],
)
def test_statistics_count_only_if_they_are_of_the_rounds_encoder_and_weigh_one(
    change: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class_sums.register(monkeypatch)
    for ledger in begun(tmp_path, drafted(rule=STATISTICS)):
        ledger.resume()
        ledger.open_round(1, ())
        ledger.add_contribution("a", contribution(ledger, "a", 1))
        ledger.aggregate()
        ledger.open_round(2, ())
        good = contribution(ledger, "a", 2)
        ledger.validate("a", good)
        with pytest.raises(PeerError, match=why) as refused:
            ledger.validate("a", msgspec.structs.replace(good, **change))
        assert refused.value.peer == "a"
        if "basis" in change:
            assert "state folder" in refused.value.remedy


def test_the_finished_run_is_taken_up_again_with_its_totals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class_sums.register(monkeypatch)
    spec, broadcast = drafted(rule=STATISTICS)
    _, result = play(tmp_path, (spec, broadcast), stop_after=100)
    for ledger in begun(tmp_path, (spec, broadcast)):
        assert ledger.resume().status is round_state.Status.FINISHED
        assert encode_tensors(ledger.broadcast) == result
        assert ledger.broadcast.keys() == {*spec.tensors, *spec.statistics}


def change(ledger: Ledger, digest: str) -> Path:
    """Flip a bit of a blob."""
    path = ledger.store.path(digest)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return path


def test_a_contribution_that_was_changed_on_disk_is_dropped_and_taken_in_again(
    federation: tuple[Spec, Arrays], tmp_path: Path
) -> None:
    (tmp_path / "whole").mkdir()
    whole = play(tmp_path / "whole", federation, stop_after=100)
    for ledger in begun(tmp_path / "state", federation):
        ledger.resume()
        for node in NODES:
            ledger.admit(node, node * 16)
        ledger.open_round(1, ())
        for node in NODES:
            ledger.add_contribution(node, contribution(ledger, node, 1))
        blob = contribution(ledger, "b", 1).blob
        assert blob is not None
        change(ledger, blob.digest)
    for ledger in begun(tmp_path / "state", federation):
        state = ledger.resume()
        assert ledger.damaged == {"b"}
        assert state.contributed == {"a", "c"}
        assert blob.digest not in ledger.store
        ledger.add_contribution("b", contribution(ledger, "b", 1))
        ledger.aggregate()
        assert encode_tensors(ledger.broadcast) == whole[0]


def test_a_broadcast_that_was_changed_on_disk_is_named_with_what_helps(
    federation: tuple[Spec, Arrays], tmp_path: Path
) -> None:
    for ledger in begun(tmp_path, federation):
        ledger.resume()
        ledger.open_round(1, ())
        for node in NODES:
            ledger.add_contribution(node, contribution(ledger, node, 1))
        ledger.aggregate()
        ledger.open_round(2, ())
        path = change(ledger, ledger.broadcast_blob.digest)
    for ledger in begun(tmp_path, federation):
        with pytest.raises(EdgeNodeError, match=str(path)) as damaged:
            ledger.resume()
        assert f"restore the folder {tmp_path} from a copy, or end the run" in damaged.value.remedy
        ledger.abort()
    with Ledger(tmp_path) as ledger:
        ledger.begin_or_continue(*drafted(2), new=True)
        ledger.resume()


def test_the_first_broadcast_and_the_result_are_written_again_if_they_were_changed(
    federation: tuple[Spec, Arrays], tmp_path: Path
) -> None:
    for ledger in begun(tmp_path, federation):
        first = change(ledger, ledger.resume() and ledger.broadcast_blob.digest)
    for ledger in begun(tmp_path, federation):
        assert ledger.store.is_intact(first.name)
    play(tmp_path, federation, stop_after=2)
    for ledger in begun(tmp_path, federation):
        ledger.resume()
        result = ledger.save_result().read_bytes()
        path = change(ledger, ledger.broadcast_blob.digest)
    for ledger in begun(tmp_path, federation):
        ledger.resume()
        assert path.read_bytes() == result


def test_no_run_begins_over_tensors_of_another_unless_told_so(tmp_path: Path) -> None:
    federation = drafted()
    play(tmp_path, federation, stop_after=100)
    before = {path.name for path in (tmp_path / "blobs").glob("?" * 64)}
    (tmp_path / "journal.sqlite").unlink()
    with (
        Ledger(tmp_path) as ledger,
        pytest.raises(UsageError, match=f"{tmp_path}/journal.sqlite") as lost,
    ):
        ledger.begin_or_continue(*federation, new=False)
    assert {path.name for path in (tmp_path / "blobs").glob("?" * 64)} == before
    assert (
        f"restore the folder {tmp_path} from a copy, or begin another run with --new"
        in lost.value.remedy
    )
    with Ledger(tmp_path) as ledger:
        ledger.begin_or_continue(*drafted(2), new=True)
        assert ledger.resume().status is round_state.Status.GATHERING


def test_a_run_that_was_killed_before_its_first_tensors_were_written_begins_all_the_same(
    tmp_path: Path,
) -> None:
    federation = drafted()
    for ledger in begun(tmp_path, federation):
        ledger.store.remove(ledger.store.digests().pop())
    for ledger in begun(tmp_path, federation):
        assert ledger.resume().status is round_state.Status.GATHERING


def test_other_settings_neither_resume_nor_replace_a_run_unless_told_so(tmp_path: Path) -> None:
    first = drafted()
    for ledger in begun(tmp_path, first):
        ledger.resume()
    with Ledger(tmp_path) as ledger:
        with pytest.raises(UsageError, match=r"quorum.*3.*2.*deadline.*0\.0.*9") as refused:
            ledger.begin_or_continue(*drafted(quorum=2, deadline=9), new=False)
        assert "--new or choose another --state" in refused.value.remedy
        ledger.begin_or_continue(*drafted(), new=False)
        assert ledger.run is not None
        assert ledger.run.spec == first[0]
        ledger.begin_or_continue(*drafted(quorum=2), new=True)
        assert ledger.run.spec.run != first[0].run


def test_a_new_run_does_not_throw_rounds_away_that_have_begun(tmp_path: Path) -> None:
    for ledger in begun(tmp_path, drafted()):
        ledger.resume()
        ledger.open_round(1, ())
        ledger.add_contribution("a", contribution(ledger, "a", 1))
    with Ledger(tmp_path) as ledger:
        with pytest.raises(UsageError, match="round 1 of 2"):
            ledger.begin_or_continue(*drafted(), new=True)
        with pytest.raises(UsageError, match="other settings") as refused:
            ledger.begin_or_continue(*drafted(quorum=2), new=False)
        assert "--new" not in refused.value.remedy
        ledger.abort()
    with Ledger(tmp_path) as ledger:
        ledger.begin_or_continue(*drafted(), new=True)


def test_what_each_node_has_contributed_is_known_after_a_restart(tmp_path: Path) -> None:
    sizes = 0
    for ledger in begun(tmp_path, drafted()):
        ledger.resume()
        for round_ in (1, 2):
            ledger.open_round(round_, ())
            message = contribution(ledger, "aa", round_)
            ledger.add_contribution("aa", message)
            sizes += message.blob.size if message.blob else 0
    for ledger in begun(tmp_path, drafted()):
        ledger.resume()
        assert ledger.contribution_totals() == [("aa", 2, 5.0, sizes)]


def test_an_aborted_run_does_not_go_on(tmp_path: Path) -> None:
    for ledger in begun(tmp_path, drafted()):
        ledger.abort()
    with Ledger(tmp_path) as ledger, pytest.raises(UsageError, match="aborted"):
        ledger.begin_or_continue(*drafted(), new=False)


def test_a_state_folder_belongs_to_one_process(tmp_path: Path) -> None:
    with Ledger(tmp_path), pytest.raises(UsageError, match="used by process"):
        Ledger(tmp_path)
    with Ledger(tmp_path):
        pass


def test_a_journal_of_another_version_is_left_alone(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "journal.sqlite") as database:
        database.execute("CREATE TABLE federation (run TEXT)")
    with pytest.raises(UsageError, match="another version"):
        Ledger(tmp_path)


def test_a_fact_that_the_disk_does_not_take_is_none(tmp_path: Path) -> None:
    """The database refuses to grow: the error names the folder,
    and the transaction leaves no trace.
    """
    spec, broadcast = drafted()
    for ledger in begun(tmp_path, (spec, broadcast)):
        ledger.resume()
        journal: Journal = ledger._journal
        (pages,) = journal._db.execute("PRAGMA page_count").fetchone()
        journal._db.execute(f"PRAGMA max_page_count = {pages}")
        admitted = 0
        # It is the last that fails
        with pytest.raises(EdgeNodeError, match="cannot be written"):  # noqa: PT012
            while True:
                journal.admit(spec.run, f"n{admitted}", "")
                admitted += 1
        run = journal.latest()
        assert run is not None
        assert len(run.members) == admitted


def test_every_kind_of_fact_has_a_method_of_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[str] = []
    # It is watched here as `make chaos` does, which kills a coordinator at each of these kinds.
    monkeypatch.setattr(Journal, "_commit", lambda _journal, kind, *_statements: kinds.append(kind))
    (spec, _), blob, journal = drafted(), Blob("", 0), Journal(tmp_path)
    journal.begin(spec, blob)
    journal.resume(spec.run, 1)
    journal.admit(spec.run, "a", "")
    journal.open_round(spec.run, 1, blob, ())
    journal.record_masks(spec.run, 1, b"{}")
    journal.add_contribution(spec.run, 1, "a", 1.0, None)
    journal.conclude(spec.run, blob)
    journal.finish_node(spec.run, "a")
    journal.abort(spec.run)
    assert tuple(kinds) == TRANSITIONS


# Masked contributions


def masked_run() -> tuple[Spec, Arrays]:
    spec, broadcast = drafted()
    return msgspec.structs.replace(spec, mask_threshold=2), broadcast


def contribute_masked(ledger: Ledger, node: str) -> None:
    """Words of which nobody can tell whether they are masked."""
    expected = masked_tensors(ledger.spec, 1)
    digest, size = ledger.store.put(
        encode_tensors({n: np.full(each.shape, 7, np.uint32) for n, each in expected.items()})
    )
    blob = Manifest(
        federation=ledger.spec.federation,
        run=ledger.spec.run,
        round=1,
        node=node,
        digest=digest,
        size=size,
        chunk_size=4096,
    )
    message = Contribution(session=SESSION, run=ledger.spec.run, round=1, weight=1.0, blob=blob)
    ledger.validate(node, message)
    ledger.add_contribution(node, message)


def test_how_far_masks_are_is_known_after_a_restart_and_so_is_who_takes_part(
    tmp_path: Path,
) -> None:
    federation, facts = (
        masked_run(),
        Facts({"aa": KEYS, "b": KEYS}, {"aa": {"b": "00"}, "b": {"aa": "00"}}),
    )
    for ledger in begun(tmp_path, federation):
        ledger.resume()
        ledger.open_round(1, ())
        assert ledger.masks() == Masking(ledger.spec.run, 2, 0, 1)
        ledger.record_masks(facts, ("aa", "b"))
        for node in ("aa", "b"):
            contribute_masked(ledger, node)
        ledger.record_masks(facts._replace(survivors=("aa", "b")), ())
    for ledger in begun(tmp_path, federation):
        assert ledger.survivors == {"aa", "b"}
        assert ledger.resume().drawn == {"aa", "b"}
        masking = ledger.masks()
        assert (masking.is_gathered, masking.is_shared, masking.survivors) == (
            True,
            True,
            ("aa", "b"),
        )
        assert masking.shares == facts.shares


def test_a_sum_of_which_a_part_is_lost_cannot_be_unmasked(tmp_path: Path) -> None:
    """Its nodes were told that they are in it, and reveal nothing for another one."""
    federation, facts = (
        masked_run(),
        Facts({"aa": KEYS, "b": KEYS}, {"aa": {}, "b": {}}, ("aa", "b")),
    )
    for ledger in begun(tmp_path, federation):
        ledger.resume()
        ledger.open_round(1, ())
        for node in ("aa", "b"):
            contribute_masked(ledger, node)
        ledger.record_masks(facts, ())
        for path in (tmp_path / "blobs").iterdir():
            if path.is_file() and path.name != ledger.broadcast_blob.digest:
                path.write_bytes(b"x")
    for ledger in begun(tmp_path, federation):
        ledger.resume()
        with pytest.raises(EdgeNodeError, match=r"round 1 .*unmasked"):
            ledger.masks()


def test_a_masked_contribution_weighs_one_and_holds_words(tmp_path: Path) -> None:
    for ledger in begun(tmp_path, masked_run()):
        ledger.resume()
        ledger.open_round(1, ())
        open_ = contribution(ledger, "aa", 1)
        with pytest.raises(
            PeerError,
            match=r"masked.*5\.0",
        ):
            ledger.validate("aa", msgspec.structs.replace(open_, weight=5.0))
        with pytest.raises(PeerError):
            ledger.add_contribution("aa", msgspec.structs.replace(open_, weight=1.0))


def test_a_masked_or_private_run_of_an_earlier_version_is_ended_by_name(tmp_path: Path) -> None:
    spec, broadcast = drafted(1, "mean")
    spec = msgspec.structs.replace(spec, privacy=ImagePrivacy(noise=1), revision=1)
    with Ledger(tmp_path) as ledger:
        ledger.begin_or_continue(spec, broadcast, new=False)
    with Ledger(tmp_path) as ledger, pytest.raises(UsageError, match=spec.run):
        ledger.begin_or_continue(spec, broadcast, new=False)


def test_who_counts_places_sees_who_is_left_after_a_drop(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.begin_or_continue(*drafted(1, "mean"), new=False)
        ledger.resume()
        seen = ledger.identities
        for node in NODES[:2]:
            ledger.admit(node, node * 16)
        ledger.drop(NODES[1])
        ledger.admit(NODES[2], "c" * 16)
        assert {*seen} == {*ledger.identities}
        assert {NODES[0], NODES[2]} <= {*seen}
