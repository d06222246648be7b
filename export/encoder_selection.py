"""Selection of the one encoder that a line needs, where the other one hardly counts."""

from typing import NamedTuple

import numpy as np
import torch

from export.graph import ENCODER_NAMES, Encoder
from trainer.data.class_folders import LabelledImages
from trainer.data.training_set import TrainingSet
from trainer.models.fusion import OWN, RECEIVED, WEIGHTED_SUM, infer_fusion
from trainer.models.named_tensors import add_prefix, is_frozen, select, strip_prefix
from trainer.models.network import Network, Tensors
from trainer.training.engine import predict
from trainer.training.personal_model import ModelMetadata

MIN_SHARE = 0.05  # of the features, below which an encoder is tried to be left out


class Selected(NamedTuple):
    """A model of one encoder that predicts the same as with both."""

    tensors: Tensors
    kept: Encoder
    dropped: Encoder
    share: float  # of the features, of the dropped one


def drop_encoder(
    metadata: ModelMetadata, tensors: Tensors, held_out: LabelledImages
) -> Selected | None:
    """The model without the encoder whose share of the features is below LEAST_SHARE.

    None if there is no such encoder, or if a prediction on a held-out image would change.
    """
    if infer_fusion(tensors) is not WEIGHTED_SUM:
        return None
    weight = float(tensors[WEIGHTED_SUM.weight])  # of the received encoder
    share = min(weight, 1 - weight)
    if share >= MIN_SHARE:
        return None
    kept, dropped = (RECEIVED, OWN) if weight > share else (OWN, RECEIVED)
    stem = {name: value for name, value in tensors.items() if is_frozen(name)}
    single = {
        **stem,
        **add_prefix(OWN, strip_prefix(kept, tensors)),
        **select(tensors, ("classifier",)),
    }
    network = Network(metadata.model, len(metadata.classes))
    images = TrainingSet.of(held_out, metadata.preprocessing)
    with torch.no_grad():
        both, one = (predict(network, each, images).argmax(1) for each in (tensors, single))
    if not np.array_equal(both, one):
        return None
    return Selected(single, ENCODER_NAMES[kept], ENCODER_NAMES[dropped], share)
