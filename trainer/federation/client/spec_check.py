"""Check of a federation's spec against the method and the model that it names."""

from collections.abc import Mapping

import numpy as np

from broker_config.protocol.errors import UsageError, abbreviate
from broker_config.protocol.messages import Spec, TensorSpec
from broker_config.protocol.round_contents import predates_binding
from trainer.federation import combinations
from trainer.federation.masking import grid
from trainer.federation.server.aggregation import HEADROOM, scale_for
from trainer.methods import make
from trainer.methods.base import Method, sent_tensors
from trainer.methods.statistics_head import list_encoders, put_below
from trainer.models.catalogue import FEATURES
from trainer.models.named_tensors import Arrays, select
from trainer.models.network import Network
from trainer.seeding import generator


def check_spec(spec: Spec) -> None:
    """Check that a spec is one of its method and model: its tensors, which bound all that a node
    fetches and holds, what leaves a node, and its rounds.

    Raises:
        UsageError: it does not match them, began with an earlier version, or asks for figures
            that tell what it says is hidden.
    """
    if predates_binding(spec):
        raise UsageError(
            f"run {spec.run} of federation {spec.federation!r} began with an earlier version of "
            "edge-node, whose masks and noise could hide two things",
            "ask its operator to end it (edge-node abort) and begin another one with this version",
        )
    method = make(spec.method, spec.training, spec.options, spec.head, spec.privacy)
    network = Network(spec.model, len(spec.classes))
    broadcast = _first_broadcast(spec, method, network)
    relays = method.relay.shapes(broadcast) if method.relay else {}
    statistics = method.statistics.shapes(broadcast, network.shape) if method.statistics else {}
    _compare(spec, spec.tensors, {name: array.shape for name, array in broadcast.items()})
    _compare(spec, spec.relays, relays)
    if (expected := sent_tensors(method, broadcast)) != spec.sends:
        others = abbreviate(", ".join(sorted({*spec.sends} ^ {*expected})), 100)
        raise UsageError(
            f"the coordinator of federation {spec.federation!r} asks for other tensors than "
            f"{spec.method} sends: {others}",
            "ask the operator why, and do not join until you know; no contribution was sent",
        )
    begins = bool(method.statistics and method.statistics.begin)
    if spec.statistics_first != begins or (not method.train and spec.rounds != 1):
        raise UsageError(
            f"the rounds of federation {spec.federation!r} are not those of {spec.method}",
            "ask the operator why, and do not join until you know; no contribution was sent",
        )
    combinations.check(combinations.of_spec(spec, method, broadcast), combinations.OF_RUNS)
    if spec.statistics != statistics:
        raise UsageError(
            "the coordinator asks for other statistics than this edge-node computes",
            "install the coordinator's version of edge-node, then join again",
        )


def check_scales(spec: Spec, broadcast: Arrays, round_: int) -> None:
    """Check that a spec's scales follow from the broadcast of the round a node begins with.

    In round 1 one bit is allowed, because rounding may raise a tensor's largest exponent by one.
    A later round starts from trained tensors, so a node that comes then does not know the values
    that the scales were made of. It allows the headroom that a sum has: a tensor that has moved
    farther is refused by the coordinator of an open sum, too. Tensors that no node contributes,
    such as what is relayed, have no such bound then, and nothing leaves the node in their steps.

    Raises:
        UsageError: a scale differs by more: such steps would hide nothing, or lose the values.
    """
    scale = grid.scale_for if spec.mask_threshold else scale_for
    allowed = 1 if round_ == 1 else HEADROOM + 1
    checked = spec.tensors if round_ == 1 else select(spec.tensors, spec.sends)
    for name, tensor in checked.items():
        if abs(tensor.scale - scale(broadcast[name], spec.nodes)) > allowed:
            raise UsageError(
                f"the coordinator of federation {spec.federation!r} wants {name[:100]} in steps of "
                f"2^-{tensor.scale}, which do not follow from its broadcast of round {round_}",
                "ask the operator why, and do not join until you know; no contribution was sent",
            )


def _first_broadcast(spec: Spec, method: Method, network: Network) -> Arrays:
    """What the first broadcast holds, in names and shapes; its values take no memory."""
    known = {spec.model, *(name for name in method.others if name in FEATURES)}
    encoders: Arrays = {}
    for model, prefix in list_encoders(spec.model, spec.tensors):
        if model in known:
            shapes = (
                network.shapes if model == spec.model else Network(model, len(spec.classes)).shapes
            )
            encoders |= put_below(
                prefix, {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
            )
    return {
        **encoders,
        **method.init_server(encoders, network.shape, generator(spec.seed, "server")),
    }


def _compare(
    spec: Spec, told: Mapping[str, TensorSpec], expected: Mapping[str, tuple[int, ...]]
) -> None:
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in told.items()}
    ours = {name: ("float32", tuple(shape)) for name, shape in expected.items()}
    if found != ours:
        wrong = min(name for name, _ in set(found.items()) ^ set(ours.items()))
        raise UsageError(
            f"the tensors of federation {spec.federation!r} are not those of {spec.method} and "
            f"{spec.model}: {wrong[:100]} is {_describe(found.get(wrong))}, and here "
            f"{_describe(ours.get(wrong))}",
            "install the coordinator's version of edge-node; if it is this one, ask who runs the "
            "coordinator: nothing was fetched",
        )


def _describe(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return f"{tensor[0]} {list(tensor[1])}"[:100] if tensor else "missing"
