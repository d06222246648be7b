"""Contributions to an open round: exact sums for the mean; for other rules, files to read again.

Relayed tensors are kept unchanged under every rule.
"""

from collections.abc import Collection, Iterable, Iterator, Set

import numpy as np

from broker_config.protocol.codec import Rows
from broker_config.protocol.messages import Spec
from trainer.federation.server.aggregation import FixedPointSum
from trainer.federation.server.robust_rules import Source, aggregate
from trainer.methods.base import Method
from trainer.models.named_tensors import Arrays, select


class Contributions:
    """Contributions to one open round. Memory is that of one sum, if any, and of the relayed tensors."""

    def __init__(self, spec: Spec, method: Method):
        self._spec, self._method = spec, method
        self._sums = FixedPointSum(select(spec.tensors, spec.sends), spec.nodes, method.weight_cap)
        self._sources: dict[str, Source] = {}
        self._relayed: dict[str, Arrays] = {}  # by node

    def validate(self, source: Source) -> None:
        """Validate a contribution by reading it through.

        Raises:
            ValueError: a value is beyond the range that the federation's scales leave, a variance is negative, or what
                is to be relayed is not what an honest node sends.
        """
        sent = self._sent(source)
        self._sums.validate(sent if self._method.only_mean else _with_variances(sent))
        if self._method.relay is not None:
            self._method.relay.check(self._relays(source), len(self._spec.classes))

    def add(self, node: str, source: Source, weight: float) -> None:
        """Add a contribution that passed `validate`, with the weight that its node measured."""
        self._sources[node] = source
        self._relayed[node] = self._relays(source)
        if self._spec.aggregation.rule == "mean":
            self._sums.add(self._sent(source), self._method.weigh(weight))

    @property
    def contributors(self) -> Set[str]:
        """Nodes whose contributions are in."""
        return self._sources.keys()

    def aggregate(self, broadcast: Arrays, absent: Collection[str] = ()) -> Arrays:
        """The broadcast that follows this one; `absent` were to contribute to the round and have not."""
        rule = self._spec.aggregation
        sent = select(broadcast, self._spec.sends)
        combined = self._sums.mean() if rule.rule == "mean" else aggregate(rule, self._sources, sent)
        following = self._method.finish(broadcast, combined, len(self._sources) / self._spec.nodes)
        relay = self._method.relay
        return {**following, **relay.merge(broadcast, self._relayed, absent)} if relay else following

    def _sent(self, source: Source) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors that become part of the model."""
        return ((name, values) for name, values in source.tensors() if name not in self._spec.relays)

    def _relays(self, source: Source) -> Arrays:
        """The tensors that are relayed."""
        return {
            name: source.read([Rows(name, 0, tensor.shape[0])]).reshape(tensor.shape)
            for name, tensor in self._spec.relays.items()
        }


def _with_variances(tensors: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    for name, values in tensors:
        if name.endswith("running_var") and values.min(initial=0) < 0:
            raise ValueError(f"tensor {name} holds a negative variance")
        yield name, values
