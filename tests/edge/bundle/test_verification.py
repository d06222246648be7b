"""A line serves what its own node has signed for it, and neither something else, older,
expired nor put together.
"""

import contextlib
import fcntl
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from broker_config.protocol.errors import EdgeNodeError
from broker_config.security import trust
from broker_config.security.signing import SigningKey
from edge.bundle import bundle_format
from edge.bundle.verification import Verifier
from edge.inference.predictor import Predictor
from edge.inference.served_model import load_model
from tests.support.daemon_process import Daemon
from tests.support.federation_keys import FederationKeys, soon
from tests.support.tiny_bundle import RED
from tests.support.waiting import PATIENCE

FILES = ("charter", "golden.png", "manifest.json", "manifest.sig", "model.onnx")


@pytest.fixture(scope="module")
def ours() -> FederationKeys:
    return FederationKeys()


@pytest.fixture
def verifier(ours, tmp_path) -> Verifier:
    """Of plant-a's line, which has served nothing yet."""
    return Verifier(ours.trust(), tmp_path / "memory")


def served(folder: Path, verifier: Verifier) -> str:
    """Load a bundle as the line does, and remember it."""
    return load_model(folder, verifier).manifest.id


def refusal(folder: Path, verifier: Verifier) -> str:
    """Why a bundle is not served; that leaves no trace in what is remembered."""
    before = {path.name: path.read_bytes() for path in verifier.memory.glob("*")}
    with pytest.raises(EdgeNodeError) as caught:
        served(folder, verifier)
    assert caught.value.remedy
    assert {path.name: path.read_bytes() for path in verifier.memory.glob("*")} == before
    return caught.value.what


# ---------------------------------------------------------------- what is served


def test_a_bundle_of_the_lines_own_node_is_served_and_served_again(ours, verifier, tmp_path):
    folder = ours.bundle(tmp_path / "bundle")
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    for _ in range(2):
        predictor, ends, _ = load_model(folder, verifier)
        assert predictor.manifest.id == "plant-a@30"
        assert {
            what: round((end - soon(0)).total_seconds() / 86400) for what, end in ends.items()
        } == {
            "bundle": 90,
            "charter": 365,
        }


def test_each_export_has_a_higher_version_whatever_the_clock_says(ours, verifier, tmp_path):
    # a clock that was far ahead, and is right again
    folder = ours.bundle(tmp_path / "bundle", version=2**40)
    served(folder, verifier)
    ours.bundle(folder)
    assert bundle_format.read_bundle(folder).manifest.version == 2**40 + 1
    served(folder, verifier)
    (folder / "manifest.json").write_text("damaged, and replaced by the next export")
    assert bundle_format.read_bundle(ours.bundle(folder)).manifest.version < 2**40


def test_a_signed_bundle_is_served_without_trust_too_and_that_is_said(ours, tmp_path, caplog):
    folder = ours.bundle(tmp_path / "bundle")
    assert load_model(folder).expiry_dates == {}
    assert "not checked" in caplog.text


# ---------------------------------------------------------------- arbitrary software: nothing may
# be changed


def damaged(content: bytes) -> Iterator[bytes]:
    """Every region of a file changed: a bit of up to 80 bytes all over it, cut short,
    made longer, emptied.
    """
    for place in sorted({round(share * (len(content) - 1) / 79) for share in range(80)}):
        changed = bytearray(content)
        changed[place] ^= 1 << random.randrange(8)
        yield bytes(changed)
    yield from (content[:-1], content + b"\0", content + content, b"")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_was_changed_anywhere_is_refused_and_named(ours, verifier, tmp_path, name):
    path = ours.bundle(tmp_path / "bundle") / name
    content = path.read_bytes()
    for changed in damaged(content):
        path.write_bytes(changed)
        assert name in refusal(path.parent, verifier)
    path.write_bytes(content)
    served(path.parent, verifier)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_or_endless_is_refused_and_named(ours, verifier, tmp_path, name):
    path = ours.bundle(tmp_path / "bundle") / name
    path.unlink()
    assert name in refusal(path.parent, verifier)
    os.mkfifo(path)
    assert name in refusal(path.parent, verifier)
    path.unlink()
    path.touch()
    os.truncate(path, 1 << 40)  # takes no room
    assert name in refusal(path.parent, verifier)


def test_an_unsigned_bundle_and_one_whose_signature_was_taken_away_are_refused(
    ours, verifier, tmp_path
):
    folder = ours.bundle(tmp_path / "bundle")
    (folder / "manifest.sig").unlink()
    assert "is not signed" in refusal(folder, verifier)
    (folder / "charter").unlink()
    assert "is not signed" in refusal(folder, verifier)


def test_a_file_that_changes_after_it_was_verified_is_not_used(ours, verifier, tmp_path):
    folder, other = ours.bundle(tmp_path / "bundle"), ours.bundle(tmp_path / "other", size=24)
    with verifier.admit(folder) as found:
        predictor = Predictor(found.bundle)
        for name in ("model.onnx", "golden.png"):
            shutil.copy(other / name, folder / name)
        with pytest.raises(bundle_format.BundleError, match=r"golden\.png"):
            predictor.self_test()
        with pytest.raises(bundle_format.BundleError, match=r"model\.onnx"):
            Predictor(found.bundle)


# ---------------------------------------------------------------- signed by somebody else, or for
# somebody else


OF_PLANT_B = (
    "says that this bundle is of plant-b in federation 'test', the trust file is for plant-a in "
    "federation 'test'"
)


def test_bundles_of_others_are_refused(ours, verifier, tmp_path):
    neighbour, theirs, stranger = ours.keys["plant-b"], FederationKeys(), SigningKey.generate()
    for number, (folder, reason) in enumerate(
        [
            (ours.bundle(tmp_path / "0", key=neighbour, node="plant-b"), OF_PLANT_B),
            (
                ours.bundle(tmp_path / "9", key=neighbour, federation="copper"),
                "is of plant-a in federation 'copper'",
            ),
            (ours.bundle(tmp_path / "1", key=neighbour), "not signed by plant-a"),
            (ours.bundle(tmp_path / "2", key=ours.keys["coordinator"]), "not signed by plant-a"),
            (ours.bundle(tmp_path / "3", key=stranger), "not signed by plant-a"),
            (ours.bundle(tmp_path / "4", node="plant-b"), "is of plant-b in federation 'test'"),
            (
                ours.bundle(tmp_path / "5", federation="copper"),
                "is of plant-a in federation 'copper'",
            ),
            (theirs.bundle(tmp_path / "6"), "charter cannot be relied on"),
            (theirs.bundle(tmp_path / "7", charter=ours.charter()), "not signed by plant-a"),
            (
                ours.bundle(tmp_path / "8", key=stranger, charter=theirs.charter()),
                "charter cannot be relied on",
            ),
        ]
    ):
        assert reason in refusal(folder, verifier), number


@pytest.mark.parametrize(
    "content",
    [
        b'{"node": "plant-\\u001b[2J", "federation": "test"}',
        b'{"node": "plant-b"}',
        b'{"node": "\xff", "federation": "test"}',
        b'{"x": ' + b"[" * 500_000,
        b"\xff",
    ],
)
def test_of_a_manifest_that_nobody_signed_no_more_than_two_plain_names_are_told(
    ours, verifier, tmp_path, content
):
    folder = ours.bundle(tmp_path / "bundle")
    (folder / "manifest.json").write_bytes(content)
    assert (
        refusal(folder, verifier)
        == f"{folder}/manifest.json is not signed by plant-a: manifest.sig does not fit"
    )


def test_a_file_that_is_not_of_the_bundle_is_told_and_not_used(ours, verifier, tmp_path, caplog):
    folder = ours.bundle(tmp_path / "bundle")
    served(folder, verifier)
    assert caplog.text == ""
    (folder / "extra\n.pkl").write_bytes(b"x")
    (folder / "more").mkdir()
    served(folder, verifier)
    assert r"holds more than the bundle ('extra\n.pkl', 2 in all)" in caplog.text


def test_a_charter_of_another_federation_under_the_same_authority_is_refused(
    ours, verifier, tmp_path
):
    copper = FederationKeys("copper")
    copper.authority, copper.keys = ours.authority, ours.keys
    assert "is of federation 'copper'" in refusal(
        ours.bundle(tmp_path / "b", charter=copper.charter()), verifier
    )


def test_a_bundle_must_come_from_the_coordinators_broadcast_of_its_run_and_round(
    ours, verifier, tmp_path
):
    forged, other = msgspec.structs.replace(ours.broadcast(), digest="e" * 64), FederationKeys()
    for number, (broadcast, reason) in enumerate(
        [
            (None, "its coordinator has signed none"),
            (ours.broadcast(run="cd" * 8), "that is of another run"),
            (ours.broadcast(federation="copper"), "that is of another run"),
            (ours.broadcast(round=29), "that is of round 29, the model of round 30"),
            (forged, "its signature does not fit"),
            (other.broadcast(), "its signature does not fit"),
            (msgspec.structs.replace(forged, signature=""), "its signature does not fit"),
        ]
    ):
        folder = ours.bundle(tmp_path / str(number), broadcast=broadcast)
        assert reason in refusal(folder, verifier)


def test_files_of_two_bundles_do_not_mix(ours, tmp_path):
    """Except for the charter, which is a statement of its own:
    the newest that is known counts anyway.
    """
    bundles = [
        ours.bundle(tmp_path / "one", charter=ours.charter(1), version=7),
        ours.bundle(tmp_path / "two", charter=ours.charter(2), version=8, size=24),
    ]
    mixed, accepted = tmp_path / "mixed", 0
    mixed.mkdir()
    for number, origins in enumerate(itertools.product((0, 1), repeat=len(FILES))):
        for name, origin in zip(FILES, origins, strict=True):
            shutil.copy(bundles[origin] / name, mixed / name)
        verifier = Verifier(ours.trust(), tmp_path / f"memory-{number}")
        if len(set(origins[1:])) == 1:
            assert served(mixed, verifier)
            accepted += 1
        else:
            assert refusal(mixed, verifier)
    assert accepted == 4


# ---------------------------------------------------------------- rollback, freeze, fast-forward


def test_an_older_bundle_is_refused_until_somebody_goes_back_on_purpose(ours, verifier, tmp_path):
    old, new = (
        ours.bundle(tmp_path / str(version), version=version) for version in (7, 1_795_302_993)
    )
    served(old, verifier)
    served(new, verifier)
    assert ("older (of 1970-01-01 00:00:07 UTC)") in refusal(old, verifier)
    served(old, verifier._replace(accept_older=True))
    served(old, verifier)
    served(new, verifier)
    assert "is older" in refusal(old, verifier)


def test_who_goes_back_to_one_bundle_lets_no_other_older_one_pass(ours, verifier, tmp_path):
    bundles = {
        version: ours.bundle(tmp_path / str(version), version=version) for version in range(3, 10)
    }
    twin = ours.bundle(tmp_path / "twin", version=5, size=24)
    on_purpose = verifier._replace(accept_older=True)
    served(bundles[8], verifier)
    served(bundles[5], on_purpose)
    for _ in range(2):
        for folder in (bundles[3], bundles[4], twin, bundles[6], bundles[7]):
            assert "than what this line has served (of 1970-01-01 00:00:08 UTC)" in refusal(
                folder, verifier
            )
        served(bundles[5], verifier)
    served(bundles[4], on_purpose)
    assert "is older" in refusal(bundles[5], verifier)
    served(bundles[4], verifier)
    served(bundles[9], verifier)
    for version in (4, 8):
        assert "is older" in refusal(bundles[version], verifier)


def test_a_version_beyond_all_dates_is_told_as_it_is(ours, verifier, tmp_path):
    served(ours.bundle(tmp_path / "far", version=2**60), verifier)
    assert f"(of version {2**60})" in refusal(ours.bundle(tmp_path / "old", version=7), verifier)


def test_of_one_version_there_is_one_bundle(ours, verifier, tmp_path):
    one, two = (ours.bundle(tmp_path / str(size), version=7, size=size) for size in (16, 24))
    served(one, verifier)
    for each in (verifier, verifier._replace(accept_older=True)):
        assert "of the same version, of 1970-01-01 00:00:07 UTC" in refusal(two, each)


def test_each_nodes_versions_count_by_themselves(ours, verifier, tmp_path):
    served(ours.bundle(tmp_path / "a", version=8), verifier)
    neighbour = ours.bundle(tmp_path / "b", version=7, key=ours.keys["plant-b"], node="plant-b")
    served(neighbour, verifier._replace(trust=ours.trust("plant-b")))
    assert "is older" in refusal(ours.bundle(tmp_path / "old", version=7), verifier)


def test_of_two_lines_that_start_at_once_the_one_with_the_older_bundle_sees_the_newer(
    ours, verifier, tmp_path, monkeypatch
):
    old, new = (ours.bundle(tmp_path / str(version), version=version) for version in (7, 8))
    asks, lock = threading.Event(), fcntl.flock
    with ThreadPoolExecutor(1) as other:
        with verifier.admit(new):
            monkeypatch.setattr(
                "edge.bundle.verification.fcntl.flock", lambda *given: asks.set() or lock(*given)
            )
            meanwhile = other.submit(served, old, verifier)
            assert asks.wait(PATIENCE)
            assert not meanwhile.done()
        assert isinstance(meanwhile.exception(60), bundle_format.BundleError)


def test_an_expired_bundle_is_refused(ours, verifier, tmp_path):
    for number, expires in enumerate((soon(-1), soon(-1e-6), None)):
        assert "has expired" in refusal(
            ours.bundle(tmp_path / str(number), expires=expires), verifier
        )


def test_a_bundle_without_a_charter_that_still_holds_is_refused(ours, verifier, tmp_path):
    expired = ours.charter(1, days=-0.1)
    folder = ours.bundle(tmp_path / "bundle", charter=expired)
    dated = verifier._replace(trust=ours.trust(charter=expired))
    assert "has expired" in refusal(folder, dated)
    # the trust file was renewed
    served(folder, verifier._replace(trust=ours.trust(charter=ours.charter(2))))
    served(folder, dated)  # which is remembered


def test_a_key_that_was_replaced_or_revoked_signs_no_more(verifier, tmp_path):
    ours = FederationKeys()
    trust_of_old = verifier._replace(trust=ours.trust())
    old_charter, thief = ours.charter(1), ours.keys["plant-a"]
    served(ours.bundle(tmp_path / "old", charter=old_charter, version=7), trust_of_old)
    # stolen; it signs a huge version
    served(ours.bundle(tmp_path / "far", key=thief, version=2**60), trust_of_old)

    ours.keys["plant-a"] = SigningKey.generate()
    # 8: counted anew
    served(ours.bundle(tmp_path / "new", charter=ours.charter(2), version=8), trust_of_old)

    for name, charter in (("old", old_charter), ("far", old_charter), ("far", ours.charter(2))):
        (tmp_path / name / "charter").write_bytes(charter)
        assert "not signed by plant-a" in refusal(tmp_path / name, trust_of_old)
        assert "not signed by plant-a" in refusal(
            tmp_path / name, trust_of_old._replace(accept_older=True)
        )

    out = verifier._replace(trust=ours.trust(charter=ours.charter(3, without="plant-a")))
    assert "plant-a is no member" in refusal(tmp_path / "new", out)


def test_a_line_that_is_given_a_new_authority_begins_anew(ours, verifier, tmp_path):
    served(ours.bundle(tmp_path / "old", version=8), verifier)
    again = FederationKeys()
    served(again.bundle(tmp_path / "new", version=7), verifier._replace(trust=again.trust()))


def test_what_is_remembered_must_be_whole(ours, verifier, tmp_path):
    served(folder := ours.bundle(tmp_path / "bundle"), verifier)
    [path] = verifier.memory.iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    assert str(path) in refusal(folder, verifier)


# ---------------------------------------------------------------- the daemon


@contextlib.contextmanager
def daemon(folder: Path, *options: object, before: str = "") -> Iterator[subprocess.Popen[str]]:
    """`edge-node serve` as a process; `before` runs first in it."""
    code = f"{before}\nfrom edge_node.cli.main import main\nmain()"
    command = [sys.executable, "-c", code, "serve", str(folder), "--port", "0", *map(str, options)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def ready(process: subprocess.Popen[str]) -> tuple[Daemon, list[str]]:
    """The daemon when it answers, and what it said before."""
    said = []
    assert process.stderr
    for line in process.stderr:
        if line.startswith("ready "):
            return Daemon(process, line.split()[1]), said
        said.append(line)
    raise AssertionError("".join(said))


def refused(folder: Path, *options: object, before: str = "") -> str:
    with daemon(folder, *options, before=before) as process:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 65, said
    assert "What to do:" in said
    assert "Traceback" not in said
    return said


@pytest.fixture
def options(ours, tmp_path) -> list[object]:
    """What plant-a's line is started with."""
    (tmp_path / "plant-a.trust").write_bytes(trust.encode(ours.trust()))
    return ["--trust", tmp_path / "plant-a.trust", "--state", tmp_path / "memory"]


BEFORE_PARSING = """
import sys, onnxruntime, PIL.Image
def parse(*_, **__):
    sys.exit("it is parsed")
onnxruntime.InferenceSession = PIL.Image.open = parse
"""


def test_the_daemon_parses_nothing_of_a_bundle_that_does_not_verify(ours, options, tmp_path):
    changed = ours.bundle(tmp_path / "changed")
    (changed / "golden.png").write_bytes(RED)
    unsigned = ours.bundle(tmp_path / "unsigned")
    (unsigned / "manifest.sig").unlink()
    stranger = ours.bundle(tmp_path / "stranger", key=SigningKey.generate())
    for folder, reason in (
        (changed, "golden.png"),
        (unsigned, "is not signed"),
        (stranger, "not signed by plant-a"),
    ):
        said = refused(folder, *options, before=BEFORE_PARSING)
        assert reason in said
        assert "it is parsed" not in said
    with daemon(ours.bundle(tmp_path / "good"), *options, before=BEFORE_PARSING) as process:
        assert "it is parsed" in process.communicate(timeout=60)[1]


@pytest.mark.slow
def test_the_daemon_remembers_what_it_has_served_even_if_it_is_killed_at_once(
    ours, options, tmp_path
):
    old, new = (ours.bundle(tmp_path / str(version), version=version) for version in (7, 8))
    with daemon(new, *options) as process:
        line, said = ready(process)
        process.send_signal(signal.SIGKILL)
        assert not any("warning" in text for text in said)
    assert "is older" in refused(old, *options)
    for back in (["--accept-older"], []):  # the next start of the service is without it
        with daemon(old, *options, *back) as process:
            line, _ = ready(process)
            with line.client:
                about = line.client.get("/").json()
                assert (about["verified"], about["warnings"]) == (True, [])
                assert about["expires"].keys() == {"bundle", "charter"}


@pytest.mark.slow
def test_a_running_line_outlives_its_bundle_and_says_so_every_day(ours, options, tmp_path):
    folder = ours.bundle(
        tmp_path / "bundle", expires=soon(10 / 86400)
    )  # seconds: more than a busy machine takes to start
    with daemon(
        folder, *options, before="import edge.bundle.expiry\nedge.bundle.expiry._DAY = 1"
    ) as process:
        line, _ = ready(process)
        assert process.stderr
        heard = [
            next(text for text in process.stderr if word in text)
            for word in ("expires on", "has expired on")
        ]
        assert all("warning: the bundle" in text for text in heard)
        with line.client:
            assert line.classify(RED).json()["label"] == "red"
            [warning] = line.client.get("/").json()["warnings"]
            assert warning["id"] == "bundle_expiry"
            assert "has expired on" in warning["text"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    assert "has expired" in refused(folder, *options)


@pytest.mark.slow
def test_a_memory_that_cannot_be_written_is_said_clearly(ours, options, tmp_path):
    folder = ours.bundle(tmp_path / "bundle")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "plant-a@test.json.tmp").mkdir()  # a scratch file cannot be made
    for memory in (Path("/sys/kernel/edge-node"), folder / "model.onnx", tmp_path / "memory"):
        with daemon(folder, *options[:2], "--state", memory) as process:
            _, said = process.communicate(timeout=60)
        assert process.returncode in (66, 74, 75, 77)  # of a disk, not of a bundle
        assert f"cannot write to {memory}" in said or f"{memory} cannot be a folder" in said


def infer(folder: Path, *options: object) -> subprocess.CompletedProcess[str]:
    """Judge a red image as a process."""
    image = folder.parent / "red.png"
    image.write_bytes(RED)
    command = [sys.executable, "-m", "edge_node", "infer", folder, image, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_infer_verifies_as_the_daemon_does(ours, verifier, options, tmp_path):
    served(ours.bundle(tmp_path / "new", expires=soon(29.9)), verifier)
    newest = infer(tmp_path / "new", *options)
    assert (newest.returncode, "red" in newest.stdout) == (0, True)
    assert "the bundle expires on" in newest.stderr
    older = infer(ours.bundle(tmp_path / "old", version=1), *options)
    assert (older.returncode, older.stdout) == (2, "")
    assert "is older" in older.stderr


@pytest.mark.slow
def test_infer_changes_nothing_of_what_the_line_remembers(ours, verifier, options, tmp_path):
    old, new, newest = (
        ours.bundle(tmp_path / str(version), version=version) for version in (7, 8, 9)
    )
    assert infer(newest, *options).returncode == 0
    assert not verifier.memory.exists()
    served(new, verifier)
    [path] = verifier.memory.iterdir()
    before = path.read_bytes()
    assert [infer(old, *options, *back).returncode for back in (["--accept-older"], [])] == [0, 2]
    assert infer(newest, *options).returncode == 0
    assert path.read_bytes() == before


def test_the_memory_is_where_systemd_says_or_in_the_users_home(
    ours, options, tmp_path, monkeypatch
):
    folder = ours.bundle(tmp_path / "bundle")
    for name in ("STATE_DIRECTORY", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, told, memory in (
        ("HOME", str(tmp_path / "home"), "home/.local/state/edge-node"),
        ("STATE_DIRECTORY", f"{tmp_path}/state:/other", "state"),
    ):
        monkeypatch.setenv(name, told)
        with daemon(folder, *options[:2]) as process:
            ready(process)
        assert (tmp_path / memory / "plant-a@test.json").exists()
