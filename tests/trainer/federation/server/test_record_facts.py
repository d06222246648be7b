"""The record of a coordinator: what it says, that it stays what it was,
and its head in what nodes receive.
"""

import shutil
from pathlib import Path

import msgspec
import pytest

from broker_config.protocol.messages import RecordHead, Spec
from broker_config.storage import hash_chain
from tests.support.ledger_runs import NODES, contribution, drafted
from tests.support.paths import REPOSITORY
from trainer.federation.server import journal
from trainer.federation.server.journal import Blob, Journal
from trainer.federation.server.ledger import Ledger
from trainer.federation.server.record_facts import RoundClosed, RunBegun, RunEnded, as_entry

FIRST, SECOND, RESULT = (Blob(letter * 64, 9) for letter in "abc")


def heads(folder: Path) -> list[RecordHead]:
    return [head for _, head in hash_chain.chain(map(as_entry, journal.settled(folder)))]


def test_it_says_who_contributed_what_to_which_round_and_what_became_of_it(tmp_path: Path) -> None:
    spec, _ = drafted()
    written = Journal(tmp_path)
    written.begin(spec, FIRST)
    for node in NODES:
        written.admit(spec.run, node, node * 16)
    written.open_round(spec.run, 1, FIRST, ())
    written.add_contribution(spec.run, 1, "b", 2.0, None)
    written.add_contribution(spec.run, 1, "a", 0.5, Blob("d" * 64, 7))
    # an open round may yet lose contributions
    assert [type(fact) for fact in written.facts()] == [RunBegun]
    written.open_round(spec.run, 2, SECOND, ("a", "c"))
    written.conclude(spec.run, RESULT)
    begun, first, second, ended = written.facts()
    assert isinstance(begun, RunBegun)
    assert (begun.broadcast, msgspec.convert(begun.spec, Spec)) == (FIRST.digest, spec)
    assert isinstance(first, RoundClosed)
    assert {
        node: (part.weight, part.digest, part.bytes) for node, part in first.contributions.items()
    } == {
        "a": (0.5, "d" * 64, 7),
        "b": (2.0, None, 0),
    }
    assert isinstance(second, RoundClosed)
    assert (second.round, second.broadcast, second.drawn, second.contributions) == (
        2,
        SECOND.digest,
        ("a", "c"),
        {},
    )
    assert isinstance(ended, RunEnded)
    assert (ended.outcome, ended.result) == ("finished", RESULT.digest)
    written.begin(drafted(2)[0], FIRST)
    assert written.facts()[:4] == [begun, first, second, ended]
    written.close()


def test_the_head_grows_with_the_journal_and_is_the_same_after_each_kill(tmp_path: Path) -> None:
    federation, seen = drafted(), list[RecordHead | None]()

    def open_again() -> Ledger:
        ledger = Ledger(tmp_path)
        assert ledger.head == (heads(tmp_path) or [None])[-1]
        ledger.begin_or_continue(*federation, new=False)
        ledger.resume()
        seen.append(ledger.head)
        return ledger

    for round_ in (1, 2, 3):
        with open_again() as ledger:
            if round_ == 1:
                for node in NODES:
                    ledger.admit(node, node * 16)
            else:
                ledger.aggregate()
            if round_ < 3:
                ledger.open_round(round_, ())
                ledger.add_contribution("a", contribution(ledger, "a", round_))
            else:
                ledger.conclude()
            seen.append(ledger.head)
    made = heads(tmp_path)
    assert [each.entries for each in seen if each] == [1, 1, 1, 2, 2, 4]
    assert [each for each in seen if each not in made] == []
    shutil.copytree(tmp_path, copy := tmp_path / "copy")
    with Ledger(copy) as ledger:
        assert ledger.head == seen[-1]


def test_the_record_of_a_journal_is_the_same_in_every_version(tmp_path: Path) -> None:
    """Bundles and models have its heads: if this fails, they would fit no record any more."""
    shutil.unpack_archive(REPOSITORY / "tests" / "data" / "version_0_1.tar.xz", tmp_path)
    assert [head.digest[:16] for head in heads(tmp_path / "finished" / "coordinator")] == [
        "9ab8819cd8a613cf",
        "ca669e4c73329023",
        "8b289fbe1830a840",
        "de261b0801527364",
        "cd49bd112b2398bf",
    ]


@pytest.mark.parametrize(
    "change",
    ["UPDATE contributions SET weight = 9 WHERE round = 1", "DELETE FROM rounds WHERE round = 1"],
)
def test_whoever_rewrites_the_journal_with_its_checksum_changes_the_head(
    tmp_path: Path, change: str
) -> None:
    spec, _ = drafted()
    written = Journal(tmp_path)
    written.begin(spec, FIRST)
    written.open_round(spec.run, 1, FIRST, ())
    written.add_contribution(spec.run, 1, "a", 0.5, None)
    written.open_round(spec.run, 2, SECOND, ())
    before = heads(tmp_path)
    written._write((change, ()))
    written.close()
    assert heads(tmp_path) != before
