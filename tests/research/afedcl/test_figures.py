"""Figures of the AFedCL experiments: files, and the text in them."""

import re
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from research.afedcl import figures
from research.afedcl.cell import Embedding, Finished
from research.afedcl.experiment import report
from research.runner import style
from tests.support.finished_cells import NEU, curves, finished, scattered

DIRICHLET = replace(NEU, partition="dirichlet")
CONDITIONS = "Seeds 0, 1; 4 rounds; 96 px; mobilenet_v2;"


def words(name: str, cells: list[Finished], folder: Path) -> str:
    """All text of the figure, a space between lines."""
    path = folder / f"{name}.svg"
    style.write(partial(figures.draw, name, cells), path)
    return " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text()))


def with_curves(seeds: int) -> list[Finished]:
    return [
        finished(
            "afedcl",
            0.7,
            seed,
            options={"lambda": lam},
            history=curves(adversarial=lam > 0, seed=seed),
        )
        for lam in (0.0, 0.1)
        for seed in range(seeds)
    ]


def test_fig4_shows_both_variants_over_rounds(tmp_path: Path) -> None:
    text = words("fig4", with_curves(2), tmp_path)
    for told in (
        "AFedCL",
        "AFedCL without adversarial update",
        "discrimination loss L_D",
        "accuracy %",
        "round",
        "70.75",
    ):
        assert told in text
    assert CONDITIONS in text


def on_a_line(seed: int, start: str, slope: float) -> Finished:
    """Nodes whose last L_D and A_k lie on a line."""
    cell = finished("afedcl", 0.7, seed, options={"start": start})
    histories = [
        {"L_D": [0.0, 0.1 * place], "A_k": [0.0, 0.5 + slope * 0.1 * place]} for place in range(5)
    ]
    nodes = [
        replace(node, history=history) for node, history in zip(cell.nodes, histories, strict=True)
    ]
    return replace(cell, nodes=nodes)


def test_fig5_tells_the_slope_of_each_variant_and_its_interval(tmp_path: Path) -> None:
    cells = [
        on_a_line(seed, start, slope)
        for seed in (0, 1)
        for start, slope in (("carry", 0.2), ("global", -0.3))
    ]
    text = words("fig5", cells, tmp_path)
    # the last round's, of 5 nodes and 2 seeds
    assert "AFedCL (start carry) slope 0.200 ± 0.000, 10 points" in text
    assert "AFedCL (start global) slope -0.300 ± 0.000, 10 points" in text
    assert "95 % interval takes points as independent" in text


def test_fig5_of_methods_without_fusion_has_no_line(tmp_path: Path) -> None:
    assert "regression line" not in words("fig5", scattered(["local"], 2), tmp_path)


def test_fig7_has_a_panel_for_each_node_and_method(tmp_path: Path) -> None:
    kinds, points = ["inclusion", "patches", "patches"], [(0.0, 1.0), (2.0, 3.0), (4.0, 5.0)]
    embeddings = [
        Embedding(node=node, labels=kinds, points=points) for node in ("plant-1", "plant-2")
    ]
    cells = [replace(each, embeddings=embeddings) for each in scattered(["afedcl", "fedavg"], 2)]
    text = words("fig7", cells, tmp_path)
    assert text.index("FedAvg") < text.index("AFedCL")
    assert all(told in text for told in ("plant-1", "plant-2", "inclusion", "patches", CONDITIONS))


def test_fig8_has_lambda_below_and_a_line_a_method(tmp_path: Path) -> None:
    cells = [
        cell
        for lam in (0.01, 1.0)
        for cell in scattered(["ditto", "afedcl"], 2, options={"lambda": lam})
    ]
    text = words("fig8", cells, tmp_path)
    assert all(
        told in text
        for told in ("Ditto", "AFedCL", "lambda", "0.01", "NEU-CLS, disjoint, 10 images a node")
    )


def test_bars_bear_their_numbers(tmp_path: Path) -> None:
    cells = [finished("afedcl", 0.812, seed, options={"fusion": "none"}) for seed in (0, 1)]
    cells += [finished("afedcl", 0.834, seed) for seed in (0, 1)]
    text = words("fig10", cells, tmp_path)
    assert all(
        told in text
        for told in ("81.2", "83.4", "AFedCL without fusion", "training images a node", CONDITIONS)
    )


def test_fig9_shows_networks_and_numbers_of_nodes(tmp_path: Path) -> None:
    cells = [
        cell
        for model in ("mobilenet_v2", "resnet18")
        for cell in scattered(["fedavg", "afedcl"], 2, model=model)
    ]
    cells += scattered(["fedavg", "afedcl"], 2, replace(NEU, nodes=2, samples=25))
    text = words("fig9", cells, tmp_path)
    assert all(told in text for told in ("network", "resnet18", "nodes", "50 images in all"))


def test_the_overview_of_table_ii_names_settings_in_the_papers_order(tmp_path: Path) -> None:
    cells = [
        cell for setting in (DIRICHLET, NEU) for cell in scattered(["local", "afedcl"], 2, setting)
    ]
    text = words("table2", cells, tmp_path)
    assert text.index("NEU-CLS, disjoint") < text.index("NEU-CLS, Dirichlet")
    assert "No-FL" in text


def test_the_overview_of_table_ii_shows_own_and_all_classes_beside_the_papers_view() -> None:
    figure, caption = figures.draw("table2", [finished("fedavg", 0.7, own=0.9, everyone=0.5)])
    points = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 1]
    drawn = {(round(float(line.get_xdata()[0]), 1), line.get_marker()) for line in points}
    assert drawn >= {(90.0, "o"), (50.0, "s"), (70.0, "o"), (58.6, "D")}
    assert "own classes" in caption


def test_accuracy_over_bytes_has_a_curve_for_training_and_points_for_sums() -> None:
    measured: list[float | None] = [None, 0.5, None, 0.6]  # own, in rounds 2 and 4
    cells = [finished("fedavg", 0.7, own=0.6, everyone=0.5, history={"accuracy": measured})]
    cells += [finished("gaussian", 0.7, own=0.8, everyone=0.4, options={"dimensions": 256})]
    trained = replace(cells[0].cell, head="statistics")
    cells += [replace(cells[0], key=trained.key, cell=trained)]
    figure, _ = figures.draw("consensus", cells)
    own, everyone = (
        {bars.get_label(): bars[0].get_xydata().round(1).tolist() for bars in axes.containers}
        for axes in figure.axes
    )
    assert own["FedAvg"] == [[18.2, 50.0], [36.4, 60.0]]  # 9.1 MB a round
    assert own["Gaussian"] == [[0.3, 80.0]]
    assert own["FedAvg + statistics"] == [[43.1, 60.0]]
    assert everyone["FedAvg"] == [[36.4, 50.0]]


def test_a_figure_says_what_has_fewer_seeds(tmp_path: Path) -> None:
    text = words("fig10", [*scattered(["local"], 3), *scattered(["afedcl"], 1)], tmp_path)
    assert "Fewer than 3 seeds: AFedCL in NEU-CLS, disjoint, 10 images a node (1)." in text


def test_tuning_has_no_figure() -> None:
    cells = scattered(["local"], 2)
    assert (
        report("tune", [each.cell for each in cells], {each.key: each for each in cells}).draw
        is None
    )


def test_the_same_cells_give_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        style.write(partial(figures.draw, "fig4", with_curves(2)), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
