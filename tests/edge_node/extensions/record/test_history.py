"""What a record may say: its own speaker's facts alone, each once, in order."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker_config.protocol.errors import UsageError
from broker_config.security.message_signing import MessageSigner
from broker_config.storage import hash_chain
from edge.registry.bundle_store import line_store
from edge_node.extensions.record.offline_verification import Result, verify
from edge_node.extensions.record.record_file import RefusedError, Seal, export, stored_lines
from tests.support.bundle_stores import stored, tiny
from tests.support.federation_keys import FederationKeys
from tests.support.ledger_runs import drafted
from tests.support.record_runs import BROADCASTS, bundle_of, coordinate, newest_head
from trainer.federation.server.journal import Journal

KEYS = FederationKeys("steel")
RUN = "a" * 16
OTHER_RUN = "c" * 16
EVENT = {
    "what": "activated",
    "bundle": "b" * 12,
    "sha256": "b" * 64,
    "serving": "b" * 12,
    "time": "2026-03-01T08:00:00+00:00",
    "by": "mia",
}
Fact = dict[str, Any]


def seal(path: Path, facts: Sequence[Fact], name: str = "coordinator") -> Path:
    """A record of these facts, whose head a member has signed."""
    chained = list(hash_chain.chain(facts))
    head = MessageSigner(KEYS.kit(name)).sign_head(chained[-1][1])
    sealed = Seal(head=head, federation="steel", name=name, charter=KEYS.charter())
    lines = [line for line, _ in chained]
    end = hash_chain.encode({"seal": msgspec.to_builtins(sealed)})
    path.write_bytes(b"\n".join([*lines, end, b""]))
    return path


def look(*paths: Path) -> list[Result]:
    return verify(paths, KEYS.trust())


def assert_false(path: Path, entry: int = 0) -> None:
    """The record is FALSE, and nobody has signed it; from this entry on, where it is one."""
    (result,) = look(path)
    assert result.refused
    assert str(path) in result.refused.what
    assert result.refused.remedy
    assert not [text for text in result.verified if "signed" in text]
    if entry:
        assert f"entry {entry} " in result.refused.what


@pytest.fixture
def state(tmp_path: Path) -> Path:
    coordinate(tmp_path / "coordinator")
    return tmp_path / "coordinator"


@pytest.fixture
def facts(state: Path) -> list[Fact]:
    """What a coordinator has to say of a run of two rounds: begun, two rounds closed, ended."""
    entries = [entry for entry, _ in hash_chain.follow(stored_lines(state))]
    kept = []
    for entry in entries:
        kept.append({key: entry[key] for key in entry.keys() - {"number", "before"}})
    return kept


def instead(fact: Fact, **changes: object) -> Fact:
    return {**fact, **changes}


def with_plant_c(closed: Fact) -> Fact:
    """A round in which plant-c has contributed what plant-b had."""
    parts = closed["contributions"]
    return instead(closed, contributions={"plant-a": parts["plant-a"], "plant-c": parts["plant-b"]})


def test_the_record_that_these_tests_change_is_in_order(tmp_path: Path, facts: list[Fact]) -> None:
    (result,) = look(seal(tmp_path / "steel.record", facts))
    assert not result.refused
    assert any("has signed its head" in text for text in result.verified)


# Once, in order


def test_no_later_entry_replaces_what_a_known_head_covers(
    tmp_path: Path, state: Path, facts: list[Fact]
) -> None:
    """The coordinator appends its rounds again, with plant-c in plant-b's place, and signs."""
    bundle = bundle_of(tmp_path / "plant-a", RUN, newest_head(state), KEYS)
    begun, first, second, ended = facts
    for again in (
        [with_plant_c(first), with_plant_c(second)],
        [begun, with_plant_c(first), with_plant_c(second), ended],
        [with_plant_c(second)],
        [ended],
    ):
        record = seal(tmp_path / "steel.record", [*facts, *again])
        assert_false(record, 5)
        found = look(record, bundle)[0]
        assert found.refused
        assert "plant-c" not in "\n".join(found.as_text())


def test_a_round_closes_once_in_order_within_the_spec(tmp_path: Path, facts: list[Fact]) -> None:
    begun, first, second, ended = facts
    third = instead(second, round=3)
    wrong = [
        ([begun, first, first, ended], 3),
        ([begun, second, first, ended], 2),
        ([begun, instead(first, round=0), second], 2),
        ([begun, first, second, third, ended], 4),
        ([begun, first, ended], 3),
        ([begun, first, second, ended, ended], 5),
        ([begun, begun, first, second, ended], 2),
        ([begun, first, instead(ended, outcome="aborted"), second], 4),
        ([first, second, ended], 1),
    ]
    for told, entry in wrong:
        assert_false(seal(tmp_path / "steel.record", told), entry)


def other_run(begun: Fact) -> Fact:
    return instead(begun, run=OTHER_RUN, spec=instead(begun["spec"], run=OTHER_RUN))


def test_a_run_is_over_when_the_next_one_begins(tmp_path: Path, facts: list[Fact]) -> None:
    begun, first, second, ended = facts
    other = other_run(begun)
    assert_false(seal(tmp_path / "steel.record", [begun, first, other, second]), 4)
    assert_false(seal(tmp_path / "steel.record", [begun, other, ended]), 3)
    assert_false(seal(tmp_path / "steel.record", [instead(begun, run=OTHER_RUN)]), 1)
    for told in ([begun, other], [begun, first, second, ended, other]):
        assert not look(seal(tmp_path / "steel.record", told))[0].refused


@pytest.mark.parametrize("name", ["coordinator", "monitor"])
def test_who_is_no_node_contributes_nothing(tmp_path: Path, facts: list[Fact], name: str) -> None:
    begun, first, *_ = facts
    parts = {name: first["contributions"]["plant-a"]}
    assert_false(seal(tmp_path / "steel.record", [begun, instead(first, contributions=parts)]), 2)


def test_contributors_are_those_who_were_drawn_and_have_a_place(
    tmp_path: Path, facts: list[Fact]
) -> None:
    begun, first, *_ = facts
    drawn = instead(first, drawn=["plant-a", "plant-b"])
    assert not look(seal(tmp_path / "steel.record", [begun, drawn]))[0].refused
    assert_false(seal(tmp_path / "steel.record", [begun, with_plant_c(drawn)]), 2)
    single = instead(begun, spec=instead(begun["spec"], nodes=1, quorum=1))
    assert_false(seal(tmp_path / "steel.record", [single, first]), 2)


def test_where_all_of_the_drawn_were_dropped_others_have_taken_their_places(
    tmp_path: Path, facts: list[Fact]
) -> None:
    begun, first, *_ = facts
    told = [begun, instead(first, drawn=["plant-x"])]
    assert not look(seal(tmp_path / "steel.record", told))[0].refused


def test_a_later_event_does_not_change_which_bundle_was_served(tmp_path: Path) -> None:
    claimed = "b" * 12 + "0" * 52
    later = instead(EVENT, what="refused", sha256=claimed)
    assert_false(seal(tmp_path / "line.record", [EVENT, later], "plant-a"), 2)
    foreign = instead(EVENT, what="refused", sha256="e" * 64)  # of a damaged manifest, say
    (found,) = look(seal(tmp_path / "line.record", [EVENT, foreign], "plant-a"))
    assert not found.refused
    assert "e" * 64 not in "\n".join(found.as_text())


# Who may say it


def test_only_the_coordinator_speaks_of_runs(
    tmp_path: Path, state: Path, facts: list[Fact]
) -> None:
    """plant-b seals a record of its own, and one that goes on after the coordinator's."""
    bundle = bundle_of(tmp_path / "plant-a", RUN, newest_head(state), KEYS)
    for told in (facts, [*facts, other_run(facts[0])]):
        record = seal(tmp_path / "steel.record", told, "plant-b")
        assert_false(record)
        assert look(record, bundle)[0].refused
        assert verify([record])[0].refused, "without a trust file, too"


def test_only_a_node_speaks_of_a_line(tmp_path: Path) -> None:
    assert not look(seal(tmp_path / "line.record", [EVENT], "plant-b"))[0].refused
    assert_false(seal(tmp_path / "line.record", [EVENT], "coordinator"))


def test_a_record_is_of_runs_or_of_a_line(tmp_path: Path, facts: list[Fact]) -> None:
    for name in ("coordinator", "plant-b"):
        assert_false(seal(tmp_path / "x.record", [*facts, EVENT], name), 5)
        assert_false(seal(tmp_path / "x.record", [EVENT, *facts], name), 2)


def test_a_record_of_another_federation_is_not_signed_by_this_ones_coordinator(
    tmp_path: Path, facts: list[Fact]
) -> None:
    brass = instead(facts[0], spec=instead(facts[0]["spec"], federation="brass"))
    assert_false(seal(tmp_path / "steel.record", [brass, *facts[1:]]))


def test_a_line_of_another_plant_has_not_served_a_nodes_signed_bundle(
    tmp_path: Path, state: Path
) -> None:
    bundle = bundle_of(tmp_path / "bundle", RUN, newest_head(state), KEYS)
    stored(line_store(tmp_path / "line", "line-1").folder, bundle)
    for name, is_false in (("plant-a", False), ("plant-b", True)):
        export(tmp_path / "line", tmp_path / "line.record", KEYS.kit(name))
        record, served = look(tmp_path / "line.record", bundle)
        assert bool(record.refused) == is_false
        assert any("served by the line of" in text for text in served.says) != is_false


def test_what_verify_would_call_false_is_not_exported(tmp_path: Path, state: Path) -> None:
    out = tmp_path / "out.record"
    with pytest.raises(UsageError, match="plant-a") as refused:
        export(state, out, KEYS.kit("plant-a"))
    assert refused.value.remedy
    with pytest.raises(UsageError, match="brass"):
        export(state, out, FederationKeys("brass").kit("coordinator"))
    stored(line_store(tmp_path / "line", "line-1").folder, tiny(tmp_path / "old"))
    with pytest.raises(UsageError, match="coordinator"):
        export(tmp_path / "line", out, KEYS.kit("coordinator"))
    assert not out.exists()
    assert export(state, out, KEYS.kit("coordinator")).entries == 4


def test_two_records_of_one_run_that_differ_are_false(tmp_path: Path, facts: list[Fact]) -> None:
    """As a coordinator writes them that shows each auditor another one."""
    begun, first, second, ended = facts
    one = seal(tmp_path / "one.record", facts)
    older = seal(tmp_path / "older.record", [begun, first])
    other = seal(tmp_path / "other.record", [begun, first, with_plant_c(second), ended])
    assert not [each for each in look(one, older, one) if each.refused]
    found = look(one, other)
    assert all(each.refused for each in found)
    assert all(str(path) in found[0].refused.what for path in (one, other) if found[0].refused)


def test_a_record_says_from_which_entry_on_nobody_elses_head_covers_it(
    tmp_path: Path, state: Path, facts: list[Fact]
) -> None:
    bundle = bundle_of(tmp_path / "plant-a", RUN, newest_head(state), KEYS)
    record = seal(tmp_path / "steel.record", [*facts, other_run(facts[0])])
    (alone,) = look(record)
    assert any("from entry 1 on" in text for text in alone.not_verified)
    assert alone.as_object()["covered"] == 0
    beside, _ = look(record, bundle)
    assert any("from entry 5 on" in text for text in beside.not_verified)
    assert beside.as_object()["covered"] == 4
    (kept,) = verify([record], KEYS.trust(), [beside.digests[-1]])
    assert not kept.not_verified
    assert kept.as_object()["covered"] == 5


def test_a_journal_that_contradicts_itself_is_not_exported(tmp_path: Path, state: Path) -> None:
    spec = msgspec.structs.replace(drafted()[0], run=RUN)
    (tmp_path / "broken").mkdir()
    written = Journal(tmp_path / "broken")
    written.begin(spec, BROADCASTS[0])
    written.open_round(RUN, 2, BROADCASTS[0], ())
    written.conclude(RUN, BROADCASTS[1])
    written.close()
    with pytest.raises(RefusedError, match="entry 2"):
        export(tmp_path / "broken", tmp_path / "x.record", None)
