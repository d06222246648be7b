"""`python -m research dao-vfl`: data sets as streams, cells that survive kills,
references, figures.
"""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
import torch
from rich.console import Console

from broker_config.protocol.errors import UsageError
from edge_node.extensions.vfl.messages import Channel, Recipe, VflSpec, Window
from edge_node.extensions.vfl.policies.latency import SimulatedTimings
from edge_node.extensions.vfl.simulation import Simulation, Stream
from research.dao_vfl import data, measures
from research.dao_vfl.cell import Cell, Finished, Point
from research.dao_vfl.data import Inputs, Split
from research.dao_vfl.experiment import DAO_VFL, DAOVFLOrder, plan
from research.dao_vfl.grids import FIXED, GRIDS, Plan, valued
from research.dao_vfl.policies.problem import balanced
from research.dao_vfl.presets import PRESETS, WORTH, Study
from research.dao_vfl.reference import Central, Fixed
from research.dao_vfl.run import run_cell
from research.runner.experiment import Experiment
from research.runner.machine import TORCH
from research.runner.panels import arrange
from research.runner.processes import attempt
from research.runner.store import Records
from tests.support.research_command import research
from tests.support.waiting import wait_until
from trainer import progress
from trainer.seeding import generator

pytestmark = pytest.mark.slow

ENGINES, CYCLES, TESTED, REMAIN = 40, 50, 6, 20  # 36 samples of each engine
SETTINGS = (
    (0, 0, 100),
    (10, 0.25, 100),
    (20, 0.7, 100),
    (25, 0.62, 60),
    (35, 0.84, 100),
    (42, 0.84, 100),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines whose readings differ by operating condition, and rise as they wear."""
    folder, random = tmp_path_factory.mktemp("cmapss"), generator(3, "engines")

    def rows(engines: int, cycles: int) -> str:
        lines = []
        for engine, cycle in (
            (engine, cycle) for engine in range(1, engines + 1) for cycle in range(1, cycles + 1)
        ):
            which = random.integers(6)
            readings = 100 * which + cycle / CYCLES + random.normal(0, 0.1, 21)
            settings = np.array(SETTINGS[which]) + random.normal(0, 1e-3, 3)
            lines.append(
                " ".join(map(str, [engine, cycle, *settings.round(4), *readings.round(4)]))
            )
        return "\n".join(lines) + "\n"

    with gzip.open(folder / "train_FD002.txt.gz", "wt") as file:
        file.write(rows(ENGINES, CYCLES))
    (folder / "test_FD002.txt").write_text(rows(TESTED, CYCLES - REMAIN))
    (folder / "RUL_FD002.txt").write_text(f"{REMAIN}\n" * TESTED)
    return folder


@pytest.fixture(scope="module")
def source(folder: Path) -> tuple[str, data.Source]:
    return data.read("cmapss", folder)


@pytest.fixture(scope="module")
def inputs(source: tuple[str, data.Source]) -> Inputs:
    return Inputs(dict([source]))


@pytest.fixture
def order(folder: Path, tmp_path: Path) -> DAOVFLOrder:
    return DAOVFLOrder(
        name="fig6",
        preset="quick",
        data={"cmapss": folder},
        rounds=2,
        seeds=1,
        store=tmp_path / "store",
        workers=1,
    )


@pytest.fixture
def small_study(monkeypatch: pytest.MonkeyPatch) -> Study:
    """The preset `quick`, quicker, and its fixed model too:
    the steps of that are no setting of any grid.
    """
    monkeypatch.setattr("research.dao_vfl.reference._STEPS", 20)
    study = PRESETS["quick"]["cmapss"]
    found = study._replace(
        rounds=2,
        window=Window(start=300, chunk=100),
        recipe=Recipe(),
        denoising=msgspec.structs.replace(study.denoising, epochs=3),
        most=3,
    )
    monkeypatch.setitem(PRESETS, "quick", {"cmapss": found})
    return found


def parts(source: tuple[str, data.Source], seed: int = 0, **settings: str) -> data.Parts:
    digest, content = source
    return data.split(Split(data="cmapss", digest=digest, **settings), content, seed, 500)


def same(first: Finished, second: Finished) -> bool:
    return msgspec.structs.replace(first, seconds=0) == msgspec.structs.replace(second, seconds=0)


# Data


def test_every_row_with_fourteen_before_it_is_a_sample_of_two_sensors(
    source: tuple[str, data.Source],
) -> None:
    stream, held_out = parts(source)
    assert data.counts(source[1]) == (ENGINES * (CYCLES - 14), TESTED * (CYCLES - REMAIN - 14))
    assert [tuple(each.shape) for each in stream.samples] == [(ENGINES * 36, 12, 15)] * 2
    assert len(held_out.labels) == TESTED * 16
    assert (int(stream.labels.min()), int(stream.labels.max())) == (0, 35)
    assert (int(held_out.labels.min()), int(held_out.labels.max())) == (REMAIN, 35)


@pytest.mark.parametrize("seed", [0, 7])
def test_while_tuning_whole_engines_are_held_out_and_the_test_file_is_not_looked_at(
    source: tuple[str, data.Source], seed: int
) -> None:
    digest, content = source
    assert isinstance(content, data.Turbofans)
    blind = content._replace(
        test=content.test._replace(values=np.full_like(content.test.values, np.nan))
    )
    own, other = parts((digest, blind), seed, pool="tuning", scaling="global")
    assert len(other.labels) == 8 * 36
    assert len(own.labels) == 32 * 36
    seen, held_out = ({bytes(row) for row in each.samples[0].numpy()} for each in (own, other))
    assert len(seen) + len(held_out) == ENGINES * 36
    assert not seen & held_out


def test_engines_arrive_one_after_another_in_time_or_all_mixed(
    source: tuple[str, data.Source],
) -> None:
    falling = torch.arange(35, -1, -1)
    assert torch.equal(parts(source, order="engines").stream.labels, falling.repeat(ENGINES))
    mixed = parts(source, order="mixed").stream.labels
    assert not torch.equal(mixed[:36], falling)
    assert not torch.equal(mixed, parts(source, 1, order="mixed").stream.labels)


def test_scaled_by_condition_wear_shows_and_scaled_as_a_whole_it_drowns(
    source: tuple[str, data.Source],
) -> None:
    def shown(scaling: str) -> float:
        stream, _ = parts(source, scaling=scaling)
        return float(np.corrcoef(stream.samples[1][:, 0, -1], stream.labels)[0, 1])

    assert shown("condition") < -0.8
    assert abs(shown("global")) < 0.2


def test_scales_are_those_of_the_first_set(source: tuple[str, data.Source]) -> None:
    stream, _ = parts(source, order="mixed")
    first = torch.stack([each[:500, :, -1] for each in stream.samples])
    assert torch.allclose(first.mean(1), torch.zeros(2, 12), atol=1e-4)
    assert torch.allclose(first.std(1), torch.ones(2, 12), atol=0.02)


def test_a_folder_without_the_files_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="train_FD002"):
        data.read("cmapss", tmp_path)


def test_any_of_nasas_sets_is_a_data_set_of_its_own_with_its_own_title(
    folder: Path, tmp_path: Path
) -> None:
    for file in folder.iterdir():
        shutil.copy(file, tmp_path / file.name.replace("FD002", "FD004"))
    for order, title in (("cmapss_fd004", "C-MAPSS FD004"), ("cmapss", "C-MAPSS FD002")):
        where = tmp_path if order == "cmapss_fd004" else folder
        asked = DAOVFLOrder(
            name="fig6",
            preset="quick",
            data={order: where},
            rounds=2,
            seeds=1,
            store=tmp_path / "store",
            workers=1,
        )
        told = list[str]()

        def hear(event: progress.AnyEvent, told: list[str] = told) -> None:
            told.append(getattr(event, "text", ""))

        grid = plan(asked, [], hear)
        assert {cell.split.data for cell in grid.cells} == {order}
        assert any(text.startswith(f"{title}: ") for text in told)
    with pytest.raises(UsageError, match="train_FD001"):
        data.read("cmapss_fd001", folder)


def test_a_sensor_sees_a_quadrant_of_each_image(tmp_path: Path) -> None:
    random = generator(0, "images")
    train, test = (
        random.integers(0, 255, (count, 32, 32, 3)).astype(np.uint8) for count in (30, 10)
    )
    labels = {"train_labels": np.arange(30) % 10, "test_labels": np.arange(10)}
    np.savez(tmp_path / "images.npz", train_images=train, test_images=test, **labels)
    digest, content = data.read("cifar10", tmp_path / "images.npz")
    _, held_out = data.split(Split(data="cifar10", digest=digest), content, 0, 5)
    assert [tuple(each.shape) for each in held_out.samples] == [(10, 3, 16, 16)] * 4
    corners = [each[0, :, 0, 0].tolist() for each in held_out.samples]
    wanted = [test[0, row, column] / 127.5 - 1 for row in (0, 16) for column in (0, 16)]
    assert np.allclose(corners, wanted)
    tuning = data.split(Split(data="cifar10", digest=digest, pool="tuning"), content, 0, 5)
    assert (len(tuning.stream.labels), len(tuning.held_out.labels)) == (27, 3)


# References


def small(kind: type[Simulation] | type[Central], **spec: object) -> Simulation | Central:
    random = torch.Generator().manual_seed(5)
    samples = tuple(torch.randn(40, 3, 9, generator=random) for _ in range(2))
    labels = torch.randint(0, 4, (40,), generator=random)
    settings = {
        "federation": "f",
        "run": "0" * 16,
        "software": "",
        "sensors": ("a", "b"),
        "network": "conv",
        "classes": tuple("0123"),
        "window": Window(start=20, chunk=10),
        "recipe": Recipe(eta=0.1),
        "seed": 2,
    }
    return kind(VflSpec(**{**settings, **spec}), Stream(samples, labels))  # type: ignore[arg-type]


def test_one_full_step_without_noise_is_that_of_the_centralised_model() -> None:
    simulation, central = small(Simulation), small(Central)
    for _ in range(3):
        assert simulation.step((1, 1)).loss == pytest.approx(central.step((1, 1)).loss, abs=1e-5)
    assert torch.allclose(
        simulation.predict(simulation.stream.samples),
        central.predict(simulation.stream.samples),
        atol=1e-5,
    )


def test_with_more_steps_they_part() -> None:
    simulation, central = small(Simulation), small(Central)
    simulation.step((3, 3)), central.step((3, 3))
    assert not torch.allclose(
        simulation.predict(simulation.stream.samples),
        central.predict(simulation.stream.samples),
        atol=1e-4,
    )


@pytest.mark.usefixtures("small_study")
def test_the_fixed_models_loss_of_a_round_is_the_mean_over_its_set() -> None:
    simulation = small(Simulation)
    fixed = Fixed(simulation.spec, simulation.stream, 3)
    logits = fixed.predict(simulation.stream.samples)
    for round_ in (1, 2, 3):
        rows = slice(*simulation.spec.window.span(round_))
        mean = torch.nn.functional.cross_entropy(
            logits[rows], simulation.stream.labels[rows]
        ).item()
        assert fixed.step((1, 1)).loss == pytest.approx(mean, abs=1e-6)


def test_regret_is_the_sum_of_what_each_round_lost_beyond_the_fixed_model() -> None:
    assert measures.regret([3.0, 2.5, 2.0], [1.0, 1.0, 0.5]) == [2.0, 3.5, 5.0]
    assert measures.regret([3.0, None, 2.0], [1.0, 1.0, 0.5]) == [2.0]


# Cells and grids


def cell(source: tuple[str, data.Source], **changes: object) -> Cell:
    plan = Plan({"cmapss": PRESETS["quick"]["cmapss"]}, {"cmapss": source[0]}, TORCH)
    return msgspec.structs.replace(plan.base("cmapss", 0), **changes)


def test_a_cells_key_hangs_on_all_that_it_depends_on_and_on_nothing_else(
    source: tuple[str, data.Source],
) -> None:
    base = cell(source)
    assert base.key == cell(source).key
    others = [
        {"seed": 1},
        {"channel": Channel(levels=7)},
        {"recipe": Recipe(eta=0.3)},
        {"policy": "all"},
    ]
    assert len({base.key, *(cell(source, **other).key for other in others)}) == 5


@pytest.mark.usefixtures("small_study")
def test_a_federation_that_diverges_is_a_result(
    source: tuple[str, data.Source], inputs: Inputs
) -> None:
    found = attempt(run_cell, cell(source, recipe=Recipe(eta=1e6), rounds=3), inputs)
    assert isinstance(found, Finished)
    assert 0 < found.diverged <= 3
    assert found.last is None


@pytest.mark.usefixtures("small_study")
@pytest.mark.parametrize("policy", ["all", "one"])
def test_a_policys_rounds_are_those_of_its_decisions(
    policy: str, source: tuple[str, data.Source], inputs: Inputs
) -> None:
    decided = attempt(run_cell, cell(source, policy=policy, iterations=(3, 3)), inputs)
    fixed = attempt(
        run_cell, cell(source, iterations=(3, 3) if policy == "all" else (1, 3)), inputs
    )
    assert isinstance(decided, Finished)
    assert isinstance(fixed, Finished)
    assert decided.curve == fixed.curve
    assert decided.disparity == ([0, 0] if policy == "all" else [2, 2])
    assert all(latency > 2 for latency in decided.latency)
    assert fixed.latency == []


@pytest.mark.parametrize(("set_", "reached"), [("cifar10", 0.25), ("cmapss", 0.8)])
def test_rewards_are_about_right_classes_or_where_these_are_numbers_about_the_distance(
    set_: str, reached: float
) -> None:
    plan_ = Plan(PRESETS["cpu"], dict.fromkeys(PRESETS["cpu"], "d"), TORCH)
    cell_ = next(entry.cell for entry in GRIDS["fig10"](plan_) if entry.data == set_)
    point = Point(round=1, loss=1.0, accuracy=0.25, rmse=26.0 if set_ == "cmapss" else None)
    ends = {"key": cell_.key, "cell": cell_, "losses": [], "latency": [40.0], "disparity": [2.0]}
    found = Finished(**ends, curve=[point], seconds=1.0, machine="test")
    better = msgspec.structs.replace(
        found, curve=[msgspec.structs.replace(point, accuracy=0.35, rmse=point.rmse and 13.0)]
    )
    assert measures.reached(found) == {1: pytest.approx(reached)}
    (before,), (after,) = (measures.rewards(each).values() for each in (found, better))
    assert after - before == pytest.approx(0.1 * worth_of_accuracy(cell_))


def worth_of_accuracy(cell_: Cell) -> float:
    """Of a reward: what accuracy of 1 is worth."""
    curve = WORTH[cell_.split.data, cell_.recipe.batches]
    return balanced(
        SimulatedTimings(len(cell_.iterations)), max(cell_.iterations), cell_.rounds, curve
    ).accuracy


@pytest.mark.parametrize("name", GRIDS)
def test_every_grid_has_each_variant_with_each_seed_on_each_data_set(name: str) -> None:
    studies = PRESETS["cpu"]
    entries = GRIDS[name](Plan(studies, dict.fromkeys(studies, "d"), TORCH))
    for set_, study in (valued(studies) if name == "fig10" else studies).items():
        seeds: dict[str, set[int]] = {}
        for entry in entries:
            if entry.data == set_:
                seeds.setdefault(entry.variant, set()).add(entry.cell.seed)
        assert len(seeds) >= 3
        assert all(found == set(range(study.seeds)) for found in seeds.values())


def test_a_killed_grid_goes_on_and_ends_as_if_nothing_had_happened(
    order: DAOVFLOrder, inputs: Inputs
) -> None:
    words = [
        "dao-vfl",
        order.name,
        "--data",
        f"cmapss={order.data['cmapss']}",
        "--rounds",
        order.rounds,
        "--seeds",
        order.seeds,
        "--store",
        order.store,
        "--workers",
        order.workers,
        "--json",
    ]
    log = order.store.parent / "log"
    with log.open("wb") as file:
        running = subprocess.Popen(
            [sys.executable, "-m", "research", *map(str, words)],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(
            lambda: '"event":"CellFinished"' in log.read_text(),
            meanwhile=lambda: running.poll() is None,
            said=log.read_text,
        )
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait(60)
    grid = Experiment(DAO_VFL, order, progress.ignore)
    before = grid.finished()
    assert 0 < len(before) < len(grid.cells) == 6

    again = research(*words)
    events = [json.loads(line) for line in again.stdout.splitlines()]
    assert again.returncode == 0, again.stderr
    assert sum(event["event"] == "CellFinished" for event in events) == 6 - len(before)
    assert events[-1]["result"]["missing"] == 0

    after = grid.finished()
    assert len((order.store / "cells.jsonl").read_text().splitlines()) == 6
    assert all(same(after[key], found) for key, found in before.items())
    again_alone = [each for each in grid.cells if each.key not in before][:2]
    assert all(same(after[each.key], attempt(run_cell, each, inputs)) for each in again_alone)
    assert sorted(path.name for path in order.store.iterdir()) == [
        ".gitattributes",
        "cells.jsonl",
        "fig6.md",
        "fig6.svg",
    ]


@pytest.fixture(scope="module")
def played() -> dict[str, Finished]:
    """Cells that any test has played."""
    return {}


@pytest.mark.usefixtures("small_study")
@pytest.mark.parametrize("name", GRIDS)
def test_every_figure_has_a_curve_and_every_table_a_row_for_each_variant(
    name: str,
    order: DAOVFLOrder,
    source: tuple[str, data.Source],
    inputs: Inputs,
    played: dict[str, Finished],
) -> None:
    grid = Experiment(DAO_VFL, replace(order, name=name), progress.ignore)
    for each in grid.cells:
        if each.key not in played:
            found = attempt(run_cell, each, inputs)
            assert isinstance(found, Finished), found
            played[each.key] = found
        Records(order.store / "cells.jsonl", Finished).add(played[each.key])
    table, figure = grid.report(Console(quiet=True))
    study = PRESETS["quick"]["cmapss"]._replace(rounds=order.rounds, seeds=order.seeds)
    entries = GRIDS[name](Plan({"cmapss": study}, {"cmapss": source[0]}, TORCH))
    assert {entry.cell.key for entry in entries} == {each.key for each in grid.cells}
    variants = {entry.variant for entry in entries} - {FIXED}
    assert len(variants) >= 3
    rows = {
        line.split("|")[1].strip()
        for line in table.read_text().splitlines()
        if line.startswith("| ")
    }
    assert variants <= rows
    drawn = figure.read_text()
    assert all(f">{variant}<" in drawn for variant in variants)
    assert (">of order sqrt(T)<" in drawn) == (name == "regret")
    (panel,) = arrange(entries, played)
    for measure in measures.shown(name, "cmapss"):
        assert all(2 in measures.curves(panel, measure, variant)[0] for variant in variants)


def test_what_is_not_there_is_refused_with_a_remedy(order: DAOVFLOrder) -> None:
    with pytest.raises(UsageError, match="'fig66'"):
        Experiment(DAO_VFL, replace(order, name="fig66"), progress.ignore)
    with pytest.raises(UsageError, match="'mnist'"):
        Experiment(DAO_VFL, replace(order, data={"mnist": Path()}), progress.ignore)


@pytest.mark.parametrize(("sensors", "iterations"), [(2, 4), (4, 5)])
def test_an_agent_of_another_federation_is_refused(
    sensors: int, iterations: int, order: DAOVFLOrder, tmp_path: Path
) -> None:
    ends = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, [1])
        for name in ("round", "decision")
    ]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["round"], ["decision"])], "agent", ends[:1], ends[1:]
    )
    model = onnx.helper.make_model(
        graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)]
    )
    onnx.helper.set_model_props(model, {"sensors": str(sensors), "iterations": str(iterations)})
    onnx.save(model, tmp_path / "agent.onnx")
    with pytest.raises(
        UsageError,
        match=rf"{sensors} sensors.*{iterations} iterations",
    ):
        Experiment(
            DAO_VFL, replace(order, name="fig8", agents=(tmp_path / "agent.onnx",)), progress.ignore
        )
