"""A grid on a Ray cluster: a real one, on this machine,
in processes that know nothing of the images' folder.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from broker_config.protocol.errors import UsageError
from research.afedcl.cell import Finished
from research.afedcl.experiment import AFEDCL, AFedCLOrder
from research.runner.experiment import Experiment
from research.runner.store import Records
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
    # pytest's own is too long for the names of sockets
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    start = [
        "start",
        "--head",
        "--port",
        str(port),
        "--node-ip-address",
        "127.0.0.1",
        "--num-cpus",
        "2",
    ]
    more = [
        "--include-dashboard",
        "false",
        "--disable-usage-stats",
        "--object-store-memory",
        "100000000",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_TMPDIR": str(folder)}
    subprocess.run(
        [RAY, *start, *more],
        check=True,
        capture_output=True,
        cwd=folder,
        env=environment,
        timeout=100,
    )
    yield f"127.0.0.1:{port}"
    subprocess.run([RAY, "stop", "--force"], check=False, capture_output=True, timeout=60)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def order(tmp_path: Path) -> AFedCLOrder:
    images = draw(tmp_path / "images", 60, 0, (*CLASSES, "crazing"))
    return AFedCLOrder(
        name="fig5",
        preset="quick",
        data={"neu": images},
        model="small",
        weights=["none"],
        size=32,
        rounds=1,
        seeds=1,
        store=tmp_path / "here",
        workers=1,
    )


def test_a_cluster_reaches_what_this_machine_does(
    order: AFedCLOrder, tmp_path: Path, cluster: str
) -> None:
    assert Experiment(AFEDCL, order, progress.ignore).run(progress.ignore) == []
    there = Experiment(
        AFEDCL, replace(order, store=tmp_path / "there", ray=cluster), progress.ignore
    )
    inputs = there.inputs(there.missing())
    shutil.rmtree(order.data["neu"])
    # Decoded while the folder was there
    there.inputs = lambda cells: inputs  # type: ignore[method-assign]
    assert there.run(progress.ignore) == []
    here, found = (
        {each.key: each for each in Records(tmp_path / name / "cells.jsonl", Finished)}
        for name in ("here", "there")
    )
    assert len(here) == 2
    assert {key: each.nodes for key, each in here.items()} == {
        key: each.nodes for key, each in found.items()
    }


def test_a_cell_that_fails_there_is_named_and_not_stored(
    order: AFedCLOrder, tmp_path: Path, cluster: str
) -> None:
    grid = Experiment(AFEDCL, replace(order, ray=cluster), progress.ignore)
    grid.cells = [msgspec.structs.replace(cell, torch="0.1") for cell in grid.cells]
    failed = grid.run(progress.ignore)
    assert [each.error.split(",")[0] for each in failed] == ["the cell asks for torch 0.1"] * 2
    assert grid.finished() == {}


def test_an_address_without_a_cluster_is_an_error_that_says_how_to_start_one(
    order: AFedCLOrder,
) -> None:
    pytest.importorskip("ray")
    with pytest.raises(UsageError, match="ray start --head"):
        Experiment(AFEDCL, replace(order, ray="127.0.0.1:1"), progress.ignore).run(progress.ignore)
