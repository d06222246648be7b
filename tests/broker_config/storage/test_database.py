"""A journal says what was written to it, or that it is damaged: never something else."""

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.storage.database import Database, reading

ROWS = [(number, f"plant-{number}", number / 7) for number in range(60)]


class Facts(Database):
    FILE, VERSION, TABLES = (
        "facts.sqlite",
        1,
        "CREATE TABLE facts (number INTEGER PRIMARY KEY, name TEXT, weight REAL);",
    )

    def add(self, *rows: tuple[object, ...]) -> None:
        self._write(*(("INSERT OR REPLACE INTO facts VALUES (?, ?, ?)", row) for row in rows))

    def remove(self, number: int) -> None:
        self._write(("DELETE FROM facts WHERE number = ?", (number,)))

    def rows(self) -> list[tuple[object, ...]]:
        return self._db.execute("SELECT * FROM facts ORDER BY number").fetchall()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Of rows that were added, replaced and removed."""
    with closing(Facts(tmp_path)) as facts:
        facts.add(*ROWS[:30], (7, "another", 0.5))
        facts.add(*ROWS)
        facts.add((99, "gone", None))
        facts.remove(99)
    return tmp_path / Facts.FILE


def test_what_was_written_is_there_and_nothing_beside_the_file(file: Path) -> None:
    with closing(Facts(file.parent)) as facts:
        assert facts.rows() == ROWS
        facts.add((60, "one more", 1.0))
        assert [each.name for each in file.parent.iterdir()] == [file.name]
    with reading(file, "the command") as database:
        assert len(database.execute("SELECT * FROM facts").fetchall()) == 61


def flip(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def tells_the_truth(file: Path) -> bool:
    """Whether it says what was written; else it must say that it is damaged, and what to do."""
    told = None
    try:
        with closing(Facts(file.parent)) as facts:
            assert facts.rows() == ROWS
    except EdgeNodeError as error:
        told = error
    if told is None:
        return True
    assert f"the journal {file} is damaged" in told.what
    assert (
        f"restore the folder {file.parent} from a copy, or remove {file} and begin another run"
        in told.remedy
    )
    return False


@pytest.mark.parametrize("step", [41, pytest.param(1, marks=pytest.mark.slow)])
def test_no_flipped_bit_changes_what_it_says(step: int, file: Path) -> None:
    data = file.read_bytes()
    told = []
    for at in range(0, len(data), step):
        file.write_bytes(flip(data, at, at % 8))
        told.append(tells_the_truth(file))
    assert not all(told)


@pytest.mark.parametrize(
    "cut", [lambda size: size - 1, lambda size: size // 2, lambda size: size - 4096, lambda _: 50]
)
def test_a_file_that_was_cut_is_damaged(cut: Callable[[int], int], file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: cut(len(data))])
    assert not tells_the_truth(file)
    with pytest.raises(EdgeNodeError, match="is damaged"), reading(file, "the command"):
        pass


def test_a_row_that_was_changed_or_removed_behind_its_back_is_noticed(file: Path) -> None:
    data = file.read_bytes()
    for change in (
        "UPDATE facts SET weight = 0 WHERE number = 3",
        "DELETE FROM facts WHERE number = 3",
    ):
        file.write_bytes(data)
        with closing(sqlite3.connect(file)) as database, database:
            database.execute(change)
        assert not tells_the_truth(file)


def test_a_transaction_that_fails_leaves_rows_and_checksum_as_they_were(file: Path) -> None:
    with closing(Facts(file.parent)) as facts:
        with pytest.raises(sqlite3.ProgrammingError):
            facts.add((1, "replaced", 0.0), (2,))
        facts.add(ROWS[5])
    assert tells_the_truth(file)


@pytest.fixture
def older(tmp_path: Path) -> Path:
    with closing(sqlite3.connect(tmp_path / Facts.FILE)) as database:
        database.executescript("CREATE TABLE facts (number INTEGER); PRAGMA user_version = 0;")
    return tmp_path


def test_a_file_without_checksum_is_of_another_version(older: Path) -> None:
    with pytest.raises(UsageError, match="another version"):
        Facts(older)


def test_a_file_of_this_version_without_checksum_is_damaged(file: Path) -> None:
    with closing(sqlite3.connect(file)) as database:
        database.execute("DROP TABLE checksum")
    assert not tells_the_truth(file)


def test_a_folder_that_was_removed_while_it_is_used_is_told_with_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    with closing(Facts(folder)) as facts:
        shutil.rmtree(folder)
        with pytest.raises(EdgeNodeError, match="written") as caught:
            facts.add(ROWS[0])
    assert "removed" in caught.value.remedy


class MoreFacts(Facts):
    MORE_TABLES = "CREATE TABLE IF NOT EXISTS later (note TEXT);"

    def note(self, text: str) -> None:
        self._write(("INSERT INTO later VALUES (?)", (text,)))


def test_tables_that_came_later_are_added_to_a_file_of_before_and_are_verified_as_all(
    file: Path,
) -> None:
    with closing(MoreFacts(file.parent)):
        pass  # nothing is written to them yet
    for number in range(2):
        with closing(MoreFacts(file.parent)) as facts:
            assert facts.rows() == ROWS
            facts.note(f"note {number}")
    with closing(Facts(file.parent)) as facts:  # the version before goes on with it
        facts.remove(1)
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("UPDATE later SET note = 'another' WHERE note = 'note 1'")
    with pytest.raises(EdgeNodeError, match="damaged"):
        MoreFacts(file.parent)
