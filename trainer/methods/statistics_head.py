"""The consensus head as part of a method: which sums plants exchange,
and the personal model made of their totals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import ImagePrivacy, TensorSpec
from trainer.methods.base import Statistics
from trainer.models.catalogue import FEATURES
from trainer.models.fusion import LENGTH, NORMALISED, NOVELTY
from trainer.models.initial_weights import Shape, choose_weights, initial_encoder
from trainer.models.named_tensors import Arrays, add_prefix, select, strip_prefix
from trainer.statistics import lda_head, private_head, private_sums
from trainer.statistics.private_sums import DIRECTIONS, PrivateSums
from trainer.statistics.sums import (
    PREFIX,
    Sums,
    check,
    check_totals,
    collect,
    directions,
    no_images,
    specs,
)

if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")

    from trainer.data.training_set import TrainingSet
    from trainer.models.network import Network, Tensors
    from trainer.statistics.private_sums import Normal


_CANDIDATE = "candidate"
"""The prefix of encoders that are only compared with the federation's own,
each below its model's name.
"""
_CENTRE = f"{PREFIX}.own_centre"
"""The public centre among a node's sums."""
# of a classifier that training begins with: contributions may hold twice that, whatever the images
_LARGEST = 512.0


def statistics_head(
    dimensions: int = 0, others: Sequence[str] = (), *, first: bool = False
) -> Statistics:
    """The exchange of sums of the shared encoder's features,
    projected to `dimensions` public directions unless 0.

    Sums of the features of `others`, models of encoders that the broadcast holds beside, are
    exchanged as well. With `first`, training begins with the head of the sums over all nodes as its
    classifier of normalised features.
    """
    begin = _begin if first else None
    private = None if dimensions or others else partial(private_statistics_head, first)
    as_they_are = None if dimensions else ""  # the prefix of the shared encoder
    return Statistics(
        shapes=lambda broadcast, shape: _specs(shape, dimensions, _held(others, broadcast)),
        features=lambda network, received, data: _features(
            network, received, data, dimensions, others
        ),
        make=_collect,
        check=lambda sums, classes: _check(sums, others),
        check_totals=lambda totals, nodes: _check_totals(totals, nodes, _held(others, totals)),
        deploy=lambda network, own, others, served: _deploy(
            network, own, others, dimensions, novelty=served
        ),
        fusion=NORMALISED,
        begin=begin,
        private=private,
        views=as_they_are,
    )


def private_statistics_head(first: bool, privacy: ImagePrivacy) -> Statistics:
    """The same exchange of sums with noise, of features measured in the public frame of the
    shared encoder.
    """
    begin = partial(_begin_private, privacy.sums) if first else None
    return Statistics(
        shapes=lambda broadcast, shape: private_sums.specs(shape.classes, shape.features),
        features=_features_in_frame,
        make=_collect_with_centre,
        check=lambda sums, classes: private_sums.check(PrivateSums.of(sums), privacy.sums),
        check_totals=lambda totals, nodes: private_sums.check_totals(
            PrivateSums.of(totals), nodes, privacy.sums
        ),
        deploy=lambda network, own, others, served: _deploy_private(
            network, own, others, privacy.sums
        ),
        fusion=NORMALISED,
        begin=begin,
        release=partial(_release, privacy.sums),
    )


def add_candidates(others: Sequence[str]) -> Arrays:
    """The first encoders of these models, as the broadcast holds them.

    Raises:
        UsageError: there is no such model, or its weights cannot be had.
    """
    found: Arrays = {}
    for model in others:
        found |= add_prefix(_below(model), initial_encoder(model, choose_weights(model), seed=0))
    return found


def list_encoders(model: str, tensors: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The model of each encoder among `tensors`, and the prefix of what belongs to it:
    that of `model` first.
    """
    yield model, ""
    parts = {tuple(name.split(".")[:2]) for name in tensors if name.startswith(f"{_CANDIDATE}.")}
    yield from ((other, _below(other)) for _, other in sorted(parts))


def _held(others: Sequence[str], tensors: Mapping[str, Any]) -> list[str]:
    """The candidates among `others` that are there. A personal model is made anew without any."""
    models: list[str] = []
    for model in others:
        if any(name.startswith(f"{_below(model)}.") for name in tensors):
            models.append(model)
    return models


def _below(model: str) -> str:
    return f"{_CANDIDATE}.{model}"


def _specs(shape: Shape, dimensions: int, others: Sequence[str]) -> dict[str, TensorSpec]:
    widths = {"": shape.features, **{_below(model): FEATURES[model] for model in others}}
    if dimensions > (least := min(widths.values())):
        raise UsageError(
            f"features of {least} numbers cannot be projected to {dimensions}",
            f"take --option dimensions=1 to {least}, or 0 for all",
        )
    all_specs: dict[str, TensorSpec] = {}
    for prefix, width in widths.items():
        for name, tensor in put_below(prefix, specs(shape.classes, dimensions or width)).items():
            all_specs[name] = tensor
    return all_specs


def put_below(prefix: str, tensors: Mapping[str, T]) -> dict[str, T]:
    """The tensors below the prefix of an encoder, which may be none."""
    return add_prefix(prefix, tensors) if prefix else dict(tensors)


def take_below(prefix: str, tensors: Mapping[str, T]) -> dict[str, T]:
    """The tensors that belong to the encoder of this prefix, which may be none,
    by their names without it.
    """
    return strip_prefix(prefix, tensors) if prefix else dict(tensors)


def _features(
    network: Network, received: Tensors, data: TrainingSet, dimensions: int, others: Sequence[str]
) -> Arrays:
    """Features of the images [n, VIEWS, d], by the prefix of their encoder."""
    from trainer.models.network import Network  # noqa: PLC0415  (imports torch)
    from trainer.statistics.features import projected_features  # noqa: PLC0415

    held = _held(others, received)
    networks = {
        "": network,
        **{_below(model): Network(model, network.shape.classes) for model in held},
    }
    return {
        prefix: projected_features(each, take_below(prefix, received), data, dimensions)
        for prefix, each in networks.items()
    }


def _collect(features: Arrays, labels: np.ndarray, classes: int) -> Arrays:
    sums: Arrays = {}
    for prefix, each in features.items():
        sums |= put_below(prefix, collect(each, labels, classes).arrays())
    return sums


def _check(sums: Arrays, others: Sequence[str]) -> None:
    for prefix in ("", *map(_below, others)):
        check(take_below(prefix, sums))


def _check_totals(totals: Arrays, nodes: int, others: Sequence[str]) -> None:
    for prefix in ("", *map(_below, others)):
        check_totals(Sums.of(take_below(prefix, totals)), nodes)


def _begin(broadcast: Arrays, totals: Arrays) -> Arrays:
    """The broadcast whose classifier is the head of all nodes,
    who are asked for no opinion of their own.
    """
    total = Sums.of(totals)
    head = lda_head.fit(total, total.without(total))
    return _with_classifier(broadcast, head.weight, head.bias, lda_head.expected_scale(head.spread))


def _begin_private(noise: float, broadcast: Arrays, totals: Arrays) -> Arrays:
    total = PrivateSums.of(totals).values()
    head = private_head.fit(total, no_images(*total.sums.shape).values(), noise, DIRECTIONS)
    return _with_classifier(
        broadcast, *private_head.express(head, total.centre), lda_head.expected_scale(head.spread)
    )


def _with_classifier(
    broadcast: Arrays, weight: np.ndarray, bias: np.ndarray, scale: float
) -> Arrays:
    largest = max(1.0, float(np.abs(weight).max()), float(np.abs(bias).max()))
    made = {"classifier.weight": weight, "classifier.bias": bias}
    scale = min(scale, _LARGEST / largest)
    return {
        **broadcast,
        **{name: (scale * value).astype(np.float32) for name, value in made.items()},
    }


def _deploy(
    network: Network, own: Tensors, others: Tensors, dimensions: int, *, novelty: bool
) -> Tensors:
    """The encoder, the length of its features, the head as their classifier,
    and on request what tells `novelty`.

    Projected features do not tell how far whole ones are from their mean.
    """
    mine, theirs = (Sums.of(_numpy(each)) for each in (own, others))
    head = lda_head.fit(theirs.combine(mine, np.add), mine)
    weight = (
        head.weight @ directions(network.shape.features, dimensions) if dimensions else head.weight
    )
    tells = novelty and not dimensions
    axes = (
        lda_head.class_axes(head.means, lda_head.estimate_whitening(head.spread)) if tells else None
    )
    novelty_or_empty = add_prefix(NOVELTY, _torch(axes._asdict(), others)) if axes else {}
    return (
        _personal(others, weight, head.bias, lda_head.expected_scale(head.spread))
        | novelty_or_empty
    )


def _personal(others: Tensors, weight: np.ndarray, bias: np.ndarray, scale: float) -> Tensors:
    made = {
        "classifier.weight": scale * weight,
        "classifier.bias": scale * bias,
        LENGTH: np.ones(()),
    }
    return select(others, ("encoder",)) | _torch(made, others)


def _numpy(tensors: Tensors) -> Arrays:
    return {name: value.cpu().numpy() for name, value in tensors.items() if PREFIX in name}


def _torch(arrays: Mapping[str, np.ndarray], beside: Tensors) -> Tensors:
    """Arrays as float32 tensors on the device of others."""
    import torch  # noqa: PLC0415  (the coordinator has none)

    device = next(iter(beside.values())).device
    return {
        name: torch.from_numpy(value.astype(np.float32)).to(device)
        for name, value in arrays.items()
    }


def _features_in_frame(network: Network, received: Tensors, data: TrainingSet) -> Arrays:
    """Features of the images [n, VIEWS, d] from the public centre,
    along the public directions, cut; and the centre.
    """
    from trainer.statistics.features import view_features  # noqa: PLC0415  (imports torch)
    from trainer.statistics.public_frame import public_frame  # noqa: PLC0415

    frame = public_frame(network, received, data)
    views = (
        (view_features(network, received, data) - frame.centre)
        @ frame.directions.T
        @ frame.directions
    )
    return {
        "": private_sums.cut(views),
        _CENTRE: np.broadcast_to(frame.centre, (len(views), len(frame.centre))),
    }


def _collect_with_centre(features: Arrays, labels: np.ndarray, classes: int) -> Arrays:
    centre = features[_CENTRE].mean(0) if len(labels) else np.zeros(features[_CENTRE].shape[1])
    return {**collect(features[""], labels, classes).arrays(), _CENTRE: centre}


def _release(
    noise: float,
    network: Network,
    received: Tensors,
    data: TrainingSet,
    sums: Arrays,
    normal: Normal,
) -> Arrays:
    from trainer.statistics.public_frame import public_frame  # noqa: PLC0415  (imports torch)

    frame = public_frame(network, received, data)
    return private_sums.release(
        Sums.of(sums), frame.centre, frame.directions, noise, normal
    ).arrays()


def _deploy_private(network: Network, own: Tensors, others: Tensors, noise: float) -> Tensors:
    """As `_deploy`. Class means as noisy as the others' tell nothing of novelty."""
    mine = Sums.of(arrays := _numpy(own))
    theirs = PrivateSums.of(_numpy(others)).values()
    head = private_head.fit(theirs, mine.values(), noise, DIRECTIONS)
    centre = theirs.centre if theirs.plants[0] else arrays[_CENTRE]
    return _personal(
        others, *private_head.express(head, centre), lda_head.expected_scale(head.spread)
    )
