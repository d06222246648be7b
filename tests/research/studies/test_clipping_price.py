"""The clipped mean's price: how images are dealt unevenly, and what is paired with what."""

from collections import Counter
from pathlib import Path

from research.studies.clipping_price import Outcome, first, rows
from trainer.data.class_folders import Catalogue
from trainer.data.folder_scan import Entry


def test_of_a_plants_images_those_are_kept_that_take_all_classes_in_turn() -> None:
    entries = tuple(
        Entry(Path(f"{name}{k}"), name, f"{name}{k}") for name in "abc" for k in range(4)
    )
    for count, each in ((3, [1, 1, 1]), (5, [2, 2, 1]), (12, [4, 4, 4])):
        kept = Counter(entry.class_name for entry in first(Catalogue(entries), count).entries)
        assert [kept[name] for name in "abc"] == each


def test_the_price_is_paired_by_data_set_and_seed() -> None:
    outcomes = [
        Outcome("fedavg", data, "uneven", 4, seed, rule, 80 + 5 * seed + lost + extra)
        for data, extra in (("NEU-CLS", 3), ("X-SDD", 0))
        for seed in range(2)
        for rule, lost in (("clipped_mean", -1.0), ("mean", 0.0))
    ]
    assert list(rows(outcomes)) == [["fedavg", "uneven", "4", "84.0", "83.0", "-1.0 ± 0.0"]]
