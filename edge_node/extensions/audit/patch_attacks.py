"""Attacks on the patches of maps that plants pass on to one another:
what all nodes and the coordinator see of them.

The plant's own images are cut and protected as for its contribution: so it is known which image
each patch is of.
"""

import numpy as np
import torch

from edge_node.extensions.audit import measures
from edge_node.extensions.audit import patch_inference as inference
from edge_node.extensions.audit import patch_inversion as inversion
from edge_node.extensions.audit.attack_scores import agreement, membership
from edge_node.extensions.audit.exposure import Exposure, Found, Pictures
from edge_node.extensions.audit.observation import Observation
from edge_node.extensions.audit.parts import Parts
from trainer.data.class_folders import LabelledImages
from trainer.data.training_set import TrainingSet
from trainer.privacy.patch_protection import Floats, Protection, SentPatches
from trainer.seeding import generator

_LOOKED_FOR = 64  # patches behind which images are looked for
_EPOCHS = 30
_SHOWN = 8


def attack(seen: Observation, parts: Parts, patches: SentPatches, seed: int) -> Found:
    """Attack the patches that a plant sends of its images."""
    protection = patches.protection
    if not len(parts.known.labels):
        return Found(
            (), notes=("patches: too few images are held out for an attacker to learn of",)
        )
    sent, unsent, known = (_plant(seen, images, patches.side) for images in parts)
    random = generator(seed, "patches")
    made = inversion.items(sent, patches.quota, protection, random)
    if not len(made.patches):
        return Found(
            (),
            notes=("patches: no class has as many images as are mixed, so none leave the plant",),
        )
    shown = np.bincount(sent.labels[made.images[:, 0]], minlength=len(seen.spec.classes))
    exposures = [agreement(shown, parts.sent, "patches", "each patch bears its class")]
    some = inversion.Items(
        made.patches[:_LOOKED_FOR], made.images[:_LOOKED_FOR], made.places[:_LOOKED_FOR]
    )
    behind = np.unique(some.images)
    # levels that occur tell the sender's
    measure = sent.measure if protection.levels else known.measure
    scores = inference.found(some, sent.take(behind).join(unsent), known, measure, protection)
    exposures += membership(scores, len(behind), "patches", "likelihood of the patch")
    pixels, pictures = _pictures(known, sent, made, protection, seed)
    return Found((*exposures, pixels), (pictures,))


def _plant(seen: Observation, images: LabelledImages, side: int) -> inversion.Plant:
    """Images with their maps under the received model, as far as whole patches of them go."""
    data = TrainingSet.of(images, seen.spec.preprocessing)
    with torch.no_grad():
        inputs = data.encoder_input(seen.network, seen.received, slice(None))
        maps: Floats = seen.network.part("project", seen.received, inputs).numpy()
    high, wide = (each // side * side for each in maps.shape[2:])
    scale = images.images.shape[1] // maps.shape[2]
    pixels = images.images.transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255)
    return inversion.plant(
        pixels[:, :, : high * scale, : wide * scale],
        images.labels,
        np.ascontiguousarray(maps[:, :, :high, :wide]),
        side,
    )


def _pictures(
    known: inversion.Plant,
    sent: inversion.Plant,
    made: inversion.Items,
    protection: Protection,
    seed: int,
) -> tuple[Exposure, Pictures]:
    """What lies under each patch's first cell, as a network guesses that has learnt it of the
    attacker's images.
    """
    guess = inversion.of_items(known, protection, _EPOCHS, seed)(torch.from_numpy(made.patches))
    truth = inversion.pixels(sent, made)
    blind = np.broadcast_to(known.images.mean((0, 2, 3), keepdims=True), truth.shape)
    window = min(7, truth.shape[-1])
    exposure = Exposure(
        what="pictures",
        seen="patches",
        attack="a network guesses the pixels under a patch",
        value=float(np.clip(measures.ssim(guess, truth, window), 0, 1)),
        chance=float(np.clip(measures.ssim(np.ascontiguousarray(blind), truth, window), 0, 1)),
    )
    drawn = [
        (255 * each[:_SHOWN].transpose(0, 2, 3, 1)).round().astype(np.uint8)
        for each in (guess, truth)
    ]
    return exposure, Pictures("patches", exposure.attack, *drawn)
