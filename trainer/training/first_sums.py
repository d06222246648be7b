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
from trainer.statistics.label_doubts import log_softmax
from trainer.statistics.lda_head import fit_scale
from trainer.statistics.sums import PREFIX
from trainer.training.evaluation import paired_interval, predict_in_service, service_logits
from trainer.training.participant import Participant, State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from broker_config.protocol.messages import Spec

# As in `frozen_heads`: images of one plant are less evidence than as many independent ones.
_TEMPER = 0.5
_ODDS = 3.0  # of the first model before any evidence


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
    """Return the node in that federation, with the images that were split off to judge."""
    return node.fold(first_spec(node.spec), node.images.whole)


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
    logits = [first[1][[places[held_out.digests[row]] for row in rows]], trained[rows]]
    right = [predict_in_service(each, own) == labels for each in logits]
    likelihoods = []
    for each in logits:
        scaled = service_logits(fit_scale(each, labels, 1) * each, own)
        likelihoods.append(log_softmax(scaled)[np.arange(len(rows)), labels])
    groups = held_out.take(np.array(rows)).sets
    difference = likelihoods[1] - likelihoods[0]
    evidence = _TEMPER * sum(float(difference[group].mean()) for group in groups)
    low, high = paired_interval(right[0], right[1], len(groups) / len(rows))
    return TrainingGain(
        images=len(rows),
        first=float(right[0].mean()),
        trained=float(right[1].mean()),
        low=low,
        high=high,
        is_shown=bool(evidence > np.log(_ODDS) and right[1].sum() >= right[0].sum()),
    )
