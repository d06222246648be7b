"""The batched engine: the nodes of a federation that have equally many images train at once,
on one device.

Their tensors are stacked, [nodes, ...]; a method's losses, written for one node, are mapped over
the stack by `torch.func.vmap`; one optimiser call moves all. Random numbers are each node's own, as
alone. Results agree with the plain engine's to rounding, not bit for bit. It pays where starting an
operation costs more than its arithmetic: on GPUs.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

import torch

from broker_config.protocol.round_contents import is_statistics_round
from trainer.data.training_set import TrainingSet
from trainer.methods.base import Metrics, Phase
from trainer.models.named_tensors import Arrays
from trainer.models.network import Tensors
from trainer.training.engine import descend
from trainer.training.participant import Contributed, Participant, State

MAX_GROUP_NODES = 32  # nodes in a group: its activations are all in memory at once


class NodeGroup:
    """Nodes that train together; one alone trains on the plain engine."""

    def __init__(self, participants: Sequence[Participant]):
        self._participants = participants
        self.nodes = [participant.node for participant in participants]

    def start(self, broadcast: Arrays) -> list[State]:
        """Each node's state before the first round."""
        return [participant.start(broadcast) for participant in self._participants]

    def contribute(
        self, states: Sequence[State], broadcast: Arrays, round_: int
    ) -> list[tuple[State, Contributed, Metrics]]:
        """Stage 1 of each node, as `Participant.contribute`."""
        first = self._participants[0]
        if self._train_separately(round_):
            return [
                own.contribute(state, broadcast, round_)
                for own, state in zip(self._participants, states, strict=True)
            ]
        received = first.tensors(broadcast)
        states = [
            own.receive(state, received)
            for own, state in zip(self._participants, states, strict=True)
        ]
        states, metrics = self._run(first.method.train, states, received, round_)
        states = [
            own.adapt(state, received)
            for own, state in zip(self._participants, states, strict=True)
        ]
        return [
            (state, own.send(state, received, measured, round_), measured)
            for own, state, measured in zip(self._participants, states, metrics, strict=True)
        ]

    def refine(
        self, states: Sequence[State], broadcast: Arrays, round_: int
    ) -> list[tuple[State, Metrics]]:
        """Stage 2 of each node, as `Participant.refine`."""
        first = self._participants[0]
        if self._train_separately(round_):
            return [
                own.refine(state, broadcast, round_)
                for own, state in zip(self._participants, states, strict=True)
            ]
        received = first.tensors(broadcast)
        states, metrics = self._run(first.method.refine, states, received, round_)
        return [
            (state, measured | own.evaluate_round(state, received, round_))
            for own, state, measured in zip(self._participants, states, metrics, strict=True)
        ]

    def _train_separately(self, round_: int) -> bool:
        """Whether there is nothing to stack: one node, or a round in which nothing is trained."""
        return len(self.nodes) == 1 or is_statistics_round(self._participants[0].spec, round_)

    def _run(
        self, phases: Sequence[Phase], states: Sequence[State], received: Tensors, round_: int
    ) -> tuple[Sequence[State], list[Metrics]]:
        torch.set_num_threads(self._participants[0].spec.threads)
        metrics: list[Metrics] = [{} for _ in states]
        for phase in phases:
            train = self._train if _take_equal_steps(phase, states) else self._train_one_by_one
            trained = train(phase, states, received, round_)
            states = [state for state, _ in trained]
            metrics = [
                known | measured for known, (_, measured) in zip(metrics, trained, strict=True)
            ]
        return states, metrics

    def _train(
        self, phase: Phase, states: Sequence[State], received: Tensors, round_: int
    ) -> list[tuple[State, Metrics]]:
        first = self._participants[0]
        data = [participant.training_set(received) for participant in self._participants]
        tensors, moments, steps, metrics = descend(
            first.network,
            phase,
            _stack([state.tensors for state in states]),
            _stack([state.moments for state in states]),
            received,
            TrainingSet.joined(data),
            first.spec.training,
            [participant.seed(round_, phase) for participant in self._participants],
        )
        results: list[tuple[State, Metrics]] = []
        for node in range(len(states)):
            results.append(
                (
                    State(
                        phase.after(_slice_node(tensors, node), received, steps),
                        _slice_node(moments, node),
                    ),
                    {name: float(values[node]) for name, values in metrics.items()},
                )
            )
        return results

    def _train_one_by_one(
        self, phase: Phase, states: Sequence[State], received: Tensors, round_: int
    ) -> list[tuple[State, Metrics]]:
        return [
            own.train(phase, state, received, round_)
            for own, state in zip(self._participants, states, strict=True)
        ]


def group_nodes(
    participants: Sequence[Participant], most: int = MAX_GROUP_NODES
) -> list[NodeGroup]:
    """Those with equally many images together, at most `most`:
    their batches are then equal in number and size.

    Where losses draw random numbers, or each node adds noise of its own, each node trains alone.
    """
    phases = chain.from_iterable(each.method.train + each.method.refine for each in participants)
    if any(each.spec.privacy for each in participants) or any(phase.draws for phase in phases):
        most = 1
    alike: dict[int, list[Participant]] = defaultdict(list)
    for participant in participants:
        alike[len(participant.data.labels)].append(participant)
    groups: list[NodeGroup] = []
    for nodes in alike.values():
        for start in range(0, len(nodes), most):
            groups.append(NodeGroup(nodes[start : start + most]))
    return groups


def _take_equal_steps(phase: Phase, states: Sequence[State]) -> bool:
    """Whether the nodes take the same number of steps: not where each ends by itself,
    or has done so before.
    """
    counts = []
    for state in states:
        counts.append(
            [float(value) for name, value in state.moments.items() if _is_step_count(name)]
        )
    return phase.is_settled is None and all(count == counts[0] for count in counts)


def _is_step_count(name: str) -> bool:
    """Whether this is Adam's count of a tensor's steps: one number for all nodes of a group."""
    return name.endswith("/step")


def _stack(states: Sequence[Tensors]) -> Tensors:
    values = {}
    for name, value in states[0].items():
        values[name] = (
            value if _is_step_count(name) else torch.stack([tensors[name] for tensors in states])
        )
    return values


def _slice_node(tensors: Tensors, node: int) -> Tensors:
    values = {}
    for name, value in tensors.items():
        values[name] = value if _is_step_count(name) else value[node]
    return values
