"""The plant's own classifier on the frozen encoder that a run began with: with no other plant's
help and in seconds, it is often better than training on a handful of images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from trainer.data.class_folders import split_folds
from trainer.models.fusion import LENGTH
from trainer.models.named_tensors import Arrays, select
from trainer.models.network import Tensors, to_tensors
from trainer.progress.long_work import steps
from trainer.statistics import logistic_head
from trainer.statistics.features import view_features
from trainer.statistics.label_doubts import log_softmax
from trainer.statistics.logistic_head import STRENGTHS

if TYPE_CHECKING:
    from trainer.training.participant import Participant

_FOLDS = 5


class OwnHead(NamedTuple):
    """A personal model of normalised features, and what it says of images that are left out."""

    tensors: Tensors
    left_out: np.ndarray  # logits [n, C] for the training images, each by a fold's head


def fit_own_head(node: Participant, initial: Arrays) -> OwnHead:
    """Fit logistic regression, with the regularisation that classifies left-out images best.

    Args:
        node: the participant, with images of two or more classes.
        initial: tensors with the encoder, below `encoder.`.
    """
    torch.set_num_threads(node.spec.threads)
    images = node.images.train
    labels = images.labels
    classes = len(node.spec.classes)
    encoder = to_tensors(select(initial, ("encoder",)), node.device)
    features = view_features(node.network, encoder, node.training_set(encoder))
    folds = split_folds(images, min(_FOLDS, len(labels)), node.spec.seed)
    rows = np.arange(len(labels))
    costs: list[tuple[float, float, np.ndarray]] = []
    for strength in STRENGTHS:
        logits = np.empty((len(labels), classes))
        for fold in steps("judging: images left out in turn", folds):
            kept = np.setdiff1d(rows, fold)
            head = logistic_head.fit(features[kept], labels[kept], classes, strength)
            logits[fold] = head.logits(features[fold, 0])
        costs.append((-float(log_softmax(logits)[rows, labels].sum()), strength, logits))
    _, strength, left_out = min(costs, key=lambda each: each[:2])
    head = logistic_head.fit(features, labels, classes, strength)
    made = {
        "classifier.weight": head.weight.astype(np.float32),
        "classifier.bias": head.bias.astype(np.float32),
        LENGTH: np.ones((), np.float32),
    }
    return OwnHead({**encoder, **to_tensors(made, node.device)}, left_out)
