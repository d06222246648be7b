"""Attacks on federations: liars that know the rule.

What other attacks do to it: test_robust_rules.py.
"""

import numpy as np
import pytest

from research.studies.attacks import Trial, tampering
from tests.support.method_cases import CLASSES, shares
from trainer.federation.server.aggregation import Influence, limit, measure_updates
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate
from trainer.models.named_tensors import Arrays
from trainer.training.participant import Contributed


@pytest.mark.parametrize("liars", [1, 2])
def test_liars_within_the_limits_are_just_not_limited_and_work_against_the_honest_nodes(
    liars: int,
) -> None:
    trial = Trial(
        method="fedavg",
        pool="",
        nodes=5,
        liars=liars,
        attack="within limits",
        rule="clipped_mean",
        seed=0,
        rounds=2,
        samples=6,
    )
    request = Request(
        "fedavg",
        model="small",
        size=16,
        rounds=2,
        training={"local_epochs": 1},
        aggregate="clipped_mean",
    )
    spec, broadcast = draft(request, federation="attacked", classes=CLASSES, nodes=5)
    images = shares(5)
    false = [*images][-liars:]
    lie, sent = tampering(trial, spec, false), list[tuple[str, int, Contributed, Arrays]]()

    def tamper(node: str, round_: int, contributed: Contributed, received: Arrays) -> Contributed:
        told = lie(node, round_, contributed, received)
        sent.append((node, round_, told, received))
        return told

    simulate(spec, broadcast, images, tamper=tamper)
    for of in (1, 2):
        there = {node: (told, received) for node, round_, told, received in sent if round_ == of}
        influences = {
            node: Influence(told.weight, measure_updates(told.tensors.items(), received))
            for node, (told, received) in there.items()
        }
        counted = limit(influences)
        for node in false:
            assert counted[node].weight == influences[node].weight
            assert min(counted[node].shares.values()) > 0.999
            told, received = there[node]
            for name, value in told.tensors.items():
                honest = sum(
                    told.tensors[name] - received[name]
                    for n, (told, _) in there.items()
                    if n not in false
                )
                assert float(np.sum(honest * (value - received[name]))) < 0
