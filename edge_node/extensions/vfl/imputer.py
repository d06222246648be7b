"""Imputation of absent sensors' embeddings from those of the others:
ridge regression for any pattern of absence.

One second moment of (1, all embeddings) is kept and forgotten bit by bit, since embeddings move
while models learn. Every pattern's regression is solved from it when it is asked for.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from broker_config.protocol.errors import UsageError

LARGEST = 4096  # numbers of all embeddings: the moment has their square, 8 bytes each
_RIDGE = 1e-3  # of the present embeddings' mean variance: dead features and copies do no harm
_FORGETTING = 0.95  # of the past, a round


class Regression(NamedTuple):
    """Fills one pattern: embeddings [N, D] beside one another, absent ones finite,
    -> embeddings @ matrix + offset.
    """

    matrix: Tensor  # float32 [D, D]: the identity from present to present, zero rows of absent
    offset: Tensor  # float32 [D]


class Imputer:
    """Learns in rounds that have all sensors, fills in others.

    Embeddings are those that the head works with, denoised.
    """

    def __init__(self, sizes: Sequence[int]):
        if sum(sizes) > LARGEST:
            raise UsageError(
                f"embeddings of {sum(sizes)} numbers are too long to learn how to impute them",
                f"take a network with {LARGEST} at most over all sensors, or absent=last",
            )
        self._sizes = tuple(sizes)
        # [D] sensor
        self._owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(self._sizes))
        self._moment = torch.zeros(1 + sum(sizes), 1 + sum(sizes), dtype=torch.float64)
        self._solved: dict[tuple[bool, ...], Regression] = {}

    def update(self, embeddings: Sequence[Tensor]) -> None:
        """A round's rows [N, D_k] that all sensors have."""
        rows = torch.cat(list(embeddings), 1).double()
        if len(rows):
            rows = torch.cat([torch.ones(len(rows), 1, dtype=rows.dtype), rows], 1)
            self._moment = _FORGETTING * self._moment + rows.T @ rows / len(rows)
            self._solved.clear()

    def impute(self, embeddings: Sequence[Tensor | None], n: int) -> list[Tensor]:
        """Embeddings [n, D_k] of all sensors: those that are there as they are,
        the others as the regression has them.

        Their means if none is there; zeros before anything was learnt.
        """
        present = torch.tensor([each is not None for each in embeddings]).expand(n, -1)
        whole = []
        for each, size in zip(embeddings, self._sizes, strict=True):
            embedding = torch.zeros(n, size) if each is None else each
            whole.append(embedding)
        return self.impute_rows(whole, present)

    def impute_rows(self, embeddings: Sequence[Tensor], present: Tensor) -> list[Tensor]:
        """As `fill`, row by row: `present` bool [N, K] says which embeddings [N, D_k] are there."""
        filled = torch.cat(list(embeddings), 1).clone()
        patterns, of_row = torch.unique(present, dim=0, return_inverse=True)
        for number, pattern in enumerate(patterns):
            if not pattern.all():
                rows = of_row == number
                absent = ~pattern[self._owner]
                matrix, offset = self.regression(pattern.tolist())
                there = filled[rows].masked_fill(absent, 0.0)
                filled[rows] = torch.where(absent, there @ matrix + offset, there)
        return list(torch.split(filled, list(self._sizes), 1))

    def regression(self, pattern: Sequence[bool]) -> Regression:
        """Of a pattern of presence: one bool for each sensor."""
        key = tuple(pattern)
        if key not in self._solved:
            self._solved[key] = self._solve(torch.tensor(key)[self._owner])
        return self._solved[key]

    def _solve(self, there: Tensor) -> Regression:
        # of all rounds that count; 0 before the first
        weight = self._moment[0, 0].clamp(min=1e-300)
        mean = self._moment[0, 1:] / weight
        covariance = self._moment[1:, 1:] / weight - torch.outer(mean, mean)
        known = covariance[there][:, there]
        matrix = torch.diag(there.double())
        offset = torch.where(there, 0.0, mean)
        if there.any():
            ridge = _RIDGE * known.diagonal().mean() + 1e-12
            slopes = torch.linalg.solve(
                known + ridge * torch.eye(len(known)), covariance[there][:, ~there]
            )
            matrix[there.nonzero(), (~there).nonzero().T] = slopes
            offset[~there] -= mean[there] @ slopes
        return Regression(matrix.float(), offset.float())

    def state(self) -> dict[str, Tensor]:
        """All that was learnt."""
        return {"moment": self._moment}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""
        self._moment = state["moment"]
        self._solved.clear()
