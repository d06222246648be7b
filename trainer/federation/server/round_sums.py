"""Contributions to an open round: exact sums for the mean and of statistics;
for other rules, files to read again.

Relayed tensors are kept unchanged under every rule.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Set

import numpy as np

from broker_config.protocol.codec import Rows
from broker_config.protocol.messages import Spec
from broker_config.protocol.round_contents import contribution_tensors, is_statistics_round
from trainer.federation.server.aggregation import (
    FixedPointSum,
    Influence,
    IntegerSum,
    clipped_mean,
    measure_updates,
    with_totals,
)
from trainer.federation.server.masked_sums import MaskedContributions
from trainer.federation.server.robust_rules import RULES, Source, aggregate
from trainer.methods.base import Method, Statistics
from trainer.models.named_tensors import Arrays, select


class Contributions:
    """Contributions to an open round in which nodes train.

    Memory: one sum, if any, and the relayed tensors.
    """

    def __init__(self, spec: Spec, method: Method, round_: int):
        self._spec = spec
        self._method = method
        summed = {
            n: each
            for n, each in contribution_tensors(spec, round_).items()
            if n not in spec.relays
        }
        self._sums = FixedPointSum(summed, spec.nodes, method.weight_cap)
        self._sources: dict[str, Source] = {}
        self._weights: dict[str, float] = {}
        self._influences: dict[str, Influence] = {}  # of those that are measured so far
        self._relayed: dict[str, Arrays] = {}  # by node
        # how much counts of what the rule has limited, by node
        self.limited: dict[str, dict[str, float]] = {}

    def weigh(self, raw: float) -> float:
        """The weight of a contribution whose node measured `raw`;
        ValueError if it cannot be honest.
        """
        return self._method.weigh(raw)

    def validate(self, source: Source) -> None:
        """Validate a contribution by reading it through.

        Raises:
            ValueError: a value is beyond the range that the federation's scales leave, a variance
                is negative, or what is to be relayed is not what an honest node sends.
        """
        sent = self._sent(source)
        summed = sent if self._method.only_mean else _with_variances(sent)
        self._sums.validate(summed)
        if self._method.relay is not None:
            self._method.relay.check(self._relays(source), len(self._spec.classes))

    def add(self, node: str, source: Source, weight: float) -> None:
        """Add a contribution that passed `validate`, with the weight that its node measured."""
        self._weights[node] = self.weigh(weight)  # first: it refuses what cannot be honest
        self._sources[node] = source
        self._relayed[node] = self._relays(source)
        if self._spec.aggregation.rule == "mean":
            self._sums.add(self._sent(source), self._weights[node])

    def measure(self, broadcast: Arrays) -> None:
        """Find out now, while others are awaited, what a rule has to know of each before it can
        combine them.
        """
        if self._spec.aggregation.rule == "clipped_mean":
            sent = select(broadcast, self._spec.sends)
            for node in self._sources.keys() - self._influences.keys():
                updates = (
                    (name, values) for name, values in self._sources[node].tensors() if name in sent
                )
                self._influences[node] = Influence(
                    self._weights[node], measure_updates(updates, sent)
                )

    @property
    def contributors(self) -> Set[str]:
        """Nodes whose contributions are in."""
        return self._sources.keys()

    def aggregate(self, broadcast: Arrays, absent: Collection[str] = ()) -> Arrays:
        """The broadcast that follows this one; `absent` were to contribute to the round and have
        not.
        """
        following = self._method.finish(
            broadcast, self._combine(broadcast), len(self._sources) / self._spec.nodes
        )
        relay = self._method.relay
        return (
            {**following, **relay.merge(broadcast, self._relayed, absent)} if relay else following
        )

    def _combine(self, broadcast: Arrays) -> Arrays:
        rule = self._spec.aggregation
        sent = select(broadcast, self._spec.sends)
        if rule.rule in RULES:
            return aggregate(rule, self._sources, sent)
        if rule.rule == "clipped_mean":
            self.measure(broadcast)
            mean, counted = clipped_mean(self._sums, self._sources, self._influences, sent)
            self.limited = {
                node: shares for node, shares in counted.items() if min(shares.values()) < 1
            }
            return mean
        return self._sums.mean()

    def _sent(self, source: Source) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors that become part of the model."""
        return (
            (name, values) for name, values in source.tensors() if name not in self._spec.relays
        )

    def _relays(self, source: Source) -> Arrays:
        """The tensors that are relayed."""
        return {
            name: source.read([Rows(name, 0, tensor.shape[0])]).reshape(tensor.shape)
            for name, tensor in self._spec.relays.items()
        }


class StatisticsContributions:
    """Contributions to the open round in which nodes send statistics.

    Memory: their sum, and one that is validated.
    """

    limited: Mapping[str, dict[str, float]] = {}  # nothing is

    def __init__(self, spec: Spec, statistics: Statistics, round_: int):
        self._spec = spec
        self._statistics = statistics
        self._begin = statistics.begin if round_ < spec.rounds else None
        self._sum = IntegerSum(spec.statistics, spec.nodes)
        self._contributors: set[str] = set()

    def weigh(self, raw: float) -> float:
        """All weigh 1; ValueError if a node claims otherwise."""
        if raw != 1:
            raise ValueError(f"the statistics of all nodes weigh 1, not {raw!r}")
        return 1.0

    def validate(self, source: Source) -> None:
        """Validate a contribution by reading it through.

        Raises:
            ValueError: an honest node does not send it, or the sum might overflow.
        """
        arrays = dict(source.tensors())
        self._sum.validate(arrays.items())
        self._statistics.check(arrays, len(self._spec.classes))

    def add(self, node: str, source: Source, weight: float) -> None:
        """Add a contribution that passed `validate`."""
        self.weigh(weight)
        self._sum.add(source.tensors())
        self._contributors.add(node)

    def measure(self, broadcast: Arrays) -> None:
        """Nothing has to be known of statistics before they can be added."""

    @property
    def contributors(self) -> Set[str]:
        """Nodes whose contributions are in."""
        return self._contributors

    # As Contributions
    def aggregate(self, broadcast: Arrays, absent: Collection[str] = ()) -> Arrays:  # noqa: ARG002
        """What training begins with or, after it, the run's result: the broadcast,
        unchanged, and the totals.
        """
        return with_totals(self._spec, self._begin, broadcast, self._sum.totals)


RoundContributions = Contributions | StatisticsContributions | MaskedContributions


def collect(spec: Spec, method: Method, round_: int) -> RoundContributions:
    """A round that is open and has no contributions yet."""
    if spec.mask_threshold:
        return MaskedContributions(spec, method, round_)
    if is_statistics_round(spec, round_):
        assert method.statistics is not None
        return StatisticsContributions(spec, method.statistics, round_)
    return Contributions(spec, method, round_)


def _with_variances(tensors: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    for name, values in tensors:
        if name.endswith("running_var") and values.min(initial=0) < 0:
            raise ValueError(f"tensor {name} holds a negative variance")
        yield name, values
