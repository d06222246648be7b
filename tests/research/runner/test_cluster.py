"""A grid on a Ray cluster: a real one, on this machine, in processes that know nothing of the images' folder."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from broker_config.protocol.errors import UsageError
from research.afedcl.experiment import Experiment, Order
from research.runner.store import Store
from tests.support.plants import CLASSES, draw
from tests.support.ports import free_port
from trainer import progress

pytestmark = pytest.mark.slow

RAY = Path(sys.executable).with_name("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Its address."""
    pytest.importorskip("ray")
    port = free_port()
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # pytest's own is too long for the names of sockets
    start = ["start", "--head", "--port", str(port), "--node-ip-address", "127.0.0.1", "--num-cpus", "2"]
    more = ["--include-dashboard", "false", "--disable-usage-stats", "--object-store-memory", "100000000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_TMPDIR": str(folder)}
    subprocess.run([RAY, *start, *more], check=True, capture_output=True, cwd=folder, env=environment, timeout=100)
    yield f"127.0.0.1:{port}"
    subprocess.run([RAY, "stop", "--force"], check=False, capture_output=True, timeout=60)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def order(tmp_path: Path) -> Order:
    images = draw(tmp_path / "images", 60, 0, (*CLASSES, "crazing"))
    return Order("fig4", "quick", {"neu": images}, "small", ["none"], 32, 1, 1, tmp_path / "here", 1)


def test_a_cluster_reaches_what_this_machine_does(order: Order, tmp_path: Path, cluster: str) -> None:
    assert Experiment(order, progress.ignore).run(progress.ignore) == []
    there = Experiment(order._replace(store=tmp_path / "there", ray=cluster), progress.ignore)
    material = there.material(there.missing())
    shutil.rmtree(order.data["neu"])
    there.material = lambda cells: material  # type: ignore[method-assign]  (decoded while the folder was there)
    assert there.run(progress.ignore) == []
    here, found = (Store(tmp_path / name).finished() for name in ("here", "there"))
    assert len(here) == 2
    assert {key: each.nodes for key, each in here.items()} == {key: each.nodes for key, each in found.items()}


def test_a_cell_that_fails_there_is_named_and_not_stored(order: Order, tmp_path: Path, cluster: str) -> None:
    grid = Experiment(order._replace(ray=cluster), progress.ignore)
    grid.cells = [msgspec.structs.replace(cell, torch="0.1") for cell in grid.cells]
    failed = grid.run(progress.ignore)
    assert [each.error.split(",")[0] for each in failed] == ["the cell asks for torch 0.1"] * 2
    assert Store(order.store).finished() == {}


def test_an_address_without_a_cluster_is_an_error_that_says_how_to_start_one(order: Order) -> None:
    pytest.importorskip("ray")
    with pytest.raises(UsageError, match="ray start --head"):
        Experiment(order._replace(ray="127.0.0.1:1"), progress.ignore).run(progress.ignore)
