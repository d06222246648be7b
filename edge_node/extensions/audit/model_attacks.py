"""Attacks on a trained model that a plant sends: counts, membership of an image,
and pictures made of its gradient.

The coordinator knows the broadcast that training began with, so it has the update: what training
has changed.

- Counts: where the classifier is sent, classes that the plant has gain bias; how much tells their
  share.
- Membership: training lowers the loss of the images that it sees more than that of others (Yeom et
  al., CSF 2018), the update points against their gradients (Li et al., 2022), and it moves their
  features.
- Pictures: a class's row of the classifier moves along the features of its images, of which
  regression makes a picture; and images are searched for whose gradient points the way of the
  update (Geiping et al., NeurIPS 2020).
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from edge_node.extensions.audit import measures
from edge_node.extensions.audit.attack_scores import (
    agreement,
    compare_pictures,
    membership,
    to_pictures,
)
from edge_node.extensions.audit.exposure import Exposure, Found, Pictures
from edge_node.extensions.audit.feature_decoder import FeatureDecoder
from edge_node.extensions.audit.observation import Observation
from edge_node.extensions.audit.parts import Parts, attackers_own
from trainer.data.class_folders import LabelledImages
from trainer.data.training_set import TrainingSet, encode_all
from trainer.models.fusion import LENGTH, NORMALISED
from trainer.models.initial_weights import init_linear
from trainer.models.named_tensors import is_trainable
from trainer.models.network import Tensors, to_tensors
from trainer.progress.long_work import steps
from trainer.seeding import generator, key_to_seed

SEARCHED = 2  # images that are searched for at once
STEPS = 150  # of that search
# Work of a search that an audit spares time for: steps x pixels. It is about 10 s of a processor
# for the networks that come with edge-node, and a count rather than a time, so that two audits
# agree.
WORK = 400_000
_FEWEST = 5
# of a pixel a step; when it falls, and to what share
_RATE = 0.1
_DROPS = (0.4, 0.6, 0.85)
_FACTOR = 0.3
_SMOOTHNESS = 0.5  # weight of the total variation
_MOST = 100  # images of each side whose gradients are compared with the update

Advance = Callable[[], None]


def affordable_steps(seen: Observation) -> int:
    """Return how many of the STEPS an audit makes unless it is to be thorough."""
    size = seen.spec.preprocessing.size
    return min(STEPS, max(_FEWEST, WORK // size**2))


def attack(
    seen: Observation, parts: Parts, seed: int, advance: Advance, count: int = STEPS
) -> Found:
    """Attack what a plant has trained, or a mean in which it is.

    The search for pictures takes most of the time; `advance` is called after each of its `count`
    steps.
    """
    sent = parts.sent
    unsent = parts.unsent
    own = attackers_own(parts.known, len(seen.spec.classes), seen.spec.preprocessing.size, seed)
    after = {**seen.received, **to_tensors(seen.tensors)}
    update = {
        name: after[name] - seen.received[name]
        for name in seen.tensors
        if name in seen.received and is_trainable(name) and after[name].is_floating_point()
    }
    images = [_at_most(each, _MOST) for each in (sent, unsent)]
    scores = {"moved features": _movement(seen, after, images)}
    exposures: list[Exposure] = []
    pictures: tuple[Pictures, ...] = ()
    notes: tuple[str, ...] = ()
    if "classifier.bias" in update:
        exposures.append(
            agreement(update["classifier.bias"].numpy(), sent, "model", "biases that have grown")
        )
        scores["loss"] = _loss(seen, seen.received, images) - _loss(seen, after, images)
        scores["gradient"] = _alignment(seen, update, images)
        found, pictures = _read_classifier(seen, update, parts, own)
        exposures += found
    else:
        notes = ("no classifier leaves the plant, and no attack on counts was tried",)
    for name, each in scores.items():
        exposures += membership(each, len(images[0].labels), "model", name)
    blind = to_pictures(own).mean(0)
    if count < STEPS:
        notes = (*notes, f"the search for images made {count} of {STEPS} steps")
    made = search(seen, update, blind, seed, advance, is_gray=_is_gray(own), count=count)
    found, searched = compare_pictures(
        made, None, sent, unsent, "model", "a search for images of that gradient", blind
    )
    return Found((*exposures, *found), (*pictures, *searched), notes)


def _read_classifier(
    seen: Observation, update: Tensors, parts: Parts, own: LabelledImages
) -> tuple[list[Exposure], tuple[Pictures, ...]]:
    """Pictures of the features of classes: a linear layer's gradient is its inputs,
    weighed by their errors.

    Adam's steps have no scale of their own: how far a class lies from the mean is taken from the
    attacker's images.
    """
    features = encode_all(seen.network, seen.received, TrainingSet.of(own, seen.spec.preprocessing))
    decoder = FeatureDecoder(features, own)
    mean = features.mean(0)
    usual = float(np.linalg.norm(features - mean, axis=1).mean())
    gained = np.flatnonzero(update["classifier.bias"].numpy() > 0).tolist()
    rows = update["classifier.weight"].numpy()
    rows = rows - rows.mean(0)
    made = [
        decoder.guess(mean + rows[label] * usual / max(float(np.linalg.norm(rows[label])), 1e-30))
        for label in gained
    ]
    what = "a guess from the classifier's update"
    return compare_pictures(made, gained, parts.sent, parts.unsent, "model", what, decoder.blind)


def _at_most(images: LabelledImages, count: int) -> LabelledImages:
    return images.take(
        np.linspace(0, len(images.labels) - 1, min(count, len(images.labels))).astype(int)
    )


def _sets(seen: Observation, images: list[LabelledImages]) -> list[TrainingSet]:
    return [TrainingSet.of(each, seen.spec.preprocessing) for each in images if len(each.labels)]


def _movement(seen: Observation, after: Tensors, images: list[LabelledImages]) -> np.ndarray:
    """How far training has moved each image's features."""
    found = [
        np.linalg.norm(
            encode_all(seen.network, after, data) - encode_all(seen.network, seen.received, data),
            axis=1,
        )
        for data in _sets(seen, images)
    ]
    return np.concatenate(found)


def _logits(seen: Observation, tensors: Tensors, features: Tensor) -> Tensor:
    fused = NORMALISED.fuse([features], tensors) if LENGTH in tensors else features
    return seen.network.linear(tensors, "classifier", fused)


def _loss(seen: Observation, tensors: Tensors, images: list[LabelledImages]) -> np.ndarray:
    """Cross-entropy of each image."""
    found = []
    for data in _sets(seen, images):
        logits = _logits(seen, tensors, torch.from_numpy(encode_all(seen.network, tensors, data)))
        found.append(functional.cross_entropy(logits, data.labels, reduction="none").numpy())
    return np.concatenate(found)


def _alignment(seen: Observation, update: Tensors, images: list[LabelledImages]) -> np.ndarray:
    """The cosine of the update and each image's downward gradient at the broadcast."""
    tensors = {
        name: value.clone().requires_grad_(name in update) for name, value in seen.received.items()
    }
    length = _norm(update.values())
    found = []
    for data in _sets(seen, images):
        for number in steps("comparing gradients of images", range(len(data.labels))):
            inputs = data.encoder_input(seen.network, seen.received, torch.tensor([number]))
            logits = _logits(seen, tensors, seen.network.encode(tensors, inputs))
            loss = functional.cross_entropy(logits, data.labels[number : number + 1])
            gradients = torch.autograd.grad(
                loss, [tensors[name] for name in update], allow_unused=True
            )
            there = [
                (moved, each)
                for moved, each in zip(update.values(), gradients, strict=True)
                if each is not None
            ]
            along = sum(float((moved * each).sum()) for moved, each in there)
            found.append(-along / max(length * _norm([each for _, each in there]), 1e-30))
    return np.asarray(found)


def _norm(values: Iterable[Tensor]) -> float:
    return float(sum(float(each.square().sum()) for each in values) ** 0.5)


def search(
    seen: Observation,
    update: Tensors,
    blind: Tensor,
    seed: int,
    advance: Advance,
    *,
    is_gray: bool,
    count: int = STEPS,
) -> list[Tensor]:
    """Pictures [3, SIDE, SIDE] of images whose mean gradient points the way of the update,
    as far as so many steps lead.

    Labels are searched for as well and, where no classifier is sent, a classifier. Of an encoder
    that takes the mean over all places a gradient says what there is in an image rather than where.

    Args:
        seen: what the coordinator has.
        update: of the tensors that are sent.
        blind: the picture to begin with.
        seed: of what is added to it.
        advance: called after each step.
        is_gray: whether the images are known to be gray.
        count: how many steps.
    """
    network = seen.network.mapped()
    spec = seen.spec
    random = torch.Generator().manual_seed(key_to_seed(seed, "search"))
    size = spec.preprocessing.size
    mean, std = (
        torch.tensor(each)[:, None, None]
        for each in (spec.preprocessing.mean, spec.preprocessing.std)
    )
    start = functional.interpolate(blind[None], size=(size, size), mode="bilinear")
    pixels = start.mean(1, keepdim=True) if is_gray else start
    pixels = (
        pixels + 0.1 * torch.randn((SEARCHED, *pixels.shape[1:]), generator=random)
    ).requires_grad_()
    labels = torch.zeros((SEARCHED, len(spec.classes)), requires_grad=True)
    searched = [pixels, labels]
    wanted = {
        name: value
        for name, value in update.items()
        if name.startswith(("encoder.", "classifier."))
    }
    tensors = {
        name: value.clone().requires_grad_(name in wanted) for name, value in seen.received.items()
    }
    if "classifier.weight" not in tensors:
        shape = (seen.network.shape.features, len(spec.classes))
        head = to_tensors(init_linear("classifier", *shape, generator(seed, "classifier")))
        searched += [each.requires_grad_() for each in head.values()]
        tensors |= head
    optimiser = torch.optim.Adam(searched, _RATE)
    schedule = torch.optim.lr_scheduler.MultiStepLR(
        optimiser, [round(count * share) for share in _DROPS], _FACTOR
    )
    target = torch.cat([value.flatten() for value in wanted.values()])
    for _ in range(count):
        optimiser.zero_grad()
        images = pixels.expand(-1, 3, -1, -1)
        inputs = network.apply_stem(tensors, (images - mean) / std)
        logits = _logits(seen, tensors, network.encode(tensors, inputs))
        loss = functional.cross_entropy(logits, labels.softmax(1))
        gradients = torch.autograd.grad(
            loss, [tensors[name] for name in wanted], create_graph=True, materialize_grads=True
        )
        made = torch.cat([each.flatten() for each in gradients])
        # Training goes against the gradient.
        cost = (
            1 + functional.cosine_similarity(made, target, dim=0) + _SMOOTHNESS * _variation(pixels)
        )
        cost.backward()  # type: ignore[no-untyped-call]
        assert pixels.grad is not None
        pixels.grad.sign_()
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            pixels.clamp_(0, 1)
        advance()
    return list(measures.shrink(pixels.detach().expand(-1, 3, -1, -1)))


def _is_gray(images: LabelledImages) -> bool:
    return bool((images.images == images.images[..., :1]).all())


def _variation(images: Tensor) -> Tensor:
    """Total variation: mean difference of neighbouring pixels."""
    down = images.diff(dim=2).abs().mean()
    right = images.diff(dim=3).abs().mean()
    return down + right
