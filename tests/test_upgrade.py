"""What version 0.1 has left on disk is opened, resumed, exported,
served and delivered by this one.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from broker_config.broker.embedded import EmbeddedBroker
from broker_config.mqtt.endpoint import Endpoint
from edge.bundle.bundle_format import read_bundle
from edge.inference.outcomes import Outcome
from edge.inference.predictor import Predictor
from edge.outbox.limits import Limits
from edge.outbox.outbox import open_outbox
from tests.support.checked_in_state import ROUNDS, SINK, begin, federation
from tests.support.outcomes_at_noon import verdict
from tests.support.paths import REPOSITORY
from tests.support.plants import CLASSES, here
from tests.support.threaded_federation import PLANTS, end_all
from tests.support.tiny_encoder import register_tiny_encoder
from trainer.federation.server.journal import newest_run
from trainer.training.personal_model import load_metadata


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("version_0_1")
    shutil.unpack_archive(REPOSITORY / "tests" / "data" / "version_0_1.tar.xz", folder)
    return folder


@pytest.fixture
def left(untouched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All of it, to be written to."""
    register_tiny_encoder(monkeypatch.setitem)
    return shutil.copytree(untouched, tmp_path / "left")


def succeed(words: Sequence[object]) -> str:
    done = here(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_state_was_written_by_version_0_1(untouched: Path) -> None:
    assert (
        load_metadata(untouched / "finished" / "plant-a" / "model").software["edge-node"] == "0.1.0"
    )
    assert read_bundle(untouched / "bundle").manifest.software == "0.1.0"


def test_the_coordinators_rounds_are_listed(left: Path) -> None:
    told = succeed(["rounds", left / "finished" / "coordinator"])
    assert all(name in told for name in PLANTS)
    assert (
        len(succeed(["rounds", left / "finished" / "coordinator", "--json"]).splitlines()) == ROUNDS
    )


def test_what_it_recorded_is_verified(untouched: Path) -> None:
    finished = untouched / "finished"
    told = succeed(["verify", finished / "coordinator", finished / "plant-a", untouched / "bundle"])
    assert f"{ROUNDS} of {ROUNDS} rounds closed" in told
    assert f"plant-a contributed to rounds 1-{ROUNDS} there" in told
    succeed(["verify", untouched / "suspended" / "coordinator"])


def test_a_suspended_federation_goes_on_and_ends_as_it_did_then(
    mosquitto: EmbeddedBroker, left: Path
) -> None:
    resumed = federation(Endpoint.parse(mosquitto.url), left / "suspended", left / "images")
    # with which nodes discover it
    resumed.spec = newest_run(left / "suspended" / "coordinator").spec
    end_all(begin(resumed))
    # What is deployed of them, this version judges in its own way.
    for trained in ("state-3-2", "alone-3"):
        check_same(*(left / run / "plant-a" / trained for run in ("finished", "suspended")))
    assert load_metadata(left / "suspended" / "plant-a" / "model").metrics


def check_same(*paths: Path) -> None:
    then, now = (load_file(path.with_suffix(".safetensors")) for path in paths)
    assert then.keys() == now.keys()
    for name, value in then.items():
        # of another machine
        np.testing.assert_allclose(now[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_a_nodes_model_is_reported_and_exported(left: Path) -> None:
    succeed(["report", left / "finished" / "plant-a", "--out", left / "report.html"])
    assert "plant-a" in (left / "report.html").read_text()
    succeed(
        ["export", left / "finished" / "plant-a" / "model", "--out", left / "bundles", "--quiet"]
    )
    Predictor(read_bundle(left / "bundles" / "plant-a")).self_test()


def test_the_bundle_gives_the_verdict_that_it_gave_then(left: Path) -> None:
    bundle = read_bundle(left / "bundle")
    Predictor(bundle).self_test()  # its golden image's probabilities stand in it
    assert tuple(bundle.manifest.classes) == CLASSES
    told = succeed(["infer", left / "bundle", left / "bundle" / "golden.png", "--json"])
    assert msgspec.json.decode(told)["label"] in CLASSES


def test_what_was_not_delivered_still_waits_for_its_sink(left: Path) -> None:
    with open_outbox(left / "outbox", Limits()) as outbox:
        outbox.set_sinks([SINK])
        waiting = [msgspec.json.decode(data, type=Outcome) for _, data in outbox.read(SINK, 10)]
    assert waiting == [verdict(number) for number in range(3)]


def test_a_systemd_unit_of_version_0_1_finds_the_command_line_under_its_old_name() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "edge.cli.main", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == version("edge-node")
