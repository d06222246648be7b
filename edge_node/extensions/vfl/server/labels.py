"""Labels of products, the head's own data: products in the order of their arrival,
and their classes.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from broker_config.protocol.errors import suggest
from edge_node.extensions.vfl.line.csv_tail import (
    MEMORY,
    BadRowError,
    Cells,
    CsvTail,
    ProductIndex,
    Warn,
    log,
)


class Labels:
    """Labels of products in a CSV file that grows.

    A product's position is that of its row among the usable ones.

    Positions must not change: a head that starts again needs the file from its beginning.
    """

    def __init__(
        self,
        path: Path,
        classes: Sequence[str],
        product: str = "product",
        label: str = "label",
        warn: Warn = log.warning,
    ):
        self.path = path
        self._file = CsvTail(path, [product, label], warn, dict.fromkeys((product, label), ""))
        self._classes = {name: number for number, name in enumerate(classes)}
        self._known = ProductIndex()
        self._first = 0  # position of the oldest that is kept
        self._products: list[str] = []
        self._labels: list[int] = []

    def refresh(self) -> bool:
        """Read what was appended to the file since last time; True if there is news.

        EdgeNodeError: see GrowingFile.
        """
        return self._file.read(self._add)

    @property
    def count(self) -> int:
        """Products that there are, forgotten ones included."""
        return self._known.count

    def products(self, first: int, last: int) -> tuple[str, ...]:
        """Those at positions [first, last), as far as there are any.

        IndexError if they are forgotten.
        """
        return tuple(self._products[self._span(first, last)])

    def labels(self, first: int, last: int) -> NDArray[np.int64]:
        """Numbers of their classes, int64 [n]; positions as for `products`."""
        return np.array(self._labels[self._span(first, last)], np.int64)

    def drop_before(self, before: int) -> None:
        """Drop what is known of earlier positions, to bound memory."""
        dropped = max(0, min(before, self.count) - self._first)
        del self._products[:dropped], self._labels[:dropped]
        self._first += dropped
        # ids stay: what is a duplicate follows from the file alone
        self._known.drop_before(self.count - MEMORY)

    def _span(self, first: int, last: int) -> slice:
        if first < self._first:
            raise IndexError(f"positions before {self._first} are forgotten")
        return slice(first - self._first, last - self._first)

    def _add(self, cells: Cells) -> None:
        numbers = []
        for _, label in cells:
            number = self._classes.get(label.strip())
            if number is None:
                raise BadRowError(
                    f"there is no class {label[:40]!r}", suggest(label.strip(), self._classes)
                )
            numbers.append(number)
        products = [product.strip() for product, _ in cells]
        self._known.add(products)
        self._products += products
        self._labels += numbers
