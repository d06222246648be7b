"""What `edge-node verify` finds in records, bundles and models, and what nobody can get past it."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import RecordHead
from broker_config.security import trust
from broker_config.security.kit import Kit
from broker_config.security.message_signing import MessageSigner
from broker_config.security.signing import SigningKey
from broker_config.storage import checksums, hash_chain
from edge.bundle.bundle_format import MANIFEST
from edge.registry.bundle_store import line_store
from edge_node.extensions.record.offline_verification import Result, verify
from edge_node.extensions.record.record_file import export, stored_lines
from tests.support.authority import Authority
from tests.support.bundle_stores import stored, tiny
from tests.support.federation_keys import FederationKeys
from tests.support.ledger_runs import drafted
from tests.support.plants import here
from tests.support.record_runs import BROADCASTS, bundle_of, coordinate, newest_head
from tests.support.threaded_federation import PLANTS, Federation
from tests.support.tiny_bundle import tiny_bundle
from trainer.federation.server.journal import Journal
from trainer.federation.server.spec import Participation

KEYS = FederationKeys("steel")


@pytest.fixture
def made(tmp_path: Path) -> dict[str, Path]:
    """A coordinator's folder, its signed record, and a bundle that came of it."""
    run = coordinate(tmp_path / "coordinator")
    export(tmp_path / "coordinator", tmp_path / "steel.record", KEYS.kit("coordinator"))
    bundle = bundle_of(tmp_path / "plant-a", run, newest_head(tmp_path / "coordinator"), KEYS)
    (tmp_path / "plant-a.trust").write_bytes(trust.encode(KEYS.trust()))
    return {
        "state": tmp_path / "coordinator",
        "record": tmp_path / "steel.record",
        "bundle": bundle,
    }


def false(*paths: Path, **options: Any) -> list[str]:
    return [each.refused.what for each in verify(paths, KEYS.trust(), **options) if each.refused]


def test_record_and_bundle_are_verified_with_their_signatures_and_against_each_other(
    made: dict[str, Path],
) -> None:
    record, bundle, state = verify([made["record"], made["bundle"], made["state"]], KEYS.trust())
    assert not any(each.refused for each in (record, bundle, state))
    assert [record.kind, bundle.kind, state.kind] == [
        "record of a coordinator",
        "bundle",
        "record of a coordinator",
    ]
    assert record.verified == [
        "each of 4 entries follows the one before",
        "coordinator, a member of federation steel, has signed its head",
        f"up to entry 4 it is as {made['bundle']} knows it",
    ]
    assert record.not_verified == []
    assert "  plant-a contributed to rounds 1-2" in record.says
    assert any(
        "plant-a, a member of federation steel, has signed it" in text for text in bundle.verified
    )
    assert any("signed the broadcast" in text for text in bundle.verified)
    assert any("plant-a contributed to rounds 1-2 there" in text for text in bundle.verified)
    assert any("written all of it anew" in text for text in state.not_verified)


def test_without_a_trust_file_no_signature_counts_and_that_is_said(made: dict[str, Path]) -> None:
    for each in verify([made["record"], made["bundle"]]):
        assert not each.refused
        assert any("--trust FILE verifies that" in text for text in each.not_verified)
        assert not any("has signed" in text for text in each.verified)


@pytest.mark.parametrize(
    "change",
    [{"weight": 2.0}, {"members": ["plant-b"]}, {"members": ["plant-a", "plant-b", "plant-c"]}],
)
def test_a_coordinator_that_rewrites_its_history_is_noticed_by_whoever_has_a_bundle(
    tmp_path: Path, made: dict[str, Path], change: dict[str, Any]
) -> None:
    shutil.rmtree(made["state"])
    coordinate(made["state"], **change)
    export(made["state"], made["record"], KEYS.kit("coordinator"))
    assert false(made["record"]) == []  # alone it is in order, signature and all
    for rewritten in (made["record"], made["state"]):
        (what,) = false(rewritten, made["bundle"])
        assert f"the record {rewritten} is not the one that {made['bundle']} was made under" in what


def test_a_run_that_was_removed_from_the_record_is_missed_by_its_bundle(
    made: dict[str, Path], tmp_path: Path
) -> None:
    spec, _ = drafted(seed=2)
    (tmp_path / "other").mkdir()
    written = Journal(tmp_path / "other")
    written.begin(msgspec.structs.replace(spec, run="f" * 16), BROADCASTS[0])
    written.close()
    (what,) = false(tmp_path / "other", made["bundle"])
    assert what.startswith("no record that was given has the run")
    assert false(tmp_path / "other", made["record"], made["bundle"]) == []


def test_newest_entries_that_were_removed_are_missed_by_a_bundle_and_by_a_kept_head(
    made: dict[str, Path],
) -> None:
    head = newest_head(made["state"])
    assert false(made["record"], heads=[head.digest]) == []
    lines = made["record"].read_bytes().splitlines()[:-2]
    seal = {
        "head": {"entries": 3, "digest": hash_chain.head_of(lines[-1], 3).digest, "signature": ""}
    }
    made["record"].write_bytes(b"\n".join([*lines, hash_chain.encode({"seal": seal}), b""]))
    assert false(made["record"]) == []
    (what,) = false(made["record"], made["bundle"])
    assert "knows another hash" in what
    (what,) = false(made["record"], heads=[head.digest])
    assert "that of no record" in what


def test_who_has_not_the_members_key_signs_no_head(made: dict[str, Path], tmp_path: Path) -> None:
    stranger = FederationKeys("steel")
    export(made["state"], tmp_path / "forged.record", stranger.kit("coordinator"))
    (what,) = false(tmp_path / "forged.record")
    assert "cannot be relied on" in what
    lines = made["record"].read_bytes().splitlines()
    seal = json.loads(lines[-1])
    for name, value in (("name", "plant-a"), ("name", "mallory")):
        forged = {"seal": {**seal["seal"], name: value}}
        made["record"].write_bytes(b"\n".join([*lines[:-1], hash_chain.encode(forged), b""]))
        (what,) = false(made["record"])
        assert f"is not signed by {value}" in what


def test_a_head_that_the_coordinator_has_not_signed_and_a_broadcast_of_another_are_refused(
    made: dict[str, Path], tmp_path: Path
) -> None:
    run, head = newest_head_run(made)
    forged = bundle_of(tmp_path / "forged", run, head, KEYS)
    manifest = json.loads((forged / MANIFEST).read_bytes())
    manifest["provenance"]["record"]["digest"] = "e" * 64
    sign_again(forged, manifest)
    (what,) = false(forged)
    assert "not made from what" in what
    shutil.rmtree(made["state"])
    run = coordinate(made["state"])
    other = bundle_of(tmp_path / "other", run, newest_head(made["state"]), KEYS)
    manifest = json.loads((other / MANIFEST).read_bytes())
    manifest["broadcast"] = msgspec.to_builtins(KEYS.broadcast(run=run, round=2, digest="e" * 64))
    sign_again(other, manifest)
    (what,) = false(other, made["state"])
    assert "knows no broadcast" in what


def newest_head_run(made: dict[str, Path]) -> tuple[str, RecordHead]:
    entry, head = [*hash_chain.follow(stored_lines(made["state"]))][-1]
    return entry["run"], head


def sign_again(bundle: Path, manifest: dict[str, Any]) -> None:
    content = json.dumps(manifest).encode()
    (bundle / MANIFEST).write_bytes(content)
    (bundle / "manifest.sig").write_bytes(KEYS.keys["plant-a"].sign("bundle", content))


def test_a_bundle_that_another_key_has_signed_is_refused(tmp_path: Path) -> None:
    assert false(KEYS.bundle(tmp_path / "right")) == []
    (what,) = false(KEYS.bundle(tmp_path / "wrong", key=KEYS.keys["plant-b"]))
    assert "not signed by plant-a" in what
    (what,) = false(FederationKeys("steel").bundle(tmp_path / "stranger"))
    assert "cannot be relied on" in what


@pytest.mark.parametrize("change", ["new keys", "gone"])
def test_a_key_that_was_revoked_or_replaced_verifies_nothing(tmp_path: Path, change: str) -> None:
    """The old keys and the old charter beside them are in a lost kit."""
    keys = FederationKeys("steel")
    run = coordinate(tmp_path / "coordinator")
    export(tmp_path / "coordinator", tmp_path / "steel.record", keys.kit("coordinator"))
    stored(line_store(tmp_path / "line", "line-1").folder, tiny(tmp_path / "old"))
    export(tmp_path / "line", tmp_path / "line.record", keys.kit("plant-a"))
    head = newest_head(tmp_path / "coordinator")
    bundle = bundle_of(tmp_path / "bundle", run, head, keys)
    places = [tmp_path / "steel.record", tmp_path / "line.record", bundle]
    before = keys.trust()
    assert sum(signed(each) for each in verify(places, before)) == 4

    keys.keys["coordinator"] = SigningKey.generate()
    if change == "new keys":
        keys.keys["plant-a"] = SigningKey.generate()
    else:
        del keys.keys["plant-a"]
    newer = keys.charter(version=2)
    found = verify(places, keys.trust(charter=newer))
    assert not [each for each in found if each.refused]
    assert [signed(each) for each in found] == [0, 0, 0]
    for result, name in zip(found, ("coordinator", "plant-a", "plant-a"), strict=True):
        assert any(f"{name} has no more" in text for text in result.not_verified)

    # an old trust file, and the newer charter in a record that was given with them
    coordinate(tmp_path / "again")
    export(tmp_path / "again", tmp_path / "again.record", newer_kit(keys, newer))
    found = verify([*places, tmp_path / "again.record"], before)
    assert [signed(each) for each in found] == [0, 0, 0, 1]


def signed(result: Result) -> int:
    """How many signatures count as verified."""
    return sum("has signed" in text for text in result.verified)


def newer_kit(keys: FederationKeys, charter: bytes) -> Kit:
    return msgspec.structs.replace(keys.kit("coordinator"), charter=charter)


def test_keys_that_stayed_count_beside_older_charters(made: dict[str, Path]) -> None:
    newer = KEYS.trust(charter=KEYS.charter(version=7, without="plant-b"))
    record, bundle = verify([made["record"], made["bundle"]], newer)
    assert [signed(record), signed(bundle)] == [1, 2]
    (contributor,) = record.not_verified + bundle.not_verified or [""]
    assert contributor == "", "plant-b was a member by the record's own charter"


def test_contributors_who_are_in_no_charter_are_told(tmp_path: Path) -> None:
    coordinate(tmp_path / "coordinator", members=("plant-a", "plant-x"))
    export(tmp_path / "coordinator", tmp_path / "steel.record", KEYS.kit("coordinator"))
    (record,) = verify([tmp_path / "steel.record"], KEYS.trust())
    assert not record.refused
    (told,) = [text for text in record.not_verified if "plant-x" in text]
    assert "plant-a" not in told


def test_a_bundle_is_a_nodes_of_its_own_federation(tmp_path: Path) -> None:
    by_coordinator = KEYS.bundle(tmp_path / "x", key=KEYS.keys["coordinator"], node="coordinator")
    of_another = KEYS.bundle(tmp_path / "y", federation="brass")
    for folder, name in ((by_coordinator, "coordinator"), (of_another, "plant-a")):
        (what,) = false(folder)
        assert f"not signed by {name}" in what


def test_a_trust_file_with_the_charter_of_another_federation_is_refused(
    made: dict[str, Path],
) -> None:
    other = msgspec.structs.replace(KEYS.trust(), federation="brass")
    with pytest.raises(UsageError, match="brass"):
        verify([made["record"]], other)


def test_a_changed_bundle_and_one_of_an_unsigned_federation(
    made: dict[str, Path], tmp_path: Path
) -> None:
    (made["bundle"] / "model.onnx").write_bytes(b"other")
    assert "model.onnx" in false(made["bundle"])[0]
    tiny_bundle(tmp_path / "unsigned")
    (result,) = verify([tmp_path / "unsigned"], KEYS.trust())
    assert not result.refused
    assert any("nobody has signed it" in text for text in result.not_verified)


def test_a_line_says_when_it_served_which_bundle(made: dict[str, Path], tmp_path: Path) -> None:
    store, (first,) = stored(line_store(tmp_path / "line", "line-1").folder, tiny(tmp_path / "old"))
    second = store.add(made["bundle"], "mia")
    store.record_activation(second, "mia", trial=False)
    store.record_rollback("the line", "too slow", failed=True)
    line, bundle = verify([tmp_path / "line", made["bundle"]], KEYS.trust())
    assert not line.refused
    assert line.kind == "record of a line"
    periods = [text for text in line.says if ": bundle " in text]
    assert [text.partition(": bundle ")[2][:12] for text in periods] == [first, second, first]
    assert sum("served by the line of" in text for text in bundle.says) == 1
    export(tmp_path / "line", tmp_path / "line.record", KEYS.kit("plant-a"))
    (exported,) = verify([tmp_path / "line.record"], KEYS.trust())
    assert exported.says == line.says
    assert "plant-a, a member of federation steel, has signed its head" in exported.verified


def test_a_line_that_rewrites_its_record_contradicts_its_state(tmp_path: Path) -> None:
    store, (one,) = stored(line_store(tmp_path / "line", "line-1").folder, tiny(tmp_path / "old"))
    path = store.folder / "record.jsonl"
    facts = [json.loads(line) for line in path.read_bytes().splitlines()]
    facts[-1]["by"] = "mallory"
    path.write_bytes(b"".join(line + b"\n" for line, _ in hash_chain.chain(facts)))
    (what,) = false(tmp_path / "line")
    assert "contradicts state.json" in what
    assert one in str(store.digests())


def test_a_state_that_counts_its_events_from_below_nothing_is_false(tmp_path: Path) -> None:
    store, _ = stored(line_store(tmp_path / "line", "line-1").folder, tiny(tmp_path / "old"))
    state = store.state()
    (*others, newest) = state.history
    history = (*others, replace(newest, number=-9))
    checksums.write_record(store.folder / "state.json", replace(state, history=history))
    (what,) = false(tmp_path / "line")
    assert "state.json" in what


def test_a_personal_model_is_verified_by_its_checksums_and_its_coordinators_signature(
    made: dict[str, Path], tmp_path: Path
) -> None:
    run, head = newest_head_run(made)
    head = MessageSigner(KEYS.kit("coordinator")).sign_head(head)
    broadcast = KEYS.broadcast(run=run, round=2, digest=BROADCASTS[2].digest, record=head)
    folder = tmp_path / "node" / "model"
    folder.mkdir(parents=True)
    facts = {
        "federation": "steel",
        "run": run,
        "round": 2,
        "node": "plant-b",
        "broadcast": broadcast,
    }
    (folder / "personal.json").write_bytes(msgspec.json.encode(facts))
    (folder / "SHA256SUMS").write_text(
        f"{hashlib.sha256(msgspec.json.encode(facts)).hexdigest()}  personal.json\n"
    )
    model, record = verify([tmp_path / "node", made["record"]], KEYS.trust())
    assert not model.refused
    assert any(
        text.startswith("coordinator") and "has signed the broadcast" in text
        for text in model.verified
    )
    assert any("plant-b contributed to rounds 1-2 there" in text for text in model.verified)
    assert any("up to entry 4" in text for text in record.verified)
    (folder / "personal.json").write_bytes(msgspec.json.encode({**facts, "node": "plant-c"}))
    assert "checksum" in false(tmp_path / "node")[0]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_byte_of_a_signed_record_that_changes_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("record")
    coordinate(folder / "state")
    export(folder / "state", path := folder / "record", KEYS.kit("coordinator"))
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "drop line"])):
        case "flip":
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del content[at:]
        case _:
            lines = content.splitlines(keepends=True)
            del lines[data.draw(st.integers(0, len(lines) - 1))]
            content = bytearray(b"".join(lines))
    path.write_bytes(content)
    assert len(false(path)) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}\n",
        b"\x80\x04N.",
        b"[" * 1_000_000 + b"\n",
        b'{"seal":3}\n',
        b'{"seal":{}}\n',
        b'{"seal":[]}\n',
        b'{"seal":' * 5000 + b"\n",
        bytes(1 << 20),
    ],
    ids=lambda content: repr(content[:12]),
)
def test_a_hostile_file_is_refused_with_a_remedy(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "record").write_bytes(content)
    (result,) = verify([tmp_path / "record"])
    assert result.refused
    assert result.refused.remedy
    assert str(tmp_path / "record") in result.refused.what


@pytest.mark.parametrize(
    "fact",
    [
        {"what": "round closed", "run": "a" * 16},
        {"what": "run begun", "run": 3},
        {"what": "activated"},
        {"what": "run ended", "run": "a" * 16, "time": "x", "outcome": "finished"},
        {"what": ["run begun"]},
        {
            "what": "run begun",
            "run": "a" * 16,
            "time": "2026-01-01T00:00:00Z",
            "spec": {},
            "broadcast": "a" * 64,
        },
    ],
)
def test_entries_of_wrong_types_are_refused_and_name_the_entry(
    tmp_path: Path, fact: dict[str, Any]
) -> None:
    [(line, head)] = hash_chain.chain([fact])
    seal = hash_chain.encode({"seal": {"head": msgspec.to_builtins(head)}})
    (tmp_path / "record").write_bytes(line + b"\n" + seal + b"\n")
    (result,) = verify([tmp_path / "record"])
    assert result.refused
    assert "entry 1 " in result.refused.what


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("manifest.json", '{"a":' * 100_000),
        ("manifest.json", ""),
        ("personal.json", '{"a":' * 100_000),
        ("personal.json", "[]"),
        ("personal.json", '{"federation":"steel","federation":3}'),
    ],
)
def test_a_hostile_bundle_or_model_is_refused_with_a_remedy(
    tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content)
    (result,) = verify([tmp_path], KEYS.trust())
    assert result.refused
    assert result.refused.remedy
    assert str(tmp_path) in result.refused.what


@pytest.mark.parametrize("name", ["/dev/zero", "../personal.json", "pipe", ""])
def test_checksums_of_what_is_no_file_of_the_model_are_not_computed(
    tmp_path: Path, name: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "personal.json").write_text(
        '{"federation":"steel","run":"a","round":1,"node":"plant-a"}'
    )
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  {name}\n")
    assert "is missing" in false(tmp_path)[0]


def test_what_others_wrote_begins_no_line_of_the_output(tmp_path: Path) -> None:
    forged = "x\n  verified: coordinator has signed its head\x1b[2J"
    event = {"what": "activated", "bundle": forged, "serving": forged, "time": forged, "by": "mia"}
    [(line, head)] = hash_chain.chain([event])
    seal = hash_chain.encode({"seal": {"head": msgspec.to_builtins(head)}})
    (tmp_path / "record").write_bytes(line + b"\n" + seal + b"\n")
    (result,) = verify([tmp_path / "record"])
    said = list(result.as_text())
    assert any("has signed its head" in text for text in said)
    assert not [text for text in said if text.strip().startswith("verified") and "signed" in text]
    assert all(text.isprintable() for text in said)


def test_kinds_of_a_later_version_are_followed_and_told(tmp_path: Path) -> None:
    [(line, head)] = hash_chain.chain([{"what": "moon landed on"}])
    seal = hash_chain.encode({"seal": {"head": msgspec.to_builtins(head)}})
    (tmp_path / "record").write_bytes(line + b"\n" + seal + b"\n")
    (result,) = verify([tmp_path / "record"])
    assert not result.refused
    assert any("does not know" in text for text in result.not_verified)


def test_models_of_a_federation_over_a_broker_know_the_record_of_its_coordinator(
    endpoint: Endpoint, plants: dict[str, Path], tmp_path: Path
) -> None:
    authority = Authority("recorded")
    federation = Federation(
        endpoint, plants, tmp_path, "recorded", 3, Participation(), signers=authority.signers()
    )
    sessions = [federation.coordinator(), *(federation.node(name) for name in PLANTS)]
    for session in sessions:
        session.end()
    kit = authority.kit("plant-a")
    trusted = trust.Trust(
        federation="recorded", node="plant-a", authority=kit.authority, charter=kit.charter
    )
    models = [federation.folder / name for name in PLANTS]
    record, *others = verify([federation.folder / "coordinator", *models], trusted)
    assert [each.refused for each in (record, *others)] == [None] * (1 + len(PLANTS))
    assert [text for text in record.verified if text.startswith("up to")] == [
        f"up to entry 5 it is as {model} knows it" for model in models
    ]
    for each in others:
        assert any("signed the broadcast" in text for text in each.verified)


def test_the_command_tells_true_from_false_by_its_exit_code(
    made: dict[str, Path], tmp_path: Path
) -> None:
    done = here("verify", made["record"], made["bundle"], "--trust", tmp_path / "plant-a.trust")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verified: coordinator, a member of federation steel" in done.stdout
    done = here("record", made["state"], "--out", tmp_path / "again.record")
    assert done.returncode == 0, done.stderr
    made["record"].write_bytes(made["record"].read_bytes().replace(b"plant-b", b"plant-x"))
    done = here("verify", made["record"], made["bundle"], "--json")
    assert done.returncode == 1
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [bool(each["refused"]) for each in found] == [True, False]
    done = here("verify", tmp_path / "nothing")
    assert done.returncode == 2
    assert "can be verified" in done.stderr
    (tmp_path / "press").mkdir()
    (tmp_path / "press" / MANIFEST).write_text('{"format": 1, "role": "sensor"}')
    done = here("verify", tmp_path / "press")
    assert done.returncode == 2
    assert "the bundle of a sensor" in done.stderr
    done = here("card", made["bundle"])
    assert done.returncode == 0
    assert done.stdout.startswith("# Model card: plant-a@2 in federation steel")
