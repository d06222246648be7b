"""Figures of the FedTFI experiments: files, and the text in them."""

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from broker_config.protocol.messages import Training
from research.fedtfi import figures
from research.fedtfi.cell import Cell, Embedding, Finished, Node, Point, Setting
from research.fedtfi.experiment import report
from research.fedtfi.presets import FEATURE, LABEL
from research.runner import style
from research.runner.panels import Entry, Panel
from research.studies import patch_figure
from research.studies.patch_leak import Asked, Leak
from trainer.privacy.patch_protection import Protection
from trainer.seeding import generator

pytestmark = pytest.mark.slow

CLASSES = {
    "kth": ["corduroy", "cotton", "linen", "wool"],
    "steel": ["inclusion", "rolled-in_scale", "scratches"],
}
SOURCES = {"kth": ("pieces a, b", "pieces c, d"), "steel": ("NEU-CLS", "X-SDD")}
FRAMEWORKS = {"FedAvg": 0.6, "FedNova": 0.65, "FedProx": 0.64, "Data Sharing": 0.7, "FedTFI": 0.8}
HEADS = {"Deep-TEN": 0.7, "DEPNet": 0.72, "CLASSNet": 0.68, "MusTEN": 0.81}
ROUNDS = 12


def finished(data: str, accuracy: float, seed: int, partition: str = "sources") -> Finished:
    """A cell whose accuracy rises to about this, the same one every time."""
    random = generator(seed, "texture figures", data, repr(accuracy))
    classes, rounds = CLASSES[data], np.arange(1, ROUNDS + 1)
    rise = 1 - np.exp(-rounds / 3)
    reached = (0.25 + (accuracy - 0.25) * rise + random.normal(0, 0.02, ROUNDS)).clip(0, 1)
    losses = 1.4 - accuracy * rise + random.normal(0, 0.03, ROUNDS)
    confusion = random.multinomial(
        30, [accuracy, *[(1 - accuracy) / (len(classes) - 1)] * (len(classes) - 1)]
    )
    labels = [name for name in classes for _ in range(20)]
    sources = [SOURCES[data][number % 2] for number in range(len(labels))]
    points = (
        random.normal(0, 3, (len(labels), 2)) + np.repeat(np.arange(len(classes)) * 6, 20)[:, None]
    )
    cell = Cell(
        setting=Setting(
            data=data,
            images="a" * 64,
            partition=partition,
            classes_per_node=1,
            nodes=8,
            samples=24,
            test_samples=30,
        ),
        method="fedavg",
        options={},
        model="deepten_small",
        weights="none",
        size=64,
        training=Training(learning_rate=1e-3),
        rounds=ROUNDS,
        seed=seed,
        torch="2.13.0",
    )
    return Finished(
        key=cell.key,
        cell=cell,
        classes=classes,
        curve=[
            Point(
                round=int(at),
                accuracy=float(a),
                f1=float(a) - 0.02,
                auc=min(1.0, float(a) + 0.1),
                loss=float(loss),
            )
            for at, a, loss in zip(rounds, reached, losses, strict=True)
        ],
        confusion=[np.roll(confusion, row).tolist() for row in range(len(classes))],
        nodes=[Node(name="plant-1", trained={}, tested=30, accuracy=accuracy, f1=accuracy)],
        embedding=Embedding(
            sources=sources, labels=labels, points=[(float(x), float(y)) for x, y in points]
        ),
        seconds=1.0,
        machine="test",
    )


def panel(
    variants: dict[str, float],
    data: str = "kth",
    scenario: str = FEATURE,
    seeds: Iterable[int] = (0, 1),
) -> Panel[Finished]:
    seeds = list(seeds)
    return Panel(
        data,
        scenario,
        {
            name: {seed: finished(data, share, seed) for seed in seeds}
            for name, share in variants.items()
        },
        list(variants),
    )


def words(name: str, panels: list[Panel[Finished]], folder: Path) -> str:
    """All text of the figure, a space between lines."""
    path = folder / f"{name}.svg"
    style.write(partial(figures.draw, name, panels), path)
    return " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text()))


def test_fig6_shows_accuracy_and_loss_of_all_frameworks_over_rounds(tmp_path: Path) -> None:
    text = words("fig6", [panel(FRAMEWORKS), panel(FRAMEWORKS, "steel")], tmp_path)
    for told in (
        *FRAMEWORKS,
        "accuracy %",
        "training loss",
        "round",
        "KTH-TIPS2 fabrics, feature skew",
        "NEU-CLS",
    ):
        assert told in text
    assert " 70 " in text  # percent
    assert "standard deviation over seeds. KTH-TIPS2 fabrics: 2 seeds, 8 nodes" in text


def test_fig7_has_a_column_for_each_framework_in_the_order_of_the_grid(tmp_path: Path) -> None:
    text = words("fig7", [panel(FRAMEWORKS, scenario=LABEL)], tmp_path)
    assert re.findall("|".join(FRAMEWORKS), text)[:5] == list(FRAMEWORKS)
    assert all(told in text for told in ("F1 %", "AUC %", "training loss"))


def test_fig8_adds_the_seeds_and_gives_percentages_of_a_class(tmp_path: Path) -> None:
    both = panel({"FedAvg": 0.6, "FedTFI": 0.8}, "steel")
    one, two = (np.array(found.confusion) for found in both.variants["FedTFI"].values())
    text = words("fig8", [both], tmp_path)
    share = 100 * (one + two)[1, 1] / (one + two)[1].sum()
    assert f" {share:.0f} " in text
    mean = np.mean([100 * found.accuracy for found in both.variants["FedTFI"].values()])
    assert f"{mean:.1f} %" in text
    assert "rolled-in_scale" in text


def test_fig9_shows_features_by_source_and_by_class(tmp_path: Path) -> None:
    text = words("fig9", [panel({"with TEL": 0.8, "without TEL": 0.7}, seeds=[0])], tmp_path)
    assert text.index("with TEL") < text.index("without TEL")
    assert all(
        told in text for told in ("by source", "by class", "pieces c, d", "linen", "mean nothing")
    )


def test_fig10_keeps_frameworks_and_heads_apart_and_bars_bear_their_numbers(tmp_path: Path) -> None:
    both = panel({**FRAMEWORKS, **HEADS})
    text = words("fig10", [both], tmp_path)
    for found in both.variants.values():
        assert f"{np.mean([100 * each.accuracy for each in found.values()]):.1f}" in text
    assert all(text.count(name) == 1 for name in ("FedAvg", "FedNova", *HEADS) if name != "MusTEN")
    assert text.index("Data") < text.index("heads behind PFI and TEL")


def test_what_is_not_finished_leaves_its_place_empty_and_is_named(tmp_path: Path) -> None:
    some = [panel({"FedTFI": 0.8}), panel({"FedAvg": 0.6}, "steel", seeds=[0])]
    for name in ("fig7", "fig8"):
        assert "Fewer than 2 seeds: FedAvg in KTH" in words(name, some, tmp_path)


def test_a_table_has_no_figure() -> None:
    each = finished("kth", 0.8, 0)
    assert (
        report("table2", [Entry("FedTFI", "kth", FEATURE, each.cell)], {each.key: each}).draw
        is None
    )


def test_what_patches_tell_stands_against_accuracy_with_each_way_of_protection(
    tmp_path: Path,
) -> None:
    ways = [
        Protection(),
        *(Protection(noise=noise) for noise in (0.1, 3)),
        Protection(levels=4),
        Protection(mix=8),
    ]
    told = {"class": 0.6, "most frequent class": 0.3, "plant": 0.8, "found": 0.9, "linked": 0.7}
    some = [
        Leak(
            asked=Asked(data=data, knows="same", view="sent", protection=way, rounds=5, seed=seed),
            psnr=15.0 - number,
            ssim=0.2,
            guess_psnr=12.0,
            guess_ssim=0.1,
            told={name: share - 0.02 * number for name, share in told.items()},
            accuracy=None if data == "untrained" else 0.8 - 0.05 * number,
        )
        for data in ("cloth", "untrained")
        for number, way in enumerate([*ways, Protection(0.3, 4, 4)])
        for seed in range(2)
    ]
    text = " ".join(
        re.findall(
            r"<text[^>]*>([^<]*)</text>", patch_figure.draw(some, tmp_path / "leak.svg").read_text()
        )
    )
    for expected in (
        "as they are",
        "all three",
        "nothing is told",
        "image found, AUC",
        "cloth, 5 rounds",
        "accuracy %",
    ):
        assert expected in text
    assert "untrained" not in text
    assert all(f" {strength} " in text for strength in ("0.1", "3", "4", "8"))
    with pytest.raises(ValueError, match="patch_leak with --accuracy"):
        patch_figure.draw([], tmp_path / "none.svg")
