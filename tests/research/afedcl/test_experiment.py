"""`python -m research afedcl`: runs of what is missing, kills and interrupts,
failed cells, refused orders.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path

import msgspec
import psutil
import pytest
from rich.console import Console

from broker_config.protocol.errors import EdgeNodeError, UsageError
from research.__main__ import app
from research.afedcl.cell import Finished
from research.afedcl.experiment import AFEDCL, AFedCLOrder
from research.afedcl.run import run_cell
from research.runner.experiment import Experiment
from research.runner.processes import over_processes
from research.runner.store import Records
from tests.support.finished_cells import finished
from tests.support.plants import CLASSES, draw, here
from tests.support.research_command import research
from tests.support.waiting import wait_until
from trainer import progress
from trainer.data.partition import Scheme
from trainer.federation.server.spec import Request
from trainer.federation.simulation import simulate_folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("data") / "images", 60, 0, (*CLASSES, "crazing"))


@pytest.fixture
def order(images: Path, tmp_path: Path) -> AFedCLOrder:
    return AFedCLOrder(
        name="fig5",
        preset="quick",
        data={"neu": images},
        model="small",
        weights=["none"],
        size=32,
        rounds=2,
        seeds=1,
        store=tmp_path / "store",
        workers=1,
    )


def everything(store: Path) -> dict[str, object]:
    """What a store holds, but how long it took."""
    return {found.key: found.nodes for found in Records(store / "cells.jsonl", Finished)}


@pytest.mark.slow
def test_a_cell_reaches_what_simulate_does(
    order: AFedCLOrder, images: Path, tmp_path: Path
) -> None:
    grid = Experiment(AFEDCL, order, progress.ignore)
    cell = grid.cells[0]
    result = run_cell(cell, grid.inputs([cell]))
    request = Request(cell.method, cell.options, "small", "none", 32, rounds=2, seed=cell.seed)
    # as in the papers, whatever a federation takes by default
    request = request._replace(aggregate="mean")
    scheme = Scheme("disjoint", 5, 10, cell.seed)
    report = simulate_folder(request, [images], {}, scheme, None, progress.ignore)
    assert [node.accuracy for node in result.nodes] == [
        round(node.accuracy, 4) for node in report.nodes
    ]
    assert [node.history["L_D"][1] for node in result.nodes] == [
        round(node.history[1]["L_D"], 4) for node in report.nodes
    ]


def test_a_finished_cell_is_run_again_by_its_key_and_compared(
    order: AFedCLOrder, images: Path
) -> None:
    grid = Experiment(AFEDCL, order, progress.ignore)
    cell = grid.cells[0]
    result = run_cell(cell, grid.inputs([cell]))
    store = Records(order.store / "cells.jsonl", Finished)
    store.add(result)
    words = (
        "afedcl",
        "fig5",
        "--data",
        f"neu={images}",
        "--model",
        "small",
        "--weights",
        "none",
        "--size",
        32,
    )
    words += ("--rounds", 2, "--seeds", 1, "--store", order.store, "--again")
    same = here(*words, cell.key[:8], app=app)
    assert same.returncode == 0, same.stderr
    assert "same as stored" in same.stdout
    assert len(list(store)) == 1
    nobody = here(*words, "0000", app=app)
    assert nobody.returncode == 2
    assert "'0000'" in nobody.stderr
    other = msgspec.structs.replace(result.nodes[0], accuracy=0.0)
    (order.store / "cells.jsonl").unlink()
    store.add(msgspec.structs.replace(result, nodes=[other, *result.nodes[1:]]))
    differs = here(*words, cell.key, app=app)
    assert differs.returncode == 1
    assert "is stored, by" in differs.stdout


@pytest.mark.slow
def test_images_in_one_place_train_one_model_which_every_node_is_judged_by(
    order: AFedCLOrder,
) -> None:
    """Each node's own classes are its candidates all the same."""
    grid = Experiment(AFEDCL, order, progress.ignore)
    cell = msgspec.structs.replace(
        grid.cells[0], method="local", options={"epochs": 1}, pooled=True
    )
    apart = run_cell(msgspec.structs.replace(cell, pooled=msgspec.UNSET), grid.inputs([cell]))
    pooled = run_cell(cell, grid.inputs([cell]))
    assert [(node.name, node.trained, node.tested) for node in pooled.nodes] == [
        (node.name, node.trained, node.tested) for node in apart.nodes
    ]
    assert (
        len({node.everyone for node in pooled.nodes})
        == 1
        < len({node.everyone for node in apart.nodes})
    )
    assert all(node.own >= node.accuracy for node in pooled.nodes)


def test_the_papers_protocol_draws_classes_and_has_one_learning_rate_and_a_table_of_its_own(
    order: AFedCLOrder,
) -> None:
    order = replace(order, name="fig4")
    quick, paper = (
        Experiment(AFEDCL, replace(order, preset=preset), progress.ignore)
        for preset in ("quick", "paper")
    )
    assert {cell.setting.partition for cell in quick.cells} == {"disjoint"}
    assert {cell.setting.partition for cell in paper.cells} == {"disjoint,deal=random"}
    assert {cell.training.learning_rate for cell in paper.cells} == {1e-3}
    cell = paper.cells[0]
    result = run_cell(cell, paper.inputs([cell]))
    Records(order.store / "cells.jsonl", Finished).add(result)
    assert all(len(node.trained) == 2 for node in result.nodes)
    table, _ = paper.report(Console(quiet=True))
    assert table.name == "fig4_paper.md"
    assert table.read_text().splitlines()[0].endswith("(preset paper)")


class Running:
    """An experiment in a process of its own, which leads a process group."""

    def __init__(self, order: AFedCLOrder, log: Path):
        self.log = log
        arguments = (
            "afedcl",
            order.name,
            "--data",
            f"neu={order.data['neu']}",
            "--model",
            "small",
            "--weights",
            "none",
            "--size",
            order.size,
            "--rounds",
            order.rounds,
            "--seeds",
            order.seeds,
            "--store",
            order.store,
            "--workers",
            order.workers,
            "--json",
        )
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "research", *map(str, arguments)],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, event: str) -> None:
        wait_until(
            lambda: f'"event":"{event}"' in self.log.read_text(),
            meanwhile=lambda: self.process.poll() is None,
            said=self.log.read_text,
        )

    def others(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[AFedCLOrder], Running]]:
    running: list[Running] = []

    def begin(order: AFedCLOrder) -> Running:
        running.append(Running(order, tmp_path / f"log-{len(running)}"))
        return running[-1]

    yield begin
    for each in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each.process.pid, signal.SIGKILL)
        each.process.wait(60)


@pytest.mark.slow
def test_a_grid_that_was_killed_goes_on_and_ends_as_if_nothing_had_happened(
    order: AFedCLOrder, start: Callable[[AFedCLOrder], Running]
) -> None:
    order = replace(order, rounds=3)
    running = start(order)
    running.wait_for("CellFinished")
    workers = running.others()
    running.process.kill()
    running.process.wait(60)
    psutil.wait_procs(workers, 10)
    assert [each for each in workers if each.is_running()] == []
    before = everything(order.store)
    grid = Experiment(AFEDCL, order, progress.ignore)
    assert 0 < len(before) < len(grid.cells)

    again = start(order)
    assert again.process.wait(120) == 0, again.log.read_text()
    assert (
        f"{len(grid.cells) - len(before)} of {len(grid.cells)} cells to run"
        in again.log.read_text()
    )
    assert json.loads(again.log.read_text().splitlines()[-1])["result"]["missing"] == 0

    whole = replace(order, store=order.store.parent / "whole", workers=2)
    assert Experiment(AFEDCL, whole, progress.ignore).run(progress.ignore) == []
    assert everything(order.store) == everything(whole.store)


@pytest.mark.slow
@pytest.mark.parametrize("to_all", [True, False], ids=["as Ctrl-C does", "to the command alone"])
def test_an_interrupt_leaves_what_is_finished_and_no_process(
    to_all: bool, order: AFedCLOrder, start: Callable[[AFedCLOrder], Running]
) -> None:
    order = replace(order, name="fig8", rounds=1000)
    running = start(order)
    while not [each for each in running.others() if "spawn_main" in " ".join(each.cmdline())]:
        assert running.process.poll() is None, running.log.read_text()
    workers = running.others()
    if to_all:
        os.killpg(running.process.pid, signal.SIGINT)
    else:
        running.process.terminate()
    assert running.process.wait(60) == 130, running.log.read_text()
    psutil.wait_procs(workers, 10)
    assert [each for each in workers if each.is_running()] == []
    assert "Traceback" not in running.log.read_text()


@pytest.mark.slow
def test_a_cell_that_fails_stops_no_other_and_is_tried_again(
    order: AFedCLOrder, images: Path, tmp_path: Path
) -> None:
    few = tmp_path / "few"
    shutil.copytree(images, few)
    for path in sorted((few / "patches").iterdir())[2:]:
        path.unlink()
    order = replace(order, data={"neu": few, "xsdd": images})
    grid = Experiment(AFEDCL, order, progress.ignore)
    events: list[progress.AnyEvent] = []
    failed = grid.run(events.append)
    assert {each.cell.setting.dataset for each in failed} == {"NEU-CLS"}
    assert all("class patches lacks" in each.error for each in failed)
    assert {each.cell.setting.dataset for each in grid.finished().values()} == {"X-SDD"}
    assert [each for each in events if isinstance(each, progress.CellFinished)][-1].done == len(
        grid.cells
    )
    assert grid.state().missing == len(failed)


def command_of(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):  # a zombie, too: another test's that nobody has asked for
        return " ".join(process.cmdline())
    return ""


def test_a_worker_that_is_killed_is_told_of(order: AFedCLOrder) -> None:
    grid = Experiment(AFEDCL, replace(order, rounds=1000), progress.ignore)
    outcomes = over_processes(1, run_cell, grid.missing(), grid.inputs(grid.cells))
    this = psutil.Process()

    def kill_soon() -> None:
        workers = wait_until(
            lambda: [each for each in this.children() if "spawn_main" in command_of(each)]
        )
        workers[0].kill()

    threading.Thread(target=kill_soon).start()
    with pytest.raises(EdgeNodeError, match="killed"):
        next(outcomes)


@pytest.mark.slow
def test_the_events_count_and_estimate(order: AFedCLOrder) -> None:
    grid = Experiment(AFEDCL, order, progress.ignore)
    events: list[progress.AnyEvent] = []
    grid.run(events.append)
    cells = [event for event in events if isinstance(event, progress.CellFinished)]
    assert [(event.done, event.total) for event in cells] == [(1, 2), (2, 2)]
    assert [event.left for event in cells] == [pytest.approx(cells[0].seconds), 0.0]
    assert grid.run(events.append) == []
    assert len([event for event in events if isinstance(event, progress.CellFinished)]) == 2


def test_of_results_with_one_key_the_first_counts(order: AFedCLOrder) -> None:
    for seconds in (1.0, 2.0):
        result = msgspec.structs.replace(finished("local", 0.5), seconds=seconds)
        Records(order.store / "cells.jsonl", Finished).add(result)
    (only,) = Experiment(AFEDCL, order, progress.ignore).finished().values()
    assert only.seconds == 1.0


def test_of_what_is_not_finished_there_is_no_report(order: AFedCLOrder) -> None:
    assert Experiment(AFEDCL, order, progress.ignore).report(Console(quiet=True)) == []
    assert not order.store.exists()


def test_a_dry_run_says_what_is_left_and_runs_nothing(order: AFedCLOrder, images: Path) -> None:
    result = research(
        "afedcl",
        "table2",
        "--data",
        f"neu={images}",
        "--model",
        "small",
        "--store",
        order.store,
        "--dry-run",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("0 of 16 cells finished in ")
    assert not order.store.exists()


@pytest.mark.slow
def test_a_grid_of_which_nothing_is_stored_sends_to_the_cause_and_not_to_the_others(
    order: AFedCLOrder, images: Path, tmp_path: Path
) -> None:
    few = shutil.copytree(images, tmp_path / "few")
    for path in sorted((few / "patches").iterdir())[2:]:
        path.unlink()
    words = (
        "afedcl",
        "fig5",
        "--model",
        "small",
        "--weights",
        "none",
        "--size",
        32,
        "--rounds",
        1,
        "--seeds",
        1,
    )
    words = (*words, "--store", order.store, "--workers", 1, "--data")
    result = research(*words, f"neu={few}")
    assert result.returncode == 1
    assert "2 of 2 cells failed" in result.stderr
    assert "mend that first" in result.stderr
    result = research(*words, f"neu={few}", "--data", f"xsdd={images}")
    assert "2 of 4 cells failed" in result.stderr
    assert "What to do: the others are stored" in result.stderr


@pytest.mark.parametrize(
    ("paper", "flag"),
    [*product(["afedcl", "fedtfi", "dao-vfl"], ["--rounds", "--seeds"]), ("afedcl", "--size")],
)
def test_less_than_none_is_refused_before_a_dry_run_reckons_with_it(
    paper: str, flag: str, images: Path
) -> None:
    result = research(paper, "table2", "--data", f"neu={images}", flag, "-3", "--dry-run")
    assert result.returncode == 2
    assert flag in result.stderr


@pytest.mark.slow
def test_features_of_held_out_images_are_kept_in_two_dimensions(order: AFedCLOrder) -> None:
    order = replace(order, name="fig7")
    grid = Experiment(AFEDCL, order, progress.ignore)
    grid.run(progress.ignore)
    assert grid.finished().keys() == {cell.key for cell in grid.cells}
    for result in grid.finished().values():
        for node, each in zip(result.nodes, result.embeddings, strict=True):
            assert each.node == node.name
            assert len(each.points) == len(each.labels) == node.tested
            assert set(each.labels) == node.trained.keys()


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"name": "tabel2"}, "did you mean 'table2'?"),
        ({"name": "fig"}, "take one of fig4, fig5"),
        ({"data": {"kth": Path("images")}}, "take one of neu, xsdd, gc10"),
        ({"data": {"nue": Path("images")}}, "did you mean 'neu'?"),
        ({"data": {}}, "--data NAME=PATH"),
        ({"model": "smal"}, "did you mean 'small'?"),
        ({"weights": ["smal=none"]}, "did you mean 'small'?"),
        ({"ray": "auto", "device": "cuda"}, "leave out --device"),
    ],
)
def test_a_wrong_value_is_answered_with_the_remedy(
    change: dict[str, object], hint: str, order: AFedCLOrder
) -> None:
    with pytest.raises(UsageError) as error:
        Experiment(AFEDCL, replace(order, **change), progress.ignore)
    assert hint in error.value.remedy
