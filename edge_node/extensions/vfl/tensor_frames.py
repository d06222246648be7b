"""Conversion of a round's tensors to frames of about `frames.PART` bytes, and back."""

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edge_node.extensions.vfl.algorithm import Representation
from edge_node.extensions.vfl.frames import PART, Embeddings, Graded, Opened, Represented

_IDS = 4000  # products in a frame
_LARGEST = 1e6  # number that can be meant: far beyond it who computes with it ends at infinity


class OutOfScaleError(ValueError):
    """Numbers that a party sends only if its training has diverged,
    or its readings are out of scale.
    """


class RowBuffer:
    """Rows float32 [count, width] that arrive in parts: in any order,
    some of them perhaps twice.
    """

    def __init__(self, count: int, width: int):
        self.tensor = torch.zeros(count, width)
        self._values = self.tensor.numpy()
        self._there = np.zeros(count, bool)

    @property
    def complete(self) -> bool:
        """Whether each row has arrived."""
        return bool(self._there.all())

    @property
    def there(self) -> int:
        """The number that have arrived."""
        return int(np.count_nonzero(self._there))

    def put(self, row: int, data: bytes) -> int:
        """Take rows from `row` on; returns how many. ValueError says why these cannot be."""
        count, width = self._values.shape
        if not data or len(data) % (4 * width):
            raise ValueError(f"{len(data)} bytes are no rows of {width} numbers")
        values = np.frombuffer(data, "<f4").reshape(-1, width)
        if row + len(values) > count:
            raise ValueError(f"rows {row} to {row + len(values)} of {count}")
        if not isfinite(largest := np.abs(values).max()):  # as it is if any of them is NaN
            raise OutOfScaleError("it holds NaN or infinity")
        if largest > _LARGEST:
            raise OutOfScaleError(f"it holds a number as large as {largest:.3g}")
        self._values[row : row + len(values)] = values
        self._there[row : row + len(values)] = True
        return len(values)


def to_bytes(tensor: Tensor) -> bytes:
    """Little-endian float32, row after row."""
    return tensor.detach().contiguous().numpy().astype("<f4", copy=False).tobytes()


def opening_frames(
    first: int, last: int, since: int, products: Sequence[str], **frame: Any
) -> Iterator[Opened]:
    """The frames that open a round; each has a part of the products,
    the first of which has the position `since`.
    """
    parts = max(1, -(-len(products) // _IDS))
    for part in range(parts):
        ids = tuple(products[part * _IDS : (part + 1) * _IDS])
        yield Opened(
            first=first,
            last=last,
            since=since + part * _IDS,
            products=ids,
            part=part,
            parts=parts,
            **frame,
        )


def embedding_frames(
    received: Tensor, second: Tensor | None, missing: Sequence[int], **frame: Any
) -> Iterator[Embeddings]:
    """The frames that leave a sensor: tensors [N, D],
    and the rows that stand for products that it has no sample of.
    """
    copies = 1 if second is None else 2
    for part, parts, rows in _parts(len(received), 4 * copies * received.shape[1]):
        second_or_empty = b"" if second is None else to_bytes(second[rows])
        yield Embeddings(
            row=rows.start,
            received=to_bytes(received[rows]),
            second=second_or_empty,
            missing=tuple(row - rows.start for row in missing if rows.start <= row < rows.stop),
            part=part,
            parts=parts,
            **frame,
        )


def representation_frames(
    phi: Representation, labels: Tensor, iterations: Sequence[int], **frame: Any
) -> Iterator[Represented]:
    """The frames that every sensor gets where labels are shared."""
    head = to_bytes(phi.head["weight"]) + to_bytes(phi.head["bias"])
    width = sum(each.shape[1] for each in phi.embeddings)
    codes = labels.numpy().astype("<u2")
    for part, parts, rows in _parts(len(labels), 4 * width + 2):
        prefix = b"" if part else head
        yield Represented(
            row=rows.start,
            head=prefix,
            embeddings=tuple(to_bytes(each[rows]) for each in phi.embeddings),
            labels=codes[rows].tobytes(),
            iterations=tuple(iterations),
            part=part,
            parts=parts,
            **frame,
        )


def gradient_frames(
    gradient: Tensor, curvature: float, iterations: int, **frame: Any
) -> Iterator[Graded]:
    """The frames that one sensor gets where labels stay at the head."""
    for part, parts, rows in _parts(len(gradient), 4 * gradient.shape[1]):
        yield Graded(
            row=rows.start,
            gradient=to_bytes(gradient[rows]),
            curvature=curvature,
            iterations=iterations,
            part=part,
            parts=parts,
            **frame,
        )


class RepresentationBuffer:
    """Represented as it arrives: of `count` products, for sensors with so wide embeddings,
    and for so many classes.
    """

    def __init__(self, count: int, sizes: Sequence[int], classes: int):
        self._sensors = len(sizes)
        self._classes = classes
        self._rows = [RowBuffer(count, size) for size in sizes]
        self._labels = torch.zeros(count, dtype=torch.int64)
        self._head: dict[str, Tensor] = {}
        self.iterations: tuple[int, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether each row has arrived, and the head's weights."""
        return bool(self._head) and all(rows.complete for rows in self._rows)

    def put(self, frame: Represented) -> None:
        """Take in a frame; ValueError says why it cannot be."""
        if len(frame.embeddings) != self._sensors or len(frame.iterations) != self._sensors:
            raise ValueError(f"it is for {len(frame.embeddings)} sensors, not {self._sensors}")
        if not frame.labels or len(frame.labels) % 2:
            raise ValueError(f"{len(frame.labels)} bytes are no labels")
        labels = np.frombuffer(frame.labels, "<u2").astype(np.int64)
        taken = {
            rows.put(frame.row, data)
            for rows, data in zip(self._rows, frame.embeddings, strict=True)
        }
        if taken != {len(labels)} or labels.max() >= self._classes:
            raise ValueError("its labels and its embeddings do not belong together")
        self._labels[frame.row : frame.row + len(labels)] = torch.from_numpy(labels)
        if frame.part == 0:
            self._head = self._read_head(frame.head)
            self.iterations = frame.iterations

    @property
    def whole(self) -> tuple[Representation, Tensor]:
        """What the sensor learns from, and labels int64 [N]."""
        return Representation(self._head, tuple(rows.tensor for rows in self._rows)), self._labels

    def _read_head(self, data: bytes) -> dict[str, Tensor]:
        classes = self._classes
        width = sum(rows.tensor.shape[1] for rows in self._rows)
        values = RowBuffer(1, classes * (width + 1))
        values.put(0, data)
        weight = values.tensor[0, : classes * width]
        bias = values.tensor[0, classes * width :]
        return {"weight": weight.reshape(classes, width), "bias": bias}


class GradientBuffer:
    """Graded as it arrives: of `count` products, whose embeddings have `size` numbers."""

    def __init__(self, count: int, size: int):
        self._rows = RowBuffer(count, size)
        self.curvature = 0.0
        self.iterations = 0

    @property
    def complete(self) -> bool:
        """Whether each row has arrived."""
        return self._rows.complete

    def put(self, frame: Graded) -> None:
        """Take in a frame; ValueError says why it cannot be."""
        self._rows.put(frame.row, frame.gradient)
        self.curvature = frame.curvature
        self.iterations = frame.iterations

    @property
    def whole(self) -> Tensor:
        """Float32 [N, D]."""
        return self._rows.tensor


Reply = RepresentationBuffer | GradientBuffer
"""What the head sends back to a sensor, as it arrives."""


def _parts(count: int, width: int) -> Iterator[tuple[int, int, slice]]:
    """Number, how many there are, and rows of each part of `count` rows that take `width` bytes
    each.
    """
    size = max(1, PART // width)
    parts = max(1, -(-count // size))
    for part in range(parts):
        yield part, parts, slice(part * size, min(count, (part + 1) * size))
