"""Which of a fused model's encoders the line can do without."""

from typing import Literal, NamedTuple

import numpy as np
import torch

from trainer.data.class_folders import LabelledImages
from trainer.models.named_tensors import add_prefix, is_frozen, select, strip_prefix
from trainer.models.network import Network, Tensors
from trainer.training.engine import predict
from trainer.training.personal_model import Facts
from trainer.training.training_set import TrainingSet

SHARE = 0.05  # of the features, below which an encoder is tried to be left out


class Leaner(NamedTuple):
    """A model of one encoder that judges as the fused one does."""

    tensors: Tensors
    kept: Literal["received", "own"]
    dropped: Literal["received", "own"]
    share: float  # of the features, of the dropped one


def drop(facts: Facts, tensors: Tensors, held_out: LabelledImages) -> Leaner | None:
    """The model without the encoder whose share of the features is below SHARE.

    None if there is no such encoder, or if a verdict on a held-out image would change.
    """
    weight = float(tensors.get("fusion", 0.5))  # of the received encoder
    share = min(weight, 1 - weight)
    if share >= SHARE:
        return None
    kept: Literal["received", "own"] = "received" if weight > share else "own"
    encoder = strip_prefix({"received": "received", "own": "encoder"}[kept], tensors)
    stem = {name: value for name, value in tensors.items() if is_frozen(name)}
    lean = {**stem, **add_prefix("encoder", encoder), **select(tensors, ("classifier",))}
    network, images = Network(facts.model, len(facts.classes)), TrainingSet.of(held_out, facts.preprocessing)
    with torch.no_grad():
        both, one = (predict(network, each, images).argmax(1) for each in (tensors, lean))
    if not np.array_equal(both, one):
        return None
    return Leaner(lean, kept, "own" if kept == "received" else "received", share)
