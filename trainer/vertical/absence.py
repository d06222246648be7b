"""What stands for embeddings that a round lacks (`absent`: last or impute)."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.vertical.exchange import Arrived


class _Last(NamedTuple):
    first: int  # position of the first row
    values: Tensor  # [N, D]
    real: Tensor  # bool [N]: that the sensor has sent


class Absence:
    """Remembers each sensor's embeddings of the last round that it took part in."""

    def __init__(self, sizes: Mapping[str, int]):
        self._sizes = sizes
        self._last: dict[str, _Last] = {}

    def filled(self, first: int, count: int, arrived: Mapping[str, Arrived]) -> list[Tensor]:
        """Embeddings [N, D_k] of all sensors for the products from position `first` on, as received or in their place:
        a product's last one of that sensor, else the mean of those.
        """
        return [self._filled(name, first, count, arrived.get(name)) for name in self._sizes]

    def _filled(self, name: str, first: int, count: int, arrived: Arrived | None) -> Tensor:
        real = torch.zeros(count, dtype=torch.bool)
        if arrived is not None:
            real[:] = True
            real[sorted(arrived.missing)] = False
            if not arrived.missing:
                self._last[name] = _Last(first, arrived.received, real)
                return arrived.received
        values = self._remembered(name, first, count)
        if arrived is not None:
            values[real] = arrived.received[real]
            self._last[name] = _Last(first, values, real)
        return values

    def _remembered(self, name: str, first: int, count: int) -> Tensor:
        values = torch.zeros(count, self._sizes[name])
        last = self._last.get(name)
        if last is None or not last.real.any():
            return values
        values[:] = last.values[last.real].mean(0)
        ahead = first - last.first  # rows of `last` that lie before the window; below 0 after going back
        mine, theirs = slice(max(0, -ahead), None), slice(max(0, ahead), None)
        common = min(count - (mine.start or 0), len(last.values) - (theirs.start or 0))
        if common > 0:
            rows = last.real[theirs][:common]
            values[mine][:common][rows] = last.values[theirs][:common][rows]
        return values


def whole(arrived: Mapping[str, Arrived], sensors: Sequence[str]) -> bool:
    """Whether nothing stands for anything else."""
    return all(name in arrived and not arrived[name].missing for name in sensors)
