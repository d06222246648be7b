"""What a coordinator has of one plant after a round: its contribution, or a sum in which it is."""

import secrets
from collections.abc import Callable, Sequence

import numpy as np

from broker_config.protocol.messages import Spec
from broker_config.protocol.round_contents import count_training_rounds, is_statistics_round
from trainer.audit.observation import Observation
from trainer.audit.parts import draw_labelled
from trainer.data.class_folders import Images, LabelledImages
from trainer.models.named_tensors import Arrays
from trainer.training.participant import Contributed, Participant

MOST_OTHERS = 4
"""Plants that are trained beside one whose contribution is masked: with more, a sum tells less of it."""

Advance = Callable[[], None]


def observe(spec: Spec, broadcast: Arrays, images: LabelledImages, seed: int, advance: Advance) -> list[Observation]:
    """What a coordinator would have of a plant with these images after a federation's first rounds.

    Args:
        spec: of the federation.
        broadcast: its first one.
        images: the plant's.
        seed: of the images that others are given where contributions are masked.
        advance: called when a plant has contributed.

    Returns:
        One observation of a round of training and one of a round of sums, as far as the federation has these.
    """
    plant = Participant(spec, "plant", Images(images, None), secret=secrets.token_hex(32))
    found = []
    for round_ in audited_rounds(spec):
        contributed = _contribute(plant, broadcast, round_, advance)
        observation = observe_round(plant, contributed, broadcast, round_, seed, advance)
        found.append(observation)
        statistics = plant.method.statistics
        if round_ == 1 and observation.is_statistics and statistics and statistics.begin:
            broadcast = statistics.begin(broadcast, observation.tensors)
    return found


def observe_round(
    plant: Participant, contributed: Contributed, broadcast: Arrays, round_: int, seed: int, advance: Advance
) -> Observation:
    """What a coordinator has of what a plant has contributed to a round, which started from `broadcast`.

    Where contributions are masked, others are trained beside the plant, and it has the sum. They have drawn surfaces,
    as many as the plant has images, of all classes.
    """
    spec, made = plant.spec, [contributed]
    for number, share in enumerate(_draw_others(spec, len(plant.data.labels), seed)):
        other = Participant(spec, f"other-{number}", Images(share, None), secret=secrets.token_hex(32))
        made.append(_contribute(other, broadcast, round_, advance))
    is_statistics, tensors = is_statistics_round(spec, round_), contributed.tensors
    if len(made) > 1:
        tensors = _add(made) if is_statistics else _average(made)
    received = plant.received(broadcast)
    return Observation(spec, plant.network, received, tensors, is_statistics)


def _contribute(participant: Participant, broadcast: Arrays, round_: int, advance: Advance) -> Contributed:
    contributed = participant.contribute(participant.start(broadcast), broadcast, round_)[1]
    advance()
    return contributed


def audited_rounds(spec: Spec) -> list[int]:
    """The first round of each kind: of training, and of sums."""
    first = [1] if spec.statistics_first else []
    training = [1 + len(first)] if count_training_rounds(spec) and (spec.sends or spec.relays) else []
    return [*first, *training, *([spec.rounds] if spec.statistics and not first else [])]


def count_steps(spec: Spec) -> int:
    """How often `observe` says that a plant has contributed."""
    return len(audited_rounds(spec)) * (1 + count_others(spec))


def count_others(spec: Spec) -> int:
    """Plants that are needed beside one whose contribution is masked."""
    return min(MOST_OTHERS, max(0, spec.mask_threshold - 1))


def _add(made: Sequence[Contributed]) -> Arrays:
    return {name: np.sum([each.tensors[name] for each in made], 0) for name in made[0].tensors}


def _average(made: Sequence[Contributed]) -> Arrays:
    weights = [each.weight for each in made]
    return {
        name: np.average([each.tensors[name] for each in made], 0, weights).astype(np.float32)
        for name in made[0].tensors
    }


def _draw_others(spec: Spec, count: int, seed: int) -> list[LabelledImages]:
    """Images of other plants: as many of every class as makes `count`, two of each at least."""
    classes = len(spec.classes)
    labels = np.resize(np.arange(classes), max(count, 2 * classes))
    return [draw_labelled(labels, spec.preprocessing.size, seed, number + 1) for number in range(count_others(spec))]
