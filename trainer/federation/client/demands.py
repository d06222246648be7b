"""A plant's conditions for taking part in a federation,
checked before anything of its images leaves it.
"""

from collections.abc import Mapping
from math import inf
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Spec
from edge_node.extensions.audit.exposure import MEANINGS, Share, What
from trainer.data.class_folders import LabelledImages
from trainer.federation import masking
from trainer.methods.base import Method
from trainer.training.privacy_plan import planned_epsilon


class _SumDemands(msgspec.Struct, frozen=True):
    """What a plant can demand of sums, and check, before its own leave it."""

    # of its own of each of its classes, look-alikes counting as one
    images: Annotated[int, msgspec.Meta(ge=1)] = 1
    nodes: Annotated[int, msgspec.Meta(ge=1)] = 1  # whose sums a total holds


class _MaskDemands(msgspec.Struct, frozen=True):
    """What a plant can demand of masks."""

    # contributions in a sum of which nobody can read one
    masked: Annotated[int, msgspec.Meta(ge=0)] = 0


class _PrivacyDemands(msgspec.Struct, frozen=True):
    """What a plant can demand of a private federation."""

    # that is spent of each image, with what was spent before
    epsilon: Annotated[float, msgspec.Meta(gt=0)] = inf


_Kind = TypeVar("_Kind", _SumDemands, _MaskDemands, _PrivacyDemands)


class Demands(NamedTuple):
    """What is still to be checked of a plant's demands once a federation's spec meets the
    others.
    """

    sums: _SumDemands | None
    epsilon: float
    # of counts, membership, pictures: how much attacks may tell of them
    exposure: Mapping[What, float]


def check_spec(demanded: Mapping[str, str], spec: Spec, method: Method) -> Demands:
    """Check a federation's spec by what a plant demands of it, NAME=VALUE.

    Raises:
        UsageError: it does not meet the demands, or these mean nothing there.
    """
    privacy, rest = _take(_PrivacyDemands, demanded, "demand for example epsilon=3")
    masks, rest = _take(_MaskDemands, rest, "demand masked=N")
    if masks and spec.mask_threshold < masks.masked:
        raise UsageError(
            f"what this plant contributes to federation {spec.federation!r} can be read by "
            f"itself, or in a sum of fewer than the {masks.masked} that it demands (it is "
            f"{spec.mask_threshold})",
            "ask its coordinator for a run with --secure-aggregation of "
            f"{masking.least_nodes(masks.masked)} nodes or more, or demand less here (--demand)",
        )
    exposure = check_exposure_demands(rest)
    rest = {name: value for name, value in rest.items() if name not in exposure}
    sums, patches = _take(_SumDemands, rest, "demand images=N or nodes=N")
    relay = method.relay
    if (patches and not relay) or (sums and not method.statistics):
        own_patches = [] if relay else [*patches]
        unchecked = own_patches or [name for name in rest if name not in patches]
        raise UsageError(
            "what this node demands cannot be checked before anything leaves it: "
            f"{', '.join(unchecked)}",
            "demand noise, levels or mix where patches are exchanged, images or nodes where sums "
            "are, epsilon where a federation is private, masked where contributions are, counts, "
            "membership or pictures anywhere; how many plants have a class is known when their "
            "sums are there",
        )
    if relay and (unmet := relay.unmet_demands(patches)):
        raise UsageError(
            f"federation {spec.federation!r} hides less in what others see of this plant's "
            f"images than it demands: it lacks {unmet}",
            "ask its coordinator for such --option, or demand less here (--demand)",
        )
    if privacy:
        _check_epsilon(spec, privacy.epsilon)
    epsilon = privacy.epsilon if privacy else inf
    return Demands(sums, epsilon, exposure)


def check_exposure_demands(demanded: Mapping[str, str]) -> dict[What, float]:
    """How much attacks may tell of what, among a plant's demands.

    UsageError for what is no share.
    """
    shares: dict[What, float] = {}
    for what in MEANINGS:
        if what not in demanded:
            continue
        try:
            shares[what] = msgspec.convert(demanded[what], Share, strict=False)
        except msgspec.ValidationError as error:
            raise UsageError(
                f"--demand {what}={demanded[what]} is no share of what there is to tell",
                f"write 0 for nothing to 1 for all, for example --demand {what}=0.2",
            ) from error
    return shares


def _take(
    kind: type[_Kind], demanded: Mapping[str, str], remedy: str
) -> tuple[_Kind | None, dict[str, str]]:
    """The demands of one kind, if there are any, and all others."""
    mine = {name: value for name, value in demanded.items() if name in kind.__struct_fields__}
    try:
        found = msgspec.convert(mine, kind, strict=False) if mine else None
    except msgspec.ValidationError as error:
        raise UsageError(f"what this node demands cannot be met: {error}", remedy) from error
    return found, {name: value for name, value in demanded.items() if name not in mine}


def _check_epsilon(spec: Spec, most: float) -> None:
    if spec.privacy is None:
        raise UsageError(
            f"federation {spec.federation!r} is not private: no epsilon bounds what leaves this "
            "plant",
            "ask its coordinator for edge-node coordinate --privacy epsilon=3, or leave out "
            "--demand epsilon",
        )
    planned = planned_epsilon(spec)
    if not planned <= most:  # also what is no number
        raise UsageError(
            f"federation {spec.federation!r} would spend epsilon {planned:.3g} of this plant's "
            f"images, and it demands {most:.3g} at most",
            "ask its coordinator for more noise (--privacy), or demand less here (--demand)",
        )


def check_images(demands: Demands, images: LabelledImages, spec: Spec) -> None:
    """Check what a federation's sums would tell of a plant's images, before they leave it.

    Raises:
        UsageError: more than it demands.
    """
    if demands.sums and (unmet := _unmet_by_sums(demands.sums, images, spec)):
        raise UsageError(
            f"the sums of federation {spec.federation!r} would tell more of this plant's images "
            f"than it demands: it lacks {unmet}",
            "label more images, leave the class's folder out, ask the coordinator for a larger "
            "--quorum, or demand less here (--demand)",
        )


def _unmet_by_sums(wanted: _SumDemands, images: LabelledImages, spec: Spec) -> str:
    labels = [int(images.labels[group[0]]) for group in images.sets]
    few = [
        spec.classes[label] for label in sorted(set(labels)) if labels.count(label) < wanted.images
    ]
    unmet = (
        [f"{wanted.images} images of {', '.join(few)}, look-alikes counting as one"] if few else []
    )
    if spec.quorum < wanted.nodes:
        unmet.append(f"a quorum of {wanted.nodes} nodes (it is {spec.quorum})")
    return "; ".join(unmet)
