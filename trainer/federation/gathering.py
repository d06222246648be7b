"""What was contributed to an open round: exact sums for the mean; for other rules, where to read it again."""

from collections.abc import Iterable, Iterator

import numpy as np

from broker_config.messages import Spec
from trainer.federation.aggregate import FixedPointSum
from trainer.federation.robust import Source, aggregate
from trainer.methods.base import Method
from trainer.tree import Arrays, pick


class Gathering:
    """One open round. Memory is that of one sum, or none."""

    def __init__(self, spec: Spec, method: Method):
        self._spec, self._method = spec, method
        self._sums = FixedPointSum(pick(spec.tensors, spec.sends), spec.nodes, method.weight_cap)
        self._sources: dict[str, Source] = {}

    def check(self, source: Source) -> None:
        """Read through a contribution.

        Raises:
            ValueError: a value is beyond the range that the federation's scales leave, or a variance is negative.
        """
        tensors = source.tensors()
        self._sums.check(tensors if self._method.only_mean else _with_variances(tensors))

    def add(self, node: str, source: Source, weight: float) -> None:
        """Take in a contribution that passed `check`, and the weight that its node measured."""
        self._sources[node] = source
        if self._spec.aggregation.rule == "mean":
            self._sums.add(source.tensors(), self._method.weigh(weight))

    def close(self, broadcast: Arrays) -> Arrays:
        """The broadcast that follows this one."""
        rule = self._spec.aggregation
        sent = pick(broadcast, self._spec.sends)
        combined = self._sums.mean() if rule.rule == "mean" else aggregate(rule, self._sources, sent)
        return self._method.finish(broadcast, combined, len(self._sources) / self._spec.nodes)


def _with_variances(tensors: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    for name, values in tensors:
        if name.endswith("running_var") and values.min(initial=0) < 0:
            raise ValueError(f"tensor {name} holds a negative variance")
        yield name, values
