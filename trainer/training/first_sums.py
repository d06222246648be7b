"""The model of a federation's first sums: what one message gives, before anybody trains.

It needs no image to be held out, since its heads are made anew without each group of images. So it
is what a node has from its second round on, and what training must beat on images that were held
out: where these cannot tell, it is deployed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from edge.bundle.comparison import TrainingGain
from trainer.data.class_folders import LabelledImages
from trainer.methods import PREVIEW, complete_options
from trainer.models.named_tensors import Arrays, select
from trainer.statistics.sums import PREFIX
from trainer.training.evaluation import paired_interval, predict_in_service
from trainer.training.participant import Participant, State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from broker_config.protocol.messages import Spec

# Probability that the trained model is the better one, from which training is shown to pay.
_SHOWN = 0.9


def first_spec(spec: Spec) -> Spec:
    """Return the spec of the federation that ends after its first sums."""
    return msgspec.structs.replace(
        spec,
        method=PREVIEW,
        options=complete_options(PREVIEW, {}),
        rounds=1,
        sends=(),
        relays={},
        statistics_first=False,
        first_totals=False,
    )


def first_node(node: Participant) -> Participant:
    """Return the node in that federation, with the images that were split off to judge.

    What its model tells of privacy is what the node has spent.
    """
    return node.fold(first_spec(node.spec), node.images.whole, node.account)


def take_first(node: Participant, state: State, broadcast: Arrays, *, counted: bool) -> Arrays:
    """Return what the model of the first sums is made of: encoder, and the other nodes' totals.

    Args:
        node: the participant.
        state: after the first round.
        broadcast: of the second one, whose encoder nobody has trained.
        counted: whether its totals hold the node's sums.

    Raises:
        EdgeNodeError: no nodes can have such totals.
    """
    return select(node.without_own(state, broadcast, counted=counted), ("encoder", PREFIX))


def measure_gain(
    own: Sequence[int],
    held_out: LabelledImages,
    first: tuple[LabelledImages, np.ndarray],
    trained: np.ndarray,
) -> TrainingGain:
    """Return what training has added on images that neither model has seen.

    Args:
        own: labels of the node's classes.
        held_out: the images that training has not seen.
        first: images that the first model was judged by, and its logits [m, C] for them.
        trained: logits [n, C] of the trained model for `held_out`.
    """
    places = {digest: place for place, digest in enumerate(first[0].digests)}
    rows = []
    for row, digest in enumerate(held_out.digests):
        if digest in places and held_out.labels[row] in own:
            rows.append(row)
    if not rows:
        return TrainingGain(images=0)
    labels = held_out.labels[rows]
    seen = [places[held_out.digests[row]] for row in rows]
    before = predict_in_service(first[1][seen], own) == labels
    after = predict_in_service(trained[rows], own) == labels
    groups = held_out.take(np.array(rows)).sets
    low, high = paired_interval(before, after, len(groups) / len(rows))
    return TrainingGain(
        images=len(rows),
        first=float(before.mean()),
        trained=float(after.mean()),
        low=low,
        high=high,
        is_shown=_is_better(after.astype(int) - before, groups),
    )


def _is_better(changes: np.ndarray, groups: Sequence[Sequence[int]]) -> bool:
    """Return whether verdicts that change do so for the better, in all likelihood.

    A sign test with a uniform prior: three groups of images that only the trained model is right
    about, and none that only the first one is, just suffice.

    Args:
        changes: 1 where only the trained model is right, -1 where only the first one is; [n].
        groups: positions of images that are one piece of evidence.
    """
    from scipy.special import betainc  # noqa: PLC0415  (slow to import)

    means = np.array([changes[group].mean() for group in groups])
    won = float(means[means > 0].sum())
    lost = -float(means[means < 0].sum())
    return bool(1 - betainc(1 + won, 1 + lost, 0.5) >= _SHOWN)
