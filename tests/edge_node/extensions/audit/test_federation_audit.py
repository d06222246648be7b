"""A plant's audit of a federation on a real broker: before it joins, as a condition,
and of what it has sent.
"""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_config.broker.embedded import start_broker
from tests.support.plants import CLASSES, draw, drawn_weights, here, start, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("images") / "plant-a", 12, 0)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A broker with a federation that waits for a second node."""
    with start_broker(tmp_path / "broker", kind="mosquitto") as broker:
        coordinator = start(
            "coordinate",
            broker.url,
            "--classes",
            ",".join(CLASSES),
            "--nodes",
            2,
            "--state",
            tmp_path / "coordinator",
            "--method",
            "gaussian",
            "--model",
            "small",
            "--size",
            32,
            "--weights",
            drawn_weights(),
            "--seed",
            7,
            log=tmp_path / "coordinator.log",
        )
        other = start(
            "join",
            broker.url,
            "--name",
            "b",
            "--data",
            draw(tmp_path / "b-images", 6, 2),
            "--state",
            tmp_path / "b",
            log=tmp_path / "b.log",
        )
        try:
            wait_for(tmp_path / "coordinator.log", "waiting")
            yield broker.url
        finally:
            for process in (coordinator, other):
                process.kill()
                process.wait(60)


def test_before_and_after_joining_a_plant_sees_what_its_images_tell(
    url: str, images: Path, tmp_path: Path
) -> None:
    before = here(
        "audit", url, "--data", images, "--out", tmp_path / "before.html", "--json", "--quiet"
    )
    assert before.returncode == 0, before.stderr
    result = json.loads(before.stdout)["result"]
    assert result["told"]["open"]["counts"] == 1
    assert {mode["mode"] for mode in result["audit"]["modes"]} == {"open", "masked", "private"}
    assert "would show" in (tmp_path / "before.html").read_text()
    assert not list(images.glob(".edge-node*")), "an audit leaves nothing beside the images"

    refused = here(
        "join",
        url,
        "--name",
        "a",
        "--data",
        images,
        "--state",
        tmp_path / "a",
        "--demand",
        "counts=0.5",
    )
    assert refused.returncode == 2
    assert "counts 100%" in refused.stderr
    assert "joining federation" not in refused.stderr
    assert not (tmp_path / "a" / "progress.json").exists(), "nothing has been sent"

    joined = here(
        "join",
        url,
        "--name",
        "a",
        "--data",
        images,
        "--state",
        tmp_path / "a",
        "--demand",
        "pictures=0.99",
        "--demand",
        "counts=1",
    )
    assert joined.returncode == 0, joined.stderr
    assert joined.stderr.index("auditing the federation") < joined.stderr.index(
        "joining federation"
    )
    assert (tmp_path / "a" / "audited.json").exists(), (
        "a restarted node need not wait for the same again"
    )
    after = here(
        "audit", "--state", tmp_path / "a", "--data", images, "--out", tmp_path / "after.html"
    )
    assert after.returncode == 0, after.stderr
    assert "has shown of" in after.stdout
    assert "has shown" in (tmp_path / "after.html").read_text()

    other = draw(tmp_path / "other", 12, 1)
    wrong = here(
        "audit", "--state", tmp_path / "a", "--data", other, "--out", tmp_path / "wrong.html"
    )
    assert wrong.returncode == 2
    assert "other images" in wrong.stderr


def test_a_state_folder_without_anything_sent_is_named(images: Path, tmp_path: Path) -> None:
    empty = here("audit", "--state", tmp_path / "none", "--data", images)
    assert empty.returncode == 2
    assert "nothing that a node has sent" in empty.stderr
    both = here("audit", "mqtt://localhost", "--state", tmp_path / "none", "--data", images)
    assert both.returncode == 2
    assert "needs no broker" in both.stderr
    neither = here("audit", "--data", images)
    assert neither.returncode == 2
    assert "nothing to audit" in neither.stderr
    folder = here("audit", "mqtt://localhost", "--data", images, "--out", tmp_path)
    assert folder.returncode == 2
    assert f"{tmp_path} is a folder" in folder.stderr


def test_what_is_no_share_is_refused_before_anybody_is_asked(images: Path, tmp_path: Path) -> None:
    for wrong in ("2", "abc", "-1"):
        told = here(
            "join",
            "mqtt://localhost:1",
            "--name",
            "a",
            "--data",
            images,
            "--state",
            tmp_path / "a",
            "--demand",
            f"pictures={wrong}",
        )
        assert told.returncode == 2
        assert "pictures" in told.stderr


def test_who_has_joined_without_a_demand_is_audited_when_it_comes_back_with_one(
    url: str, images: Path, tmp_path: Path
) -> None:
    """Not only a new state folder is: later rounds would tell as much."""
    lone = start(
        "join",
        url,
        "--name",
        "a",
        "--data",
        images,
        "--state",
        tmp_path / "a",
        "--federation",
        "default",
        log=tmp_path / "a.log",
    )
    wait_for(tmp_path / "a.log", "joining federation")
    lone.kill()
    lone.wait(60)
    again = here(
        "join",
        url,
        "--name",
        "a",
        "--data",
        images,
        "--state",
        tmp_path / "a",
        "--demand",
        "counts=0",
    )
    assert again.returncode == 2, again.stderr
    assert "counts 100%" in again.stderr


def test_ctrl_c_ends_an_audit_soon(url: str, images: Path, tmp_path: Path) -> None:
    process = start(
        "audit", url, "--data", images, "--out", tmp_path / "a.html", log=tmp_path / "audit.log"
    )
    wait_for(tmp_path / "audit.log", "audit, open")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert not (tmp_path / "a.html").exists()
