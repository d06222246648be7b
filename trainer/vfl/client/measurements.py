"""Where a sensor's measurements are. Itself without torch."""

from pathlib import Path
from typing import NamedTuple

from edge.vfl.sensor_rows import Samples


class Source(NamedTuple):
    """A sensor's measurements."""

    path: Path  # CSV file with a row for each product; it may grow
    columns: tuple[str, ...]
    product: str = "product"
    unit: str | None = None  # column that says which rows follow one another

    def check(self) -> None:
        """Raise UsageError if the file is not there, has no such columns, or a first row that cannot be used."""
        Samples(self.path, self.columns, 1, self.unit, self.product, tell=lambda _: None).check_start()
