"""Substitutes for embeddings that a round lacks, by the rule of the federation (`absent`)."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from edge_node.extensions.vfl.imputer import Imputer


class AbsenceRule(Protocol):
    """A way to substitute absent embeddings; its state is kept with the head's model."""

    def substitute(self, first: int, embeddings: Sequence[Tensor], present: Tensor) -> list[Tensor]:
        """Return denoised embeddings [N, D_k] of the products from position `first` on,
        without gaps.

        `present`, bool [N, K], says which of them have arrived.
        """
        ...

    def state(self) -> dict[str, Tensor]:
        """What `restore` takes."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` gave."""
        ...


class _Seen(NamedTuple):
    first: int  # position of the first row
    values: Tensor  # [N, D]
    real: Tensor  # bool [N]: that the sensor has sent


class LastEmbedding:
    """A product's last embedding of that sensor,
    else the mean of those in the last round that had any; else zeros.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def substitute(self, first: int, embeddings: Sequence[Tensor], present: Tensor) -> list[Tensor]:
        """See AbsenceRule."""
        return [
            self._substitute_column(sensor, first, each, present[:, sensor])
            for sensor, each in enumerate(embeddings)
        ]

    def _substitute_column(self, sensor: int, first: int, values: Tensor, real: Tensor) -> Tensor:
        if not real.all():
            values = torch.where(real[:, None], values, self._recall(sensor, first, values))
        if real.any():
            self._seen[sensor] = _Seen(first, values, real)
        return values

    def _recall(self, sensor: int, first: int, like: Tensor) -> Tensor:
        filled = torch.zeros_like(like)
        if seen := self._seen.get(sensor):
            filled[:] = seen.values[seen.real].mean(0)
            # where they are in what was seen
            rows = torch.arange(first, first + len(like)) - seen.first
            inside = (rows >= 0) & (rows < len(seen.values))
            inside[inside.clone()] = seen.real[rows[inside]]
            filled[inside] = seen.values[rows[inside]]
        return filled

    def state(self) -> dict[str, Tensor]:
        """See AbsenceRule."""
        values: dict[str, Tensor] = {}
        for sensor, seen in self._seen.items():
            for name, value in seen._asdict().items():
                values[f"{sensor}.{name}"] = torch.as_tensor(value).clone()
        return values

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """See AbsenceRule."""
        sensors = {int(name.split(".")[0]) for name in state}
        self._seen = {
            sensor: _Seen(
                int(state[f"{sensor}.first"]), state[f"{sensor}.values"], state[f"{sensor}.real"]
            )
            for sensor in sensors
        }


class ImputedEmbedding:
    """A regression on the other sensors' embeddings, fitted to rows that all sensors have."""

    def __init__(self, sizes: Sequence[int]):
        self.imputer = Imputer(sizes)

    def substitute(
        self,
        first: int,  # noqa: ARG002
        embeddings: Sequence[Tensor],
        present: Tensor,
    ) -> list[Tensor]:
        """See AbsenceRule."""
        everywhere = present.all(1)
        self.imputer.update([each[everywhere] for each in embeddings])
        return self.imputer.impute_rows(embeddings, present)

    def state(self) -> dict[str, Tensor]:
        """See AbsenceRule."""
        return self.imputer.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """See AbsenceRule."""
        self.imputer.restore(state)


def make_absence_rule(absent: str, sizes: Sequence[int]) -> AbsenceRule | None:
    """A new instance of the rule; None if rounds wait for every sensor."""
    match absent:
        case "last":
            return LastEmbedding()
        case "impute":
            return ImputedEmbedding(sizes)
    return None
