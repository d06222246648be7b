"""AFedCL: adversarial federated consensus learning (Cui et al., 2024).

Section and equation numbers are the paper's. Where it is silent or contradicts itself, `Options`
has a field.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec
import numpy as np

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Training
from trainer.methods.base import (
    CLASSIFICATION_LOSS,
    Batch,
    Encode,
    Entry,
    Method,
    Metric,
    Phase,
    Step,
    plain_phase,
    send_prefixes,
)
from trainer.models.fusion import OWN, RECEIVED, WEIGHTED_SUM
from trainer.models.initial_weights import Shape, init_linear
from trainer.models.named_tensors import Arrays, add_prefix, select, strip_prefix, without_frozen

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.models.network import Network, Tensors

T = TypeVar("T")
_WEIGHT = WEIGHTED_SUM.weight  # A_k among the tensors
# domain labels of eq. (5)
LOCAL = 0
GLOBAL = 1
CHANCE = math.log(2)  # L_D of a discriminator that guesses
L_D = Metric(
    "L_D",
    "discrimination loss",
    "At ln 2 the discriminator cannot tell local features from global ones.",
    level=(CHANCE, "ln 2"),
    headline=True,
)
A_K = Metric(
    "A_k",
    "fusion weight",
    "The share of the received encoder's features in the personal model.",
    headline=True,
)
L_F = Metric("L_F", "fusion loss", "Stage 2, on the node's training images.")


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of `afedcl`, each one a choice that the paper leaves open or an ablation of it."""

    # lambda of eq. (7), the weight of the adversarial term; the paper tunes it in {0.01, 0.1, 1}. 0
    # leaves out only the encoder's part (Fig. 4's variant): the discriminator goes on learning.
    lam: Annotated[float, msgspec.Meta(ge=0)] = msgspec.field(default=0.1, name="lambda")
    # Where E_k starts a round: from the received E_G (section III) or from its own last value
    # (Algorithm 1, literally).
    start: Literal["global", "carry"] = "global"
    # Both players move on gradients of one forward pass, or the discriminator moves first.
    play: Literal["simultaneous", "alternating"] = "simultaneous"
    # D_k descends L_D (Algorithm 1) or lambda * L_D (eq. 7).
    discriminator_gradient: Literal["plain", "lambda"] = "plain"
    discriminator_width: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 256
    discriminator_activation: Literal["relu", "tanh"] = "relu"
    # D_k's learning rate; 0 = the spec's
    discriminator_rate: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    # Aggregation: by L_D (eq. 8, consensus-aware), by the number of images (FedAvg's), or equal.
    weights: Literal["discrimination", "images", "equal"] = "discrimination"
    # The L_D that is uploaded: mean over the batches of the last local epoch, or of one pass after
    # training. refitted:
    # of such a pass once D_k has learnt for as many epochs again to tell the encoders as they are
    # then, both at rest.
    report: Literal["last_epoch", "evaluation", "refitted"] = "last_epoch"
    # Aggregation weight = min(max(L_D, floor), ceiling).
    floor: Annotated[float, msgspec.Meta(gt=0)] = 1e-3
    ceiling: Annotated[float, msgspec.Meta(gt=0)] = 2 * CHANCE
    # Stage 2 learns A_k (eqs. 9 to 11), leaves it where it starts, or trains E_k and C_k as long
    # without any fusion.
    fusion: Literal["adaptive", "fixed", "none"] = "adaptive"
    # Stage 2: its epochs (0 = the spec's local_epochs), A_k's first value, learning rate (0 = the
    # spec's) and range.
    refine_epochs: Annotated[int, msgspec.Meta(ge=0)] = 0
    fusion_start: float = 0.5
    fusion_rate: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    fusion_range: Literal["free", "unit"] = "free"
    # Deployed beside E_k: the E_G that stage 2 was trained against, or the average made after the
    # last round.
    deploy: Literal["trained", "final"] = "trained"


def afedcl(training: Training, options: Options) -> Method:
    """Encoders are exchanged and averaged by L_D; classifier,
    discriminator and fusion weight stay with the node.

    Raises:
        UsageError: options that do not combine.
    """
    _check(options)

    def receive(own: Tensors, received: Tensors) -> Tensors:
        return {**own, **received} if options.start == "global" else own

    method = Method(
        train=_consensus_phases(training, options),
        sends=send_prefixes("encoder"),
        init_node=lambda broadcast, shape, random: _init_node(options, shape, random),
        receive=receive,
        refine=(_fusion_phase(training, options),),
        metrics=(L_D, CLASSIFICATION_LOSS),
    )
    if options.fusion != "none":
        method = method._replace(
            deploy=_deploy_both,
            deploys_final=options.deploy == "final",
            fusion=WEIGHTED_SUM,
            metrics=(L_D, A_K, CLASSIFICATION_LOSS, L_F),
            inspect=lambda own: {A_K.key: float(own[_WEIGHT])},
        )
    if options.weights == "discrimination":
        return method._replace(
            measure=lambda metrics, images: metrics[L_D.key],
            weight_meaning="its discrimination loss L_D",
            weigh=lambda raw: _weigh(options, raw),
            weight_cap=options.ceiling,
            unmaskable=(
                "a node measures L_D on what nobody else has, and behind a mask nobody could "
                "bound the weight that it claims; with --option weights=images or weights=equal "
                "it combines"
            ),
        )
    if options.weights == "equal":
        return method._replace(
            measure=lambda metrics, images: 1.0, weight_meaning="1, as every node's"
        )
    return method


_ACTS_WITH = {
    "fusion_rate": ("fusion", ("adaptive",)),
    "fusion_range": ("fusion", ("adaptive",)),
    "fusion_start": ("fusion", ("adaptive", "fixed")),
    "deploy": ("fusion", ("adaptive", "fixed")),
    "floor": ("weights", ("discrimination",)),
    "ceiling": ("weights", ("discrimination",)),
}
"""Options that act only with certain values of another."""


def _check(options: Options) -> None:
    for name, (other, values) in _ACTS_WITH.items():
        if (
            getattr(options, name) != getattr(Options(), name)
            and getattr(options, other) not in values
        ):
            raise UsageError(
                f"{name} does not combine with {other}={getattr(options, other)}: there is "
                "nothing for it to act on",
                f"leave out {name}, or take {other}={' or '.join(values)}",
            )
    if options.floor >= options.ceiling:
        raise UsageError(
            f"floor={options.floor:g} is not below ceiling={options.ceiling:g}: all nodes would "
            "weigh the same",
            "take a floor below the ceiling, or weights=equal",
        )
    if options.fusion_range == "unit" and not 0 <= options.fusion_start <= 1:
        raise UsageError(
            f"fusion_start={options.fusion_start:g} lies outside fusion_range=unit",
            "take a fusion_start from 0 to 1, or fusion_range=free",
        )


def _init_node(options: Options, shape: Shape, random: np.random.Generator) -> Arrays:
    fusion = (
        {} if options.fusion == "none" else {_WEIGHT: np.asarray(options.fusion_start, np.float32)}
    )
    return {
        **init_linear("classifier", shape.features, shape.classes, random),
        **init_linear("discriminator.0", shape.features, options.discriminator_width, random),
        **init_linear("discriminator.1", options.discriminator_width, 2, random),
        **fusion,
    }


def _deploy_both(own: dict[str, T], received: dict[str, T]) -> dict[str, T]:
    return {
        **select(own, (OWN, "classifier", _WEIGHT)),
        **add_prefix(RECEIVED, without_frozen(strip_prefix(OWN, received))),
    }


def _consensus_phases(training: Training, options: Options) -> tuple[Phase, ...]:
    """Stage 1, dynamic consensus construction: eqs. (4) to (7)."""
    # L_D enters the loss with D_k's scale; the reversal then gives E_k -lambda times L_D's gradient
    # in either case.
    scale, reversal = (
        (1.0, options.lam) if options.discriminator_gradient == "plain" else (options.lam, 1.0)
    )

    def discriminate(network: Network, tensors: Tensors, features: Tensor) -> Tensor:
        hidden = network.linear(tensors, "discriminator.0", features)
        hidden = hidden.relu() if options.discriminator_activation == "relu" else hidden.tanh()
        return network.linear(tensors, "discriminator.1", hidden)

    def discrimination(network: Network, tensors: Tensors, batch: Batch, local: Tensor) -> Tensor:
        """L_D, eq. (5): the mean over both halves."""
        assert batch.reference is not None
        of_local = network.cross_entropy(discriminate(network, tensors, local), LOCAL)
        of_global = network.cross_entropy(discriminate(network, tensors, batch.reference), GLOBAL)
        return (of_local + of_global) / 2

    def play(
        network: Network, tensors: Tensors, batch: Batch, encode: Encode
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Eq. (7) as one loss: E_k's share of L_D's gradient is reversed and scaled,
        so it ascends lambda * L_D.
        """
        local = encode(tensors, batch.images)
        loss_c = network.cross_entropy(network.linear(tensors, "classifier", local), batch.labels)
        loss_d = discrimination(network, tensors, batch, network.reverse(local, reversal))
        return loss_c + scale * loss_d, {CLASSIFICATION_LOSS.key: loss_c, L_D.key: loss_d}

    def refit(
        network: Network, tensors: Tensors, batch: Batch, encode: Encode
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss_d = discrimination(network, tensors, batch, encode(tensors, batch.images).detach())
        return loss_d, {L_D.key: loss_d}

    def discriminator_moves(
        network: Network, tensors: Tensors, batch: Batch, encode: Encode
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss_d, _ = refit(network, tensors, batch, encode)
        return scale * loss_d, {}

    if options.play == "simultaneous":
        steps: tuple[Step, ...] = (Step(("encoder", "classifier", "discriminator"), play),)
    else:
        steps = (
            Step(("discriminator",), discriminator_moves),
            Step(("encoder", "classifier"), play),
        )
    rates = {"discriminator": options.discriminator_rate} if options.discriminator_rate else {}
    consensus = Phase("consensus", steps, training.local_epochs, uses_reference=True, rates=rates)
    refitting = Phase(
        "refitting",
        (Step(("discriminator",), refit),),
        training.local_epochs,
        uses_reference=True,
        rates=rates,
    )
    evaluation = Phase("evaluation", (Step((), play),), 1, uses_reference=True)
    phases = {
        "last_epoch": (consensus,),
        "evaluation": (consensus, evaluation),
        "refitted": (consensus, refitting, evaluation),
    }
    return phases[options.report]


def _fusion_phase(training: Training, options: Options) -> Phase:
    """Stage 2, adaptive feature fusion: eqs. (9) to (11)."""

    def fusion(
        network: Network, tensors: Tensors, batch: Batch, encode: Encode
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.reference is not None
        features = WEIGHTED_SUM.fuse([batch.reference, encode(tensors, batch.images)], tensors)
        loss = network.cross_entropy(network.linear(tensors, "classifier", features), batch.labels)
        return loss, {L_F.key: loss}

    epochs = options.refine_epochs or training.local_epochs
    if options.fusion == "none":
        return plain_phase(training, epochs)
    moved = (
        ("encoder", "classifier", _WEIGHT)
        if options.fusion == "adaptive"
        else ("encoder", "classifier")
    )
    rates = {_WEIGHT: options.fusion_rate} if options.fusion_rate else {}
    bounds = {_WEIGHT: (0.0, 1.0)} if options.fusion_range == "unit" else {}
    return Phase(
        "fusion", (Step(moved, fusion),), epochs, uses_reference=True, rates=rates, bounds=bounds
    )


def _weigh(options: Options, raw: float) -> float:
    """Eq. (8)'s weight. L_D is self-reported, hence the bounds.

    Raises:
        ValueError: L_D is negative or not a number.
    """
    if not raw >= 0:
        raise ValueError(f"a discrimination loss cannot be {raw!r}")
    return min(max(raw, options.floor), options.ceiling)


ENTRY = Entry(Options, afedcl)
