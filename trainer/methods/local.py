"""No-FL: every node trains alone, from the coordinator's initial encoder. Nothing leaves it."""

import msgspec

from broker_config.messages import Training
from trainer.methods.base import Method, plain_phase
from trainer.tree import pick
from trainer.weights import linear


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of `local`."""

    epochs: int = 0  # a round; 0 = the spec's local_epochs (twice that equals the budget of a method with two stages)


def local(training: Training, options: Options) -> Method:
    """The baseline without federation."""
    return Method(
        init_server=lambda shape, random: {},
        init_node=lambda shape, random: linear("classifier", shape.features, shape.classes, random),
        receive=lambda own, received: own,
        train=(plain_phase(training, options.epochs),),
        sends=(),
        measure=lambda metrics, images: 1.0,
        weigh=lambda raw: 1.0,
        weight_cap=1.0,
        refine=(),
        deploy=lambda own, received: pick(own, ("encoder", "classifier")),
        deploys_final=False,
    )
