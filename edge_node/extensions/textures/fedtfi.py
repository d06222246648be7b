"""FedTFI (Peng et al., 2022): FedAvg, and nodes that exchange patches of feature maps.

The paper leaves open: margin, lambda, p, the size of the bank, and which rounds its patches come
from.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Training
from edge.terminal.formatting import format_names
from edge_node.extensions.textures import losses, patch_bank, patches
from edge_node.extensions.textures.options import Options
from trainer.methods.base import (
    CLASSIFICATION_LOSS,
    WHOLE,
    Entry,
    Method,
    Metrics,
    OneStage,
    Relay,
    init_shared_classifier,
    plain_phase,
)
from trainer.methods.fedavg import fedavg
from trainer.models.initial_weights import Shape
from trainer.models.named_tensors import Arrays, select
from trainer.privacy.patch_protection import SentPatches

# of patches in a contribution or broadcast: the coordinator holds those of all nodes in memory
_MAX_BYTES = 1 << 26


def fedtfi(training: Training, options: Options) -> Method:
    """Cross-entropy and, with patches of other nodes put into maps,
    a triplet loss of TEL's output token (eq. 13).
    """
    mixed = options.use == "mixed"
    loss = losses.mixed_loss(options) if mixed else losses.triplet_loss(options)
    triplet_loss = [] if mixed else [losses.TRIPLET_LOSS]
    return fedavg(training, OneStage())._replace(
        train=(plain_phase(training, options.epochs, loss)._replace(draws=True),),
        model="fedtfi_small",
        init_server=lambda encoder, shape, random: _init_server(options, encoder, shape, random),
        admit=patch_bank.remove_own_patches,
        receive=lambda own, received: select({**own, **received}, WHOLE),
        relay=Relay(
            shapes=lambda broadcast: _shapes(options, broadcast),
            make=lambda network, received, data, random: patches.make_patches(
                network, received, data, random, options
            ),
            check=patch_bank.check,
            merge=patch_bank.merge,
            protection=options.active,
            unmet_demands=options.unmet_demands,
            patches=SentPatches(options, options.mask, options.quota),
        ),
        metrics=(CLASSIFICATION_LOSS, *triplet_loss, losses.PATCHED),
        notice=_notice,
    )


def _init_server(
    options: Options, encoder: Arrays, shape: Shape, random: np.random.Generator
) -> Arrays:
    if not all(select(encoder, (part,)) for part in ("encoder.project", "encoder.encoding")):
        raise UsageError(
            "fedtfi exchanges patches of feature maps, and this model has none of FedTFI's",
            "take --model fedtfi_small or another model of FedTFI's, or another --method",
        )
    channels = len(encoder["encoder.project.weight"])
    if options.channels > channels:
        raise UsageError(
            f"fedtfi cannot interpolate {options.channels} channels: this model's maps have "
            f"{channels}",
            f"take --option channels=1 to {channels}",
        )
    largest = 4 * max(options.quota, options.capacity) * channels * options.mask**2
    if largest > _MAX_BYTES:
        raise UsageError(
            f"fedtfi would send {largest >> 20} MiB of patches at once: {_MAX_BYTES >> 20} are "
            "the most",
            "take a smaller --option quota, capacity or mask",
        )
    return {
        **init_shared_classifier(encoder, shape, random),
        **patch_bank.make_empty_bank(options.capacity, channels, options.mask),
    }


def _notice(round_: int, metrics: Mapping[str, Metrics]) -> str:
    """Which nodes have trained as without an exchange;
    in round 1 there is nothing to exchange yet.
    """
    alone = [node for node, measured in metrics.items() if measured.get(losses.PATCHED.key) == 0]
    if round_ == 1 or not alone:
        return ""
    return (
        f"round {round_}: no patches of others fit the images of {format_names(alone)}: "
        "the exchange teaches nothing there while patched is 0; "
        "each label must be with two plants at least, with as many images at each as --option mix"
    )


def _shapes(options: Options, broadcast: Arrays) -> dict[str, tuple[int, ...]]:
    return {
        patch_bank.VALUES: (options.quota, *broadcast["bank.patches"].shape[1:]),
        patch_bank.LABELS: (options.quota,),
    }


ENTRY = Entry(Options, fedtfi)
