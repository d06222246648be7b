"""Rows and labels in CSV files that grow: what becomes of them,
and what is said when they cannot be read.
"""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from broker_config.protocol.errors import EdgeNodeError, UsageError
from edge_node.extensions.vfl.line import csv_tail
from edge_node.extensions.vfl.line.sensor_rows import RowFile, Samples
from edge_node.extensions.vfl.server.labels import Labels

HEADER = "product,unit,heat,force\n"


def write(path: Path, rows: Iterable[Sequence[object]], header: str = HEADER) -> Path:
    with path.open("w", newline="") as file:
        file.write(header)
        csv.writer(file, lineterminator="\n").writerows(rows)
    return path


def append(path: Path, text: str | bytes) -> None:
    with path.open("ab") as file:
        file.write(text if isinstance(text, bytes) else text.encode())


def opened(path: Path, cycles: int = 1, unit: str | None = "unit") -> tuple[Samples, list[str]]:
    said: list[str] = []
    return Samples(RowFile(path, ("heat", "force"), unit=unit), cycles, said.append), said


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "rows.csv", [("P1", "a", 1, 2), ("P2", "a", 3, 4)])


def brute(
    rows: Sequence[tuple[str, str, float, float]], product: str, cycles: int
) -> np.ndarray | None:
    """The definition of a sample, word by word."""
    at = next(number for number, row in enumerate(rows) if row[0] == product)
    history = [row for row in rows[: at + 1] if row[1] == rows[at][1]][-cycles:]
    return np.float32([row[2:] for row in history]).T if len(history) == cycles else None


@pytest.mark.parametrize("seed", range(4))
def test_a_sample_is_its_products_row_and_those_before_it_of_the_same_unit(
    tmp_path: Path, seed: int
) -> None:
    random = np.random.default_rng(seed)
    cycles = int(random.integers(1, 6))
    rows = [
        (f"P{n}", f"u{random.integers(4)}", *random.normal(size=2).tolist()) for n in range(200)
    ]
    samples, _ = opened(write(tmp_path / "rows.csv", []), cycles)
    while rows[samples._products.count :]:  # appended in pieces of any length
        start = samples._products.count
        piece = rows[start : start + int(random.integers(1, 40))]
        append(samples._file.path, "".join(",".join(map(str, row)) + "\n" for row in piece))
        assert samples.refresh()
    asked = [f"P{n}" for n in random.permutation(220)]  # the last 20 are not there
    taken, lacking = samples.get(asked)
    assert taken.dtype == np.float32
    assert taken.shape == (220, 2, cycles)
    for row, product in enumerate(asked):
        expected = brute(rows, product, cycles) if int(product[1:]) < 200 else None
        assert (expected is None) == (row in lacking) == (not samples.has_sample(product))
        np.testing.assert_array_equal(
            taken[row], np.zeros((2, cycles)) if expected is None else expected
        )


@pytest.mark.parametrize("seed", range(3))
def test_what_is_forgotten_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(csv_tail, "MEMORY", 50)
    monkeypatch.setattr("edge_node.extensions.vfl.line.sensor_rows.MEMORY", 50)
    random = np.random.default_rng(seed)
    units = [f"once {n}" if n % 20 == 7 else f"u{random.integers(5)}" for n in range(3000)]
    rows = [(f"P{n}", unit, *random.normal(size=2).tolist()) for n, unit in enumerate(units)]
    file = write(tmp_path / "rows.csv", [])
    samples, _ = opened(file, cycles=4)
    whole, _ = opened(file, cycles=4)
    for start in range(0, 3000, 30):
        append(file, "".join(",".join(map(str, row)) + "\n" for row in rows[start : start + 30]))
        samples.refresh(), whole.refresh()
        samples.drop_before(rows[max(0, start - 100)][0])
        samples.drop_before("unknown")
        window = [row[0] for row in rows[max(0, start - 150) : start + 30]]  # 50 of them: MEMORY
        for ours, theirs in zip(samples.get(window), whole.get(window), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert len(samples._values) < 250
    assert len(samples._products._numbers) < 250
    assert len(samples._last) <= 8
    assert len(whole._values) == 3000
    assert not samples.has_sample("P5")


def test_a_unit_that_was_silent_for_long_starts_anew_however_the_file_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_node.extensions.vfl.line.sensor_rows.MEMORY", 10)
    others = [(f"X{n}", "b", 0, 0) for n in range(10)]
    rows = [("P1", "a", 1, 1), *others[:9], ("P2", "a", 2, 2), *others[9:], ("P3", "a", 3, 3)]
    late = [
        ("Y1", "c", 1, 1),
        *[(f"Y{n}", "b", 0, 0) for n in range(2, 14)],
        ("P4", "a", 4, 4),
        ("P5", "a", 5, 5),
    ]
    file = write(tmp_path / "rows.csv", rows)
    stepwise, _ = opened(file, cycles=2)
    stepwise.refresh()
    append(file, "".join(",".join(map(str, row)) + "\n" for row in late))
    stepwise.refresh()
    at_once, _ = opened(file, cycles=2)
    at_once.refresh()
    for samples in (stepwise, at_once):
        assert [samples.has_sample(f"P{n}") for n in range(1, 6)] == [
            False,
            True,
            True,
            False,
            True,
        ]


def test_how_far_a_file_is_beyond_some_products_is_known(tmp_path: Path) -> None:
    samples, _ = opened(
        write(tmp_path / "rows.csv", [(f"P{number}", "a", 1, 2) for number in range(10)])
    )
    samples.refresh()
    assert samples.count_after(["P2", "P6", "P4"]) == 3
    assert samples.count_after(["P2", "not there"]) == 7
    assert samples.count_after(["not there"]) == samples.count_after([]) == 0


def test_without_a_unit_column_all_rows_are_of_one(file: Path) -> None:
    samples, _ = opened(file, cycles=2, unit=None)
    samples.refresh()
    taken, lacking = samples.get(["P1", "P2"])
    assert lacking == (0,)
    assert taken[1].tolist() == [[1, 3], [2, 4]]


def test_only_what_was_appended_is_read_and_a_torn_last_line_waits(file: Path) -> None:
    samples, said = opened(file)
    assert samples.refresh()
    assert not samples.refresh()
    append(file, "P3,a,5")
    assert not samples.refresh()
    append(file, ".5,6\r\n\n")
    assert samples.refresh()
    assert not samples.refresh()
    assert samples.get(["P3"])[0].tolist() == [[[5.5], [6]]]
    assert said == []


def test_a_file_that_is_still_empty_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").touch()
    samples, _ = opened(tmp_path / "rows.csv")
    assert not samples.refresh()
    append(tmp_path / "rows.csv", HEADER + "P1,a,1,2\n")
    assert samples.refresh()
    assert samples.has_sample("P1")


@pytest.mark.parametrize("how", ["replaced", "shorter", "overwritten"])
def test_a_file_that_does_not_just_grow_is_an_error(file: Path, how: str) -> None:
    samples, _ = opened(file)
    samples.refresh()
    text = file.read_text()
    if how == "replaced":
        (file.parent / "new").write_text(text)
        (file.parent / "new").rename(file)
    else:
        file.write_text(text[:-5] if how == "shorter" else text.replace("3", "9") + "P3,a,1,1\n")
    with pytest.raises(EdgeNodeError, match=r"rows\.csv.*replaced"):
        samples.refresh()


@pytest.mark.parametrize(
    ("content", "says", "remedy"),
    [
        (b"", "", ""),
        (
            b"product,unit,heat\nP1,a,1\n",
            "line 1 of .*rows.csv has no column 'force'",
            "one of product, unit, heat",
        ),
        (b"product,unit,heat,forze\nP1,a,1,2\n", "has no column 'force'", "did you mean 'forze'?"),
        (b"product,unit,heat,force,heat\n", "has more than one column 'heat'", "heat"),
        (b"\xef\xbb\xbfproduct,unit,heat,force\n", "byte order mark", "UTF-8 without BOM"),
        (b"product;unit;heat;force\nP1;a;1;2\n", "semicolons", "commas"),
        (b"product,unit,heat,\xfcber\n", "line 1 of .*rows.csv is no header", "UTF-8"),
        (HEADER.encode("utf-16"), "line 1 of .*rows.csv is no header", "UTF-8"),
        (
            HEADER.encode() + b"P1,a,warm,2\n",
            "line 2 of .*rows.csv .*heat is 'warm', not a finite number",
            "number",
        ),
        (
            HEADER.encode() + b"P1,a,1,nan\n",
            "line 2 .*force is 'nan', not a finite number",
            "number",
        ),
        (HEADER.encode() + b"\nP1,a,1,-inf\n", "line 3 .*force is '-inf'", "number"),
        (HEADER.encode() + b"P1,a,1e39,1\n", "line 2 .*heat is '1e39'", "number"),
        (HEADER.encode() + b"P1,a,,1\n", "line 2 .*heat is ''", "number"),
        (
            HEADER.encode() + b"P1,a,1,5,2,5\n",
            "line 2 .*has 6 cells, the header 4",
            "points in numbers",
        ),
        (HEADER.encode() + b"P1,\xfc,1,2\n", "line 2 .*is not UTF-8", "UTF-8"),
        (HEADER.encode() + b'P1,"a,1,2\nP2,a",1,2\n', "line 2 .*quotes", "quote"),
        (HEADER.encode() + b"P" * 65 + b",a,1,2\n", "line 2 .*has 65 characters", "1 to 64"),
        (HEADER.encode() + b" ,a,1,2\n", "line 2 .*has 0 characters", "1 to 64"),
        (b"x" * (1 << 20), "line 1 of .*rows.csv is longer than", "line"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line_and_a_remedy(
    tmp_path: Path, content: bytes, says: str, remedy: str
) -> None:
    path = tmp_path / "rows.csv"
    if content:
        path.write_bytes(content)
    samples, _ = opened(path)
    with pytest.raises(UsageError, match=says or "there is no file") as caught:
        samples.refresh()
    assert remedy in caught.value.remedy


def test_columns_that_are_none_or_twice_are_refused(file: Path) -> None:
    for columns in ([], ["heat", "heat"], ["heat", "product"]):
        with pytest.raises(UsageError, match="columns"):
            Samples(RowFile(file, tuple(columns)), 1)


def test_bad_rows_of_a_live_file_are_left_out_with_few_notes(file: Path) -> None:
    samples, said = opened(file, cycles=2)
    samples.refresh()
    bad = [
        b"P3,a,nan,1",
        b"P1,a,8,8",
        b"P4,a",
        b"\xff,a,1,1",
        b'P5,"a,1,1',
        b"P6,a,x,1",
        b"product,unit,heat,force",
    ]
    good = [f"G{n},a,{n},{n}".encode() for n in range(100)]
    mixed = [line for n, line in enumerate(good) for line in (line, *bad[n : n + 1])]
    append(file, b"\n".join(mixed) + b"\nG0,a,7,7\n")
    assert samples.refresh()
    assert len(said) == 1
    assert "line 5 of" in said[0]
    assert "heat is 'nan'" in said[0]
    assert samples._file.left_out == len(bad) + 1
    taken, lacking = samples.get([f"G{n}" for n in range(100)])  # as if the bad ones were not there
    assert lacking == ()
    assert taken[:, 0].tolist() == [[3, 0], *([n - 1, n] for n in range(1, 100))]
    append(file, b"P7,a,nan,1\n")
    assert not samples.refresh()
    assert len(said) == 1
    append(file, b"P7,a,nan,1\n" * 191)
    samples.refresh()
    assert [each.split()[0] for each in said[1:]] == ["10", "100"], "of 200 rows"


def test_of_a_product_that_comes_twice_the_first_row_counts(file: Path) -> None:
    samples, said = opened(file)
    append(file, "P3,a,5,5\nP4,a,6,6\nP3,a,7,7\n")
    samples.refresh()
    append(file, "P4,a,8,8\n")
    samples.refresh()
    assert samples.get(["P3", "P4"])[0][:, 0, 0].tolist() == [5, 6]
    assert [text.endswith("the product 'P3' is there already") for text in said] == [True]


def test_columns_are_scaled_by_the_set_that_they_settled_on(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    rows = [(f"P{n}", "a", 900 + 40 * random.normal(), 7.1) for n in range(300)]
    samples, _ = opened(write(tmp_path / "rows.csv", rows), cycles=3)
    samples.refresh()
    first, later = [f"P{n}" for n in range(100)], [f"P{n}" for n in range(100, 300)]
    raw = samples.get(later)[0]
    samples.fit_scaling(first)
    taken, lacking = samples.get(first)
    assert lacking == (0, 1)
    assert not taken[:2].any()
    assert abs(taken[2:, 0].mean()) < 1e-4
    assert abs(taken[2:, 0].std() - 1) < 1e-4
    assert not taken[:, 1].any()  # a constant column stays finite
    assert samples.scaling is not None
    expected = (raw - samples.scaling.mean[:, None]) / samples.scaling.deviation[:, None]
    np.testing.assert_array_equal(samples.get(later)[0], expected)
    other, _ = opened(samples._file.path, cycles=3)
    other.refresh()
    other.scaling = samples.scaling  # as a checkpoint has it
    np.testing.assert_array_equal(other.get(later)[0], expected)


@pytest.mark.parametrize(
    "features", [("heat", "force"), ("heat", "load"), ("load", "heat", "force")]
)
def test_features_are_scaled_within_each_operating_condition_and_settings_as_a_whole(
    features: tuple[str, ...], tmp_path: Path
) -> None:
    """Readings of 3 and 8 are of two conditions; what is neither belongs to the nearest;
    force says the same twice.
    """
    random = np.random.default_rng(6)
    load = np.tile([3, 8], 150) + random.uniform(-0.3, 0.3, 300)
    load[7] = 60  # one row is no condition
    heat = np.where(load < 5, 20, 900) + np.where(load < 5, 1, 50) * random.normal(size=300)
    cells = [f"P{n},a,{heat[n]},{load[n]},{7.1 + (load[n] > 5)}" for n in range(300)]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["product,unit,heat,load,force", *cells]) + "\n")
    samples = Samples(RowFile(path, features, unit="unit", settings=("load",)), 2)
    samples.refresh()
    products = [f"P{n}" for n in range(1, 300)]
    samples.fit_scaling(products)
    assert samples.scaling is not None
    assert samples.scaling.conditions.tolist() == [[3], [8]]
    taken, lacking = samples.get(products)
    assert (taken.shape, lacking) == ((299, len(features), 2), ())
    low = load[1:] < 5
    warm = taken[:, features.index("heat"), -1]
    for part in (warm[low], warm[~low]):
        assert abs(part.mean()) < 0.05
        assert abs(part.std() - 1) < 0.05
    if "force" in features:
        assert not taken[:, features.index("force")].any(), "constant within a condition"
    if "load" in features:
        whole = taken[:, features.index("load"), -1]
        assert whole[low].max() < whole[~low].min()


def test_settings_are_named_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="twice"):
        Samples(RowFile(tmp_path / "rows.csv", ("heat",), settings=("load", "load")), 1)


# Labels


def labels_of(path: Path) -> tuple[Labels, list[str]]:
    said: list[str] = []
    return Labels(path, ["ok", "burr"], warn=said.append), said


def test_labels_number_the_products_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    path = write(tmp_path / "labels.csv", [("P9", "burr"), ("P2", "ok")], "product,label\n")
    labels, said = labels_of(path)
    assert labels.refresh()
    assert labels.count == 2
    append(path, "P5,ok\nP6,bu")
    assert labels.refresh()
    assert not labels.refresh()
    append(path, "rr\nP9,ok\nP7,scratch\nP8,burr\n")
    assert labels.refresh()
    assert labels.count == 5
    assert labels.products(1, 99) == ("P2", "P5", "P6", "P8")
    assert labels.labels(0, 5).tolist() == [1, 0, 0, 1, 1]
    assert labels.labels(0, 5).dtype == np.int64
    assert len(said) == 1


def test_a_label_that_is_no_class_is_an_error_in_the_first_row(tmp_path: Path) -> None:
    labels, _ = labels_of(write(tmp_path / "labels.csv", [("P9", "bur")], "product,label\n"))
    with pytest.raises(UsageError, match=r"line 2 .*'bur'") as caught:
        labels.refresh()
    assert "'burr'" in caught.value.remedy


def test_positions_stay_when_old_ones_are_forgotten(tmp_path: Path) -> None:
    labels, _ = labels_of(
        write(tmp_path / "labels.csv", [(f"P{n}", "ok") for n in range(100)], "product,label\n")
    )
    labels.refresh()
    labels.drop_before(40)
    labels.drop_before(30)
    assert labels.count == 100
    assert labels.products(40, 42) == ("P40", "P41")
    assert len(labels.labels(40, 100)) == 60
    with pytest.raises(IndexError, match="before 40"):
        labels.products(39, 42)


@pytest.mark.parametrize("seed", range(3))
def test_a_products_position_hangs_on_the_file_alone_not_on_how_it_was_read(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids come again, sooner and later; one head follows the file and forgets,
    another starts at its end.
    """
    monkeypatch.setattr(csv_tail, "MEMORY", 20)
    monkeypatch.setattr("edge_node.extensions.vfl.server.labels.MEMORY", 20)
    random, told = np.random.default_rng(seed), list[str]()
    path = write(tmp_path / "labels.csv", [], "product,label\n")
    running = Labels(path, ["good", "bad"], warn=told.append)
    positions: list[str] = []
    for _ in range(30):
        ids = random.integers(0, 60, random.integers(1, 40))
        append(path, "".join(f"p{each},good\n" for each in ids))
        running.refresh()
        positions += running.products(len(positions), running.count)
        running.drop_before(running.count - 3)
    again = Labels(path, ["good", "bad"], warn=told.append)
    again.refresh()
    assert list(again.products(0, again.count)) == positions
    assert len(positions) > 100
    assert len(running._known._numbers) <= 20


def test_a_path_that_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Is a directory"):
        opened(tmp_path)[0].refresh()
