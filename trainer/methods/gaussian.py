"""Gaussian: one message of sums from each plant, no training;
the consensus head on the first broadcast's encoder.
"""

from typing import Annotated

import msgspec

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Training
from trainer.methods.base import Entry, Method, send_prefixes
from trainer.methods.statistics_head import statistics_head


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of `gaussian`."""

    # Features are projected to so many public directions; 0 = not at all. 256 of 1280 make the
    # message a 25th as long.
    dimensions: Annotated[int, msgspec.Meta(ge=0, le=65536)] = 0
    # Other models, separated by commas, whose features are summed as well: `edge-node preview`
    # and runs that choose an encoder compare them.
    others: str = ""


def gaussian(training: Training, options: Options) -> Method:
    """Linear discriminant analysis of frozen features, from sums over all plants."""
    others = [name.strip() for name in options.others.split(",") if name.strip()]
    if len(set(others)) < len(others):
        raise UsageError(
            f"--option others={options.others} names a model twice", "name each other model once"
        )
    return Method(
        train=(),
        sends=send_prefixes(),
        only_mean="its nodes send sums, and no model",
        others=tuple(others),
        statistics=statistics_head(options.dimensions, others),
        metrics=(),
    )


ENTRY = Entry(Options, gaussian)
