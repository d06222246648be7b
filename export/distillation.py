"""One encoder that stands for a fused model's two: their weighted average, taught by both where that is not enough."""

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, mse_loss

from broker_config.protocol.messages import Preprocessing
from trainer import progress
from trainer.data.class_folders import LabelledImages
from trainer.models.fusion import OWN, RECEIVED, WEIGHTED_SUM
from trainer.models.named_tensors import is_trainable, select, strip_prefix
from trainer.models.network import Network, Tensors
from trainer.training.engine import draw_batches
from trainer.training.seeding import key_to_seed
from trainer.training.training_set import Augmentation, TrainingSet

EPOCHS = 20
_BATCH = 32
_SOFTNESS = 2.0  # by which both divide their logits


def average_encoders(tensors: Tensors) -> Tensors:
    """A fused model's encoders averaged tensor by tensor as their features would be, and its classifier.

    An own encoder that starts every round from the received one stays close to it, and the features of the average are
    then nearly the average of the features (Wortsman et al. 2022).
    """
    received = strip_prefix(RECEIVED, tensors)  # without the stem, which both share
    encoder = {
        f"{OWN}.{name}": WEIGHTED_SUM.fuse([received[name], value], tensors) if name in received else value
        for name, value in strip_prefix(OWN, tensors).items()
    }
    return encoder | select(tensors, ("classifier",))


def distil(
    network: Network,
    tensors: Tensors,
    images: LabelledImages,
    preprocessing: Preprocessing,
    report: progress.Report,
    learning_rate: float = 3e-5,
) -> Tensors:
    """The average of a fused model's encoders, trained until it answers as both do, on varied training images.

    The loss is Hinton's (2015): the divergence of softened probabilities; and the squared error of features (Romero et
    al. 2015). No label is used. The classifier stays, and so do BatchNorm's statistics.
    """
    data = TrainingSet.of(images, preprocessing)
    student = {name: value.clone() for name, value in average_encoders(tensors).items()}
    learning = [
        student[name].requires_grad_() for name in student if is_trainable(name) and name.startswith("encoder.")
    ]
    optimiser = torch.optim.Adam(learning, lr=learning_rate)
    random = torch.Generator().manual_seed(key_to_seed(0, "student"))
    for epoch in range(EPOCHS):
        report(progress.Step(what=f"teaching one encoder, epoch {epoch + 1} of {EPOCHS}"))
        for index in draw_batches(len(images.labels), _BATCH, random):
            pixels = data.network_input(index, Augmentation.draw(len(index), random))
            with torch.no_grad():
                target = network.features(tensors, pixels)
            optimiser.zero_grad()
            _loss(network, student, target, network.features(student, pixels)).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return {name: value.detach() for name, value in student.items()}


def _loss(network: Network, student: Tensors, target: Tensor, computed: Tensor) -> Tensor:
    """The distance of the features [n, F] that the student computed from the `target`."""
    wanted, given = (
        log_softmax(network.linear(student, "classifier", features) / _SOFTNESS, 1) for features in (target, computed)
    )
    divergence = kl_div(given, wanted, reduction="batchmean", log_target=True) * _SOFTNESS**2
    return divergence + mse_loss(computed, target) / target.var()
