"""The paper's printed numbers."""

import pytest

from research.afedcl import reported

# Accuracies of the best baseline in each column, disjoint 5, 10, 20, then Dirichlet 5, 10, 20.
BEST = {
    "NEU-CLS": (76.46, 91.33, 95.73, 73.56, 83.65, 88.70),
    "X-SDD": (54.14, 60.68, 71.01, 85.96, 86.27, 88.88),
    "GC10-DET": (50.99, 64.56, 75.70, 78.19, 84.11, 85.68),
}


def test_table_ii_is_whole() -> None:
    assert len(reported.TABLE_II) == 3 * 2 * 3 * 8
    assert len(reported.METHODS) == 8
    assert all(0 < number < 100 for printed in reported.TABLE_II.values() for number in printed)


@pytest.mark.parametrize("dataset", BEST)
def test_the_best_baseline_of_each_column_is_the_one_printed(dataset: str) -> None:
    columns = [
        (partition, samples) for partition in reported.PARTITIONS for samples in reported.SAMPLES
    ]
    baselines = [method for method in reported.METHODS if method != "afedcl"]
    found = [
        max(reported.TABLE_II[dataset, *column, method].accuracy for method in baselines)
        for column in columns
    ]
    assert tuple(found) == BEST[dataset]


@pytest.mark.parametrize(
    ("entry", "printed"),
    [
        (("NEU-CLS", "disjoint", 5, "local"), (22.93, 19.13)),
        (("NEU-CLS", "disjoint", 10, "afedcl"), (95.20, 95.19)),
        (("X-SDD", "dirichlet", 5, "afedcl"), (87.02, 83.15)),
        (("X-SDD", "dirichlet", 20, "fedrep"), (88.88, 87.76)),
        (("GC10-DET", "disjoint", 20, "fedavg"), (67.65, 70.66)),
        (("GC10-DET", "dirichlet", 20, "afedcl"), (87.07, 85.35)),
    ],
)
def test_entries_are_accuracy_and_f1_as_printed(
    entry: tuple[str, str, int, str], printed: tuple[float, float]
) -> None:
    assert reported.TABLE_II[entry] == printed
