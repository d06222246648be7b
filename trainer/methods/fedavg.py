"""FedAvg (McMahan et al., 2017): one model for all, averaged by the number of training images."""

import msgspec

from broker_config.messages import Training
from trainer.methods.base import IMAGES_CAP, Method, images_weight, plain_phase
from trainer.tree import pick
from trainer.weights import linear


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of `fedavg`."""

    epochs: int = 0  # a round; 0 = the spec's local_epochs (twice that equals the budget of a method with two stages)


def fedavg(training: Training, options: Options) -> Method:
    """Encoder and classifier are received, trained and averaged; the last average is what every node serves."""
    whole = ("encoder", "classifier")
    return Method(
        init_server=lambda shape, random: linear("classifier", shape.features, shape.classes, random),
        init_node=lambda shape, random: {},
        receive=lambda own, received: {**own, **received},
        train=(plain_phase(training, options.epochs),),
        sends=whole,
        measure=lambda metrics, images: float(images),
        weigh=images_weight,
        weight_cap=IMAGES_CAP,
        refine=(),
        deploy=lambda own, received: pick(received, whole),
        deploys_final=True,
    )
