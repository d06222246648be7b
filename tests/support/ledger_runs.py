"""Specs and contributions for a coordinator's ledger, without a broker."""

from typing import Any

import msgspec
import numpy as np

from broker_config.protocol.codec import encode_tensors
from broker_config.protocol.messages import Aggregation, Contribution, Manifest, Rule, Spec
from broker_config.protocol.round_contents import basis, contribution_tensors, is_statistics_round
from tests.support import class_sums
from trainer.federation.server.ledger import Ledger
from trainer.federation.server.spec import Participation, Request, draft
from trainer.models.named_tensors import Arrays

SESSION, STATISTICS = "5" * 16, "statistics"
ROBUST: Rule = "multi_krum"
NODES = ("a", "b", "c")


def drafted(
    seed: int = 1, rule: Any = "mean", rounds: int = 2, **participation: int
) -> tuple[Spec, Arrays]:
    """FedAvg over two rounds, or more; instead of the second one for statistics where that is
    the `rule`.
    """
    request = Request(
        "fedavg", model="small", size=32, rounds=rounds, seed=seed, aggregate=rule, codec="int4"
    )
    if rule == ROBUST:
        request = request._replace(aggregate="mean")
    if rule == STATISTICS:
        request = request._replace(
            method=class_sums.NAME, options={"trained": True}, rounds=1, aggregate="mean"
        )
    spec, broadcast = draft(
        request,
        federation="steel",
        classes=("x", "y"),
        nodes=len(NODES),
        participation=Participation(**participation),
    )
    if rule == ROBUST:
        # three nodes stand no liar
        spec = msgspec.structs.replace(spec, aggregation=Aggregation(ROBUST))
    return spec, broadcast


def contribution(ledger: Ledger, node: str, round_: int, seed: int = 0) -> Contribution:
    """One whose blob has arrived. Node c's update is longer than others'."""
    random = np.random.default_rng([seed, round_, *node.encode()])
    counted = is_statistics_round(ledger.spec, round_)
    tensors = {
        name: random.normal(0, 5 if node == "c" else 0.1, spec.shape).astype(np.float32)
        if spec.dtype == "float32"
        else random.integers(10, 20, spec.shape)
        for name, spec in contribution_tensors(ledger.spec, round_).items()
    }
    digest, size = ledger.store.put(encode_tensors(tensors))
    manifest = Manifest(
        federation="steel",
        run=ledger.spec.run,
        round=round_,
        node=node,
        digest=digest,
        size=size,
        chunk_size=1024,
    )
    return Contribution(
        session=SESSION,
        run=ledger.spec.run,
        round=round_,
        weight=1.0 if counted else float(len(node) + 3),
        blob=manifest,
        basis=basis(ledger.spec, ledger.broadcast_blob.digest) if counted else "",
    )
