"""All that a coordinator has of a plant after one round, and knows besides."""

from typing import NamedTuple

from broker_config.protocol.messages import Spec
from trainer.models.named_tensors import Arrays
from trainer.models.network import Network, Tensors


class Observation(NamedTuple):
    """A contribution, or a sum that holds it, and the broadcast that it was made from."""

    spec: Spec
    network: Network
    received: Tensors  # the round's broadcast
    tensors: Arrays  # the contribution; of a sum, the mean of models, or the totals of statistics
    is_statistics: bool
