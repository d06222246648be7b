"""Features of a federation that may not combine, and how each is asked for."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from broker_config.protocol.messages import Training
from trainer.federation import combinations
from trainer.federation.combinations import Feature, Wanted
from trainer.federation.server.spec import Participation, Request, draft
from trainer.methods import make
from trainer.methods.base import MODEL

CLASSES = ("inclusion", "patches", "scratches")


class Asked(NamedTuple):
    """How a feature is asked for: fields of `Wanted`, and of the request that leads to them."""

    wanted: Mapping[str, Any]
    request: Mapping[str, Any] = MappingProxyType({})
    participation: Participation = Participation()


ASKED = {
    combinations.MASKS: Asked({"masked": True}, {"secure_aggregation": True}),
    combinations.PRIVACY: Asked({"private": True}, {"privacy": {"epsilon": "3"}}),
    combinations.SAMPLE: Asked({"sample": 2}, participation=Participation(sample=2)),
    combinations.CODEC: Asked({"codec": "int4"}, {"codec": "int4"}),
    combinations.RULE: Asked({"rule": "clipped_mean"}, {"aggregate": "clipped_mean"}),
    combinations.ROBUST_RULE: Asked({"rule": "multi_krum"}, {"aggregate": "multi_krum"}),
    combinations.LIARS: Asked({"liars": 1}, {"liars": 1}),
    combinations.NO_ROBUST_RULE: Asked({}),
    combinations.STATISTICS_HEAD: Asked({"head": "statistics"}, {"head": "statistics"}),
    combinations.BATCH_STATISTICS: Asked(
        {"training": Training(batch_norm="train"), "first": {"encoder.running_var": np.ones(1)}},
        {"training": {"batch_norm": "train"}, "model": "mobilenet_v2"},
    ),
    combinations.AUTO: Asked({"auto": True}),
    combinations.NAMED_MODEL: Asked({"model": "small"}),
    combinations.TELEMETRY: Asked({"telemetry": True}),
    combinations.PREVIEW: Asked({"preview": True}),
    combinations.SGD: Asked({"training": Training(optimizer="sgd", batch_norm="eval")}),
    combinations.MOMENTS: Asked({"given": ("moments",)}),
    combinations.OPTIMISER: Asked({"given": ("learning_rate",)}),
}
"""Features of what is asked for; all others are methods'."""


def request(name: str) -> Request:
    own = make(name, Training(), {}).model
    training = {"batch_norm": "eval"}
    if own == MODEL:
        return Request(name, model="small", size=32, weights="none", training=training)
    return Request(name, model=own, weights="none", training=training)


def plain(name: str) -> Wanted:
    """A method, and nothing else that could be in another's way."""
    spec, first = draft(request(name), federation="steel", classes=CLASSES, nodes=5)
    method = make(name, spec.training, spec.options)
    return Wanted(name, method, first, spec.training)


def having(feature: Feature, wanted: Wanted) -> Wanted:
    return wanted._replace(**ASKED[feature].wanted) if feature in ASKED else wanted
