"""A plant's audit of a federation on a real broker: before it joins, as a condition, and of what it has sent."""

import json
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
            "coordinate", broker.url, "--classes", ",".join(CLASSES), "--nodes", 2, "--state", tmp_path / "coordinator",
            "--method", "gaussian", "--model", "small", "--size", 32, "--weights", drawn_weights(), "--seed", 7,
            log=tmp_path / "coordinator.log",
        )  # fmt: skip
        other = start(
            "join", broker.url, "--name", "b", "--data", draw(tmp_path / "b-images", 6, 2), "--state", tmp_path / "b",
            log=tmp_path / "b.log",
        )  # fmt: skip
        try:
            wait_for(tmp_path / "coordinator.log", "waiting")
            yield broker.url
        finally:
            for process in (coordinator, other):
                process.kill()
                process.wait(30)


def test_before_and_after_joining_a_plant_sees_what_its_images_tell(url: str, images: Path, tmp_path: Path) -> None:
    before = here("audit", url, "--data", images, "--out", tmp_path / "before.html", "--json", "--quiet")
    assert before.returncode == 0, before.stderr
    result = json.loads(before.stdout)["result"]
    assert result["told"]["counts"] == 1
    assert {mode["mode"] for mode in result["audit"]["modes"]} == {"open", "masked", "private"}
    assert "would show" in (tmp_path / "before.html").read_text()
    assert not list(images.glob(".edge-node*")), "an audit leaves nothing beside the images"

    refused = here("join", url, "--name", "a", "--data", images, "--state", tmp_path / "a", "--demand", "counts=0.5")
    assert refused.returncode == 2
    assert "would tell 100% of how many images there are of each class" in refused.stderr
    assert not (tmp_path / "a" / "progress.json").exists(), "nothing has been sent"

    joined = here(
        "join", url, "--name", "a", "--data", images, "--state", tmp_path / "a", "--demand", "pictures=1",
        "--demand", "membership=1",
    )  # fmt: skip
    assert joined.returncode == 0, joined.stderr
    after = here("audit", "--state", tmp_path / "a", "--data", images, "--out", tmp_path / "after.html")
    assert after.returncode == 0, after.stderr
    assert "has shown of" in after.stdout
    assert "has shown" in (tmp_path / "after.html").read_text()

    other = draw(tmp_path / "other", 12, 1)
    wrong = here("audit", "--state", tmp_path / "a", "--data", other, "--out", tmp_path / "wrong.html")
    assert wrong.returncode == 2
    assert "has trained on other images" in wrong.stderr


def test_a_state_folder_without_anything_sent_is_named(images: Path, tmp_path: Path) -> None:
    empty = here("audit", "--state", tmp_path / "none", "--data", images)
    assert empty.returncode == 2
    assert "does not hold anything that a node has sent" in empty.stderr
    both = here("audit", "mqtt://localhost", "--state", tmp_path / "none", "--data", images)
    assert both.returncode == 2
    assert "needs no broker" in both.stderr
