"""A line's bundles outlast kills, are bounded, and say who served which, and why."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from broker_config.protocol.errors import EdgeNodeError, UsageError
from edge.bundle.bundle_format import CHARTER, LARGEST, SIGNATURE, BundleError
from edge.registry.bundle_store import KEPT, BundleStore, StoreInUseError
from edge_node.cli.main import app
from tests.support.bundle_stores import stored, tiny


@pytest.fixture
def store(tmp_path) -> BundleStore:
    return BundleStore(tmp_path / "bundles")


def events(store: BundleStore) -> list[tuple[str, str]]:
    return [(each.what, each.bundle) for each in store.state().history]


def test_a_bundle_is_kept_by_its_digest_and_the_same_one_only_once(store, tmp_path):
    folder = tiny(tmp_path / "one")
    digest = store.add(folder, "me")
    assert store.add(folder, "me") == digest
    assert store.digests() == [digest]
    assert store.manifest(digest).id == "tiny@1"
    assert sorted(path.name for path in store.path(digest).iterdir()) == [
        "golden.png",
        "manifest.json",
        "model.onnx",
    ]
    assert events(store) == [("added", digest)]
    assert store.folder.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can write into a service's folder")
def test_root_makes_no_store_in_a_service_s_state_folder(tmp_path):
    bundle = tiny(tmp_path / "bundle")
    state = tmp_path / "state"
    state.mkdir()
    os.chown(state, 12345, 12346)
    added = CliRunner().invoke(app, ["bundle", "add", str(bundle), "--memory", str(state)])
    assert isinstance(added.exception, UsageError)
    assert str(state) in added.exception.what
    assert [*state.iterdir()] == []


def test_a_damaged_bundle_is_not_taken_and_a_damaged_copy_is_replaced(store, tmp_path):
    folder = tiny(tmp_path / "one")
    digest = store.add(folder, "me")
    kept = store.path(digest) / "model.onnx"
    kept.write_bytes(kept.read_bytes()[:-1])
    assert store.add(folder, "me") == digest
    assert kept.read_bytes() == (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(b"damaged")
    with pytest.raises(BundleError, match=r"model\.onnx"):
        store.add(folder, "me")
    with pytest.raises(BundleError, match="meanwhile"):
        store.add(tiny(tmp_path / "two", 2), "me", digest)


@pytest.mark.parametrize("name", [CHARTER, SIGNATURE])
def test_what_a_bundle_s_files_lead_to_does_not_get_into_the_store(store, tmp_path, name):
    """Nobody signs these bundles: no hash tells what these files must be."""
    folder = tiny(tmp_path / "a")
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 64)
    for target in (Path("/dev/zero"), secret):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
        with pytest.raises(BundleError, match=name):
            store.add(folder, "test")
    (folder / name).unlink()
    with (folder / name).open("wb") as file:
        file.truncate(LARGEST[name] + 1)
    with pytest.raises(BundleError, match=name):
        store.add(folder, "test")
    assert store.digests() == []
    (folder / name).write_bytes(b"x" * 64)
    store.add(folder, "test")


def test_what_was_served_before_is_the_way_back(tmp_path):
    store, (one, two) = stored(tmp_path / "bundles", tiny(tmp_path / "1"), tiny(tmp_path / "2", 2))
    state = store.record_activation(two, "me")
    assert (state.active, state.previous, state.trial) == (two, one, 1)
    state = store.record_rollback("the line", "too slow", failed=True)
    assert (state.active, state.previous, state.trial, state.bad) == (one, "", 0, {two: "too slow"})
    last = state.history[-1]
    assert (last.what, last.bundle, last.by, last.why) == (
        "rolled back",
        two,
        "the line",
        "too slow",
    )
    state = store.record_activation(two, "me", "on purpose")
    assert (state.bad, state.previous) == ({}, one)
    store.record_confirmation("the line")
    state = store.record_rollback("me", "on purpose", failed=False)
    assert (state.active, state.previous, state.bad) == (one, two, {})


def test_a_bundle_that_replaces_one_on_probation_goes_back_to_the_last_that_has_passed(tmp_path):
    folders = [tiny(tmp_path / str(number), number) for number in range(3)]
    store, (one, two, three) = stored(tmp_path / "bundles", *folders)
    store.record_activation(two, "me")
    assert store.record_activation(three, "me").previous == one
    state = store.record_activation(one, "me")
    assert (state.active, state.previous, state.trial) == (one, three, 0)


def test_old_bundles_are_forgotten_but_never_the_two_that_matter(tmp_path):
    store, (first, second) = stored(
        tmp_path / "bundles", tiny(tmp_path / "a"), tiny(tmp_path / "b", 2)
    )
    store.record_activation(second, "me")
    for number in range(KEPT + 4):
        store.add(tiny(tmp_path / str(number), 10 + number), "me")
    assert len(store.digests()) == KEPT + 2
    assert {first, second} <= set(store.digests())


def test_a_bundle_is_found_by_its_first_digits(tmp_path):
    store, (digest,) = stored(tmp_path / "bundles", tiny(tmp_path / "a"))
    assert store.resolve(digest[:3]) == digest
    for digits in ("", "x", "../", digest + "0"):
        with pytest.raises(UsageError, match="begin with"):
            store.resolve(digits)


def test_one_process_serves_from_a_store(store):
    with store.lock():
        assert store.is_locked()
        with pytest.raises(StoreInUseError, match=str(os.getpid())), store.lock(0.1):
            pass
    assert not store.is_locked()


def test_a_state_that_cannot_be_read_is_said_and_not_overwritten(tmp_path):
    store, (digest,) = stored(tmp_path / "bundles", tiny(tmp_path / "a"))
    path = store.folder / "state.json"
    for content in (b"", b"{", b"\xff", b'{"active": 3}'):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"state\.json"):
            store.record_activation(digest, "me")
        assert path.read_bytes() == content


def test_a_full_disk_leaves_the_store_as_it_was(tmp_path):
    store, _ = stored(tmp_path / "bundles", tiny(tmp_path / "a"))
    before = store.state()
    (store.folder / "state.json.tmp").mkdir()
    with pytest.raises(EdgeNodeError, match=f"{store.folder}: Is a directory"):
        store.add(tiny(tmp_path / "b", 2), "me")
    assert store.state() == before


KILLED = """
import os, sys
from pathlib import Path
from broker_config.storage import disk
from edge.registry.bundle_store import BundleStore

left = int(sys.argv[1])
def step(function):
    def run(*arguments, **options):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), 9)
        done = function(*arguments, **options)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), 9)
        return done
    return run
disk.sync, Path.replace, Path.rename, Path.mkdir = map(step, (disk.sync, Path.replace, \
Path.rename, Path.mkdir))
store = BundleStore(Path(sys.argv[2]))
digest = store.add(Path(sys.argv[3]), "me")
store.record_activation(digest, "me")
store.record_rollback("the line", "too slow", failed=True)
"""


@pytest.mark.slow
def test_a_kill_before_or_after_any_durable_step_leaves_a_store_that_can_be_used(tmp_path):
    old, new = tiny(tmp_path / "old"), tiny(tmp_path / "new", 2)
    seen, step, code = set(), random.randint(1, 2), -signal.SIGKILL
    while code == -signal.SIGKILL:
        store, (one,) = stored(tmp_path / f"bundles-{step}", old)
        command = [sys.executable, "-c", KILLED, str(step), str(store.folder), str(new)]
        code = subprocess.run(command, check=False, timeout=60).returncode
        state = store.state()
        two = store.add(new, "again")
        assert {one, two} == set(store.digests())
        assert not list(store.folder.glob(".*-*"))
        assert (state.active, state.previous) in [(one, ""), (two, one)]
        seen.add((state.active == two, bool(state.bad)))
        assert store.record_activation(two, "again").active == two
        json.loads((store.folder / "state.json").read_bytes())
        step += 3
    assert code == 0
    assert step > 12
    assert seen == {(False, False), (True, False), (False, True)}
    assert Path(store.folder / "state.json").stat().st_mode & 0o077 == 0
