"""Masked contributions to an open round, of which only the sum can be read,
once the masks are taken away.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set

import numpy as np

from broker_config.protocol.errors import EdgeNodeError
from broker_config.protocol.messages import Spec
from broker_config.protocol.round_contents import is_statistics_round, masked_tensors
from trainer.federation.masking import LEAST_NODES, grid, scarce_classes
from trainer.federation.masking.masks import apply_masks
from trainer.federation.server.aggregation import with_totals
from trainer.federation.server.robust_rules import Source
from trainer.methods.base import Method
from trainer.models.named_tensors import Arrays


class MaskedContributions:
    """Masked contributions to an open round. Memory: one sum, modulo 2^32; of statistics, 2^64."""

    limited: Mapping[str, dict[str, float]] = {}  # nothing can be

    def __init__(self, spec: Spec, method: Method, round_: int):
        self._spec = spec
        self._method = method
        self._round = round_
        expected = masked_tensors(spec, round_)
        self._sums = {
            name: np.zeros(each.shape, np.dtype(each.dtype)) for name, each in expected.items()
        }
        self._contributors: set[str] = set()

    def weigh(self, raw: float) -> float:
        """All say 1, since weights are masked, too; ValueError if a node says otherwise."""
        if raw != 1:
            raise ValueError(
                f"weights are masked with secure aggregation, and this one is told: {raw!r}"
            )
        return 1.0

    def validate(self, source: Source) -> None:
        """Read a contribution through. Names and shapes are all that can be wrong with it."""
        for _ in source.tensors():
            pass

    def add(self, node: str, source: Source, weight: float) -> None:
        """Add a contribution that passed `validate`."""
        self.weigh(weight)
        for name, words in source.tensors():
            self._sums[name] += words
        self._contributors.add(node)

    def measure(self, broadcast: Arrays) -> None:
        """Nothing can be known of one contribution."""

    @property
    def contributors(self) -> Set[str]:
        """Nodes whose contributions are in."""
        return self._contributors

    def unmask(self, masks: Iterable[tuple[bytes, int]]) -> None:
        """Add masks that take those away which are in the sum."""
        self._sums = apply_masks(self._sums, masks)

    # As Contributions
    def aggregate(self, broadcast: Arrays, absent: Collection[str] = ()) -> Arrays:  # noqa: ARG002
        """The broadcast that follows this one, once no mask is in the sum.

        Raises:
            EdgeNodeError: no honest nodes have such a sum.
        """
        try:
            if is_statistics_round(self._spec, self._round):
                return self._read_statistics(broadcast)
            count = len(self._contributors)
            mean = grid.decode(self._sums, broadcast, self._spec.tensors, count)
        except ValueError as error:
            raise EdgeNodeError(
                f"the sum of round {self._round} is none of honest nodes: {error}",
                "at least one of them lies, and behind masks nobody can tell which: end this run "
                "with edge-node abort",
            ) from error
        return self._method.finish(broadcast, mean, count / self._spec.nodes)

    def _read_statistics(self, broadcast: Arrays) -> Arrays:
        """As that of `StatisticsContributions`; of single nodes' sums nothing was checked.

        ValueError for totals.
        """
        statistics = self._method.statistics
        assert statistics is not None
        statistics.check_totals(self._sums, len(self._contributors))
        begin = statistics.begin if self._round < self._spec.rounds else None
        return with_totals(self._spec, begin, broadcast, self._sums)


def check_holders(spec: Spec, held: Iterable[Iterable[int]]) -> None:
    """Raise EdgeNodeError if sums of statistics would tell of one plant or two;
    `held` are the classes of each.
    """
    if scarce := scarce_classes(held):
        raise scarce_error([spec.classes[label] for label in scarce])


def scarce_error(classes: Sequence[str]) -> EdgeNodeError:
    """The error of classes that some nodes have, and too few for a sum to hide them."""
    return EdgeNodeError(
        f"fewer than {LEAST_NODES} nodes have images of {', '.join(classes)}, and what is summed "
        "of such a class would tell of single plants",
        "let more plants label such images, or those leave them out; or sum without "
        "--secure-aggregation",
    )
