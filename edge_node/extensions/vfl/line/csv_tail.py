"""CSV files that grow while they are read: the rows of a sensor, the labels of a head.

Files are UTF-8 without a byte order mark and have a header, commas between cells, and one row on
each line. A row that cannot be used is left out as if it were not there, with a note for the first
one, the tenth, the hundredth and so on; but a bad first row is an error.
"""

import csv
import difflib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from broker_config.protocol.errors import EdgeNodeError, UsageError, abbreviate, suggest
from broker_config.storage import disk

# rows: so far apart may be two with the same product, two of one unit, a product at two sensors
MEMORY = 10_000
LONGEST_ID = 64  # characters, as in frames
_BLOCK = 1 << 20  # bytes read at once; no line is longer
_TAIL = 64  # bytes that are compared to notice another file of the same name

log = logging.getLogger(__name__)
Warn = Callable[[str], object]
"""Told about rows that are left out."""
Cells = Sequence[Sequence[str]]
"""Rows of a file, each with the chosen columns."""


class BadRowError(ValueError):
    """A row cannot be used: why, and what to do."""

    def __init__(self, why: str, remedy: str):
        super().__init__(why)
        self.why = why
        self.remedy = remedy


class CsvTail:
    """Reads each row of a CSV file once."""

    def __init__(
        self,
        path: Path,
        columns: Sequence[str],
        warn: Warn = log.warning,
        options: Mapping[str, str] | None = None,
    ):
        self.path = path
        self._options = options or {}  # column -> what names it on the command line
        self.left_out = 0  # rows
        self._columns = tuple(columns)
        self._warn = warn
        self._chosen: list[int] = []
        self._width = 0  # cells of a row; 0: the header has not been read
        self._good = False  # some row could be used
        self._line = 0  # lines that have been read
        self._offset = 0
        self._tail = b""
        self._file = (0, 0)
        # what tells whether there is news: as it was when all had been read
        self._seen: tuple[int, ...] | None = None

    def read(self, add: Callable[[Cells], None]) -> bool:
        """Hand `add` the rows that were appended since last time; True if there were any.

        `add` takes all the rows that it gets, or raises BadRowError and takes none. A line that
        does not end yet waits.

        Raises:
            EdgeNodeError: the file is not there, is another one than before, has no such columns,
                or a first row that cannot be used.
        """
        news = False
        while whole := self._appended():
            news |= self._parse_block(whole, add)
        return news

    def check_start(self, add: Callable[[Cells], None]) -> None:
        """Read the first rows only. EdgeNodeError as `read` raises it."""
        if whole := self._appended():
            self._parse_block(whole, add)

    def _parse_block(self, whole: bytes, add: Callable[[Cells], None]) -> bool:
        lines = whole.split(b"\n")[:-1]
        if not self._width:
            self._read_header(lines.pop(0))
        return self._add(lines, add)

    def _appended(self) -> bytes:
        """Whole lines after those that have been read."""
        if self._seen and self._seen == self._marks_now():
            return b""
        try:
            with disk.open_regular(self.path) as file:
                status = os.fstat(file.fileno())
                file.seek(self._offset - len(self._tail))
                data = file.read(len(self._tail) + _BLOCK)
        except FileNotFoundError:
            raise UsageError(
                f"there is no file {self.path}", "pass the path of a CSV file with a header"
            ) from None
        except OSError as error:
            why = abbreviate(error.strerror or str(error))
            raise UsageError(
                f"the rows or labels in {self.path} cannot be read: {why}",
                "make it a file that this user may read",
            ) from None
        if self._offset and (
            self._file != (status.st_dev, status.st_ino) or not data.startswith(self._tail)
        ):
            raise EdgeNodeError(
                f"{self.path} was replaced or got shorter while it was read",
                "append rows to the file; to go on with another file, start again",
            )
        self._file = status.st_dev, status.st_ino
        data = data[len(self._tail) :]
        self._seen = _marks(status) if len(data) < _BLOCK else None
        whole = data[: data.rfind(b"\n") + 1]
        if not whole and len(data) == _BLOCK:
            raise UsageError(
                f"line {self._line + 1} of {self.path} is longer than {_BLOCK} bytes",
                "write a row a line, ended by \\n",
            )
        self._offset += len(whole)
        self._tail = (self._tail + whole)[-_TAIL:]
        return whole

    def _marks_now(self) -> tuple[int, ...] | None:
        """Cheaper than reading: services look every few milliseconds."""
        with suppress(FileNotFoundError):
            return _marks(self.path.stat())
        return None

    def _read_header(self, line: bytes) -> None:
        self._line = 1
        try:
            [names] = csv.reader([line.decode()], strict=True)
        except (ValueError, csv.Error):
            raise UsageError(
                f"line 1 of {self.path} is no header of a CSV file in UTF-8",
                "save it as CSV, UTF-8, with commas",
            ) from None
        if names[0].startswith("\ufeff"):
            raise UsageError(
                f"{self.path} begins with a byte order mark", "save it as UTF-8 without BOM"
            )
        for mark, what in ((";", "semicolons"), ("\t", "tabs")):
            if len(names) == 1 and mark in names[0]:
                raise UsageError(
                    f"{self.path} has {what} between its columns",
                    "save it with commas, and points in numbers",
                )
        for column in self._columns:
            if names.count(column) != 1:
                wrong = "no column" if column not in names else "more than one column"
                raise UsageError(
                    f"line 1 of {self.path} has {wrong} {column!r}", self._remedy(column, names)
                )
        self._chosen = [names.index(column) for column in self._columns]
        self._width = len(names)

    def _remedy(self, column: str, names: Sequence[str]) -> str:
        if column in names or column not in self._options:
            return suggest(column, names)
        like = difflib.get_close_matches(column.lower(), [name.lower() for name in names], n=1)
        meant = next((name for name in names if name.lower() in like), names[0])
        if option := self._options[column]:
            return f"if it is {meant!r}, write {option} {meant!r}"
        return f"rename the column that has it to {column}; there are {', '.join(names)}"

    def _add(self, lines: Sequence[bytes], add: Callable[[Cells], None]) -> bool:
        """Add the next lines all at once, or else in halves:
        a bad one among thousands is soon found.
        """
        try:
            if cells := self._parse(lines):
                add(cells)
        except BadRowError as error:
            if len(lines) > 1:
                middle = len(lines) // 2
                return self._add(lines[:middle], add) | self._add(lines[middle:], add)
            self._line += 1
            self._leave_out(error)
            return False
        self._line += len(lines)
        self._good |= bool(cells)
        return bool(cells)

    def _parse(self, lines: Sequence[bytes]) -> Cells:
        try:
            rows = list(csv.reader([line.decode() for line in lines], strict=True))
        except UnicodeDecodeError:
            raise BadRowError("it is not UTF-8", "save the file as UTF-8") from None
        except csv.Error:
            raise BadRowError(
                "its quotes do not match", "close each quote in the line where it opens"
            ) from None
        if len(rows) != len(lines):  # a quote that a later line closed
            raise BadRowError(
                "its quotes do not match", "close each quote in the line where it opens"
            )
        if any(len(row) not in (0, self._width) for row in rows):
            count = next(len(row) for row in rows if len(row) not in (0, self._width))
            raise BadRowError(
                f"it has {count} cells, the header {self._width}",
                "write a cell for each column, with points in numbers",
            )
        found = []
        for row in rows:
            if row:
                found.append([row[place] for place in self._chosen])
        return found

    def _leave_out(self, error: BadRowError) -> None:
        where = f"line {self._line} of {self.path}"
        if not self._good:
            raise UsageError(f"{where} cannot be used: {error.why}", error.remedy)
        self.left_out += 1
        if self.left_out == 1:
            self._warn(f"{where} is left out, and so will be others like it: {error.why}")
        elif str(self.left_out).rstrip("0") == "1":
            self._warn(
                f"{self.left_out} rows of {self.path} are left out by now, the last of them line "
                f"{self._line}"
            )


def _marks(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class ProductIndex:
    """Products by the number of their row, counted from 0 over the whole file;
    the oldest can be forgotten.
    """

    def __init__(self) -> None:
        self.count = 0
        self._numbers: dict[str, int] = {}

    def add(self, products: Sequence[str]) -> None:
        """Number the next ones; BadRowError, and none is added,
        if one has no usable id or comes twice.
        """
        for product in products:
            if not 0 < len(product) <= LONGEST_ID:
                raise BadRowError(
                    f"the product {abbreviate(product)!r} has {len(product)} characters",
                    f"give it an id of 1 to {LONGEST_ID}",
                )
        known = self._numbers
        added = dict[str, int]()
        for number, product in enumerate(products, self.count):
            before = added.pop(product, None)
            if number - known.get(product, -MEMORY - 1) <= MEMORY or (
                before is not None and number - before <= MEMORY
            ):
                raise BadRowError(
                    f"the product {product!r} is there already",
                    "give each product an id of its own",
                )
            added[product] = number
        for product in added:
            known.pop(product, None)  # a very old one of the same id
        known.update(added)
        self.count += len(products)

    def row_of(self, product: str) -> int:
        """Of its row; -1 if it is unknown."""
        return self._numbers.get(product, -1)

    def rows_of(self, products: Iterable[str]) -> list[int]:
        """Of their rows; -1 for each that is unknown."""
        return [self._numbers.get(product, -1) for product in products]

    def since(self, number: int) -> list[str]:
        """Those from this row on, in order."""
        newest = takewhile(lambda each: self._numbers[each] >= number, reversed(self._numbers))
        return list(newest)[::-1]

    def drop_before(self, before: int) -> None:
        """Those of rows before this one."""
        for product in list(takewhile(lambda each: self._numbers[each] < before, self._numbers)):
            del self._numbers[product]
