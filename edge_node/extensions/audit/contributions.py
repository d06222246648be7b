"""Contributions to the first rounds of a federation, as its coordinator has them: one by one,
or as a sum.
"""

from collections.abc import Callable, Sequence

import numpy as np

from broker_config.protocol.messages import Spec
from broker_config.protocol.round_contents import count_training_rounds, is_statistics_round
from edge_node.extensions.audit.observation import Observation
from edge_node.extensions.audit.parts import draw_labelled
from trainer.data.class_folders import Images, LabelledImages
from trainer.federation.update_codec import decode_contribution, encode_contribution, is_coded
from trainer.models.named_tensors import Arrays
from trainer.seeding import generator, key_to_seed
from trainer.training.participant import Contributed, Participant

MOST_OTHERS = 4
"""Plants that are trained beside one whose contribution is masked: with more,
a sum tells less of it.
"""

Advance = Callable[[], None]


def observe(
    spec: Spec, broadcast: Arrays, images: LabelledImages, seed: int, advance: Advance
) -> list[Observation]:
    """What a coordinator would have of a plant with these images after a federation's first rounds.

    Args:
        spec: of the federation.
        broadcast: its first one.
        images: the plant's.
        seed: of the images that others are given where contributions are masked.
        advance: called when a plant has contributed.

    Returns:
        One observation of a round of training and one of a round of sums, as far as the federation
        has these.
    """
    plant = Participant(spec, "plant", Images(images, None), secret=_secret(seed, "plant"))
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
    plant: Participant,
    contributed: Contributed,
    broadcast: Arrays,
    round_: int,
    seed: int,
    advance: Advance,
) -> Observation:
    """What a coordinator has of what a plant has contributed to a round,
    which started from `broadcast`.

    Where contributions are masked, others are trained beside the plant, and it has the sum. They
    have drawn surfaces, about as many as the plant has images, some of every class.
    """
    spec = plant.spec
    made = [contributed]
    for number, share in enumerate(_draw_others(spec, round_, len(plant.data.labels), seed)):
        name = f"other-{number}"
        other = Participant(spec, name, Images(share, None), secret=_secret(seed, name))
        made.append(_contribute(other, broadcast, round_, advance))
    is_statistics = is_statistics_round(spec, round_)
    tensors = contributed.tensors
    if len(made) > 1:
        tensors = _add(made) if is_statistics else _average(made)
    received = plant.received(broadcast)
    return Observation(spec, plant.network, received, tensors, is_statistics)


def _contribute(
    participant: Participant, broadcast: Arrays, round_: int, advance: Advance
) -> Contributed:
    spec = participant.spec
    contributed = participant.contribute(participant.start(broadcast), broadcast, round_)[1]
    advance()
    if spec.codec == "none" or is_statistics_round(spec, round_):
        return contributed
    # the coordinator has what travels
    blob = encode_contribution(spec, contributed.tensors, broadcast)
    if not is_coded(blob):
        return contributed
    return contributed._replace(tensors=decode_contribution(spec, round_, blob, broadcast))


def audited_rounds(spec: Spec) -> list[int]:
    """The first round of each kind: of training, and of sums."""
    first = [1] if spec.statistics_first else []
    training = (
        [1 + len(first)] if count_training_rounds(spec) and (spec.sends or spec.relays) else []
    )
    rounds = [spec.rounds] if spec.statistics and not first else []
    return [*first, *training, *rounds]


def count_steps(spec: Spec) -> int:
    """How often `observe` says that a plant has contributed."""
    return sum(1 + count_others(spec, round_) for round_ in audited_rounds(spec))


def count_others(spec: Spec, round_: int) -> int:
    """Plants whose contributions are at least in a sum with a masked one: of statistics all,
    or MOST_OTHERS.
    """
    if not spec.mask_threshold:
        return 0
    nodes = spec.nodes if is_statistics_round(spec, round_) else spec.mask_threshold
    return min(MOST_OTHERS, nodes - 1)


def _add(made: Sequence[Contributed]) -> Arrays:
    sums = {}
    for name in made[0].tensors:
        sums[name] = np.sum([each.tensors[name] for each in made], 0)
    return sums


def _average(made: Sequence[Contributed]) -> Arrays:
    weights = [each.weight for each in made]
    averages = {}
    for name in made[0].tensors:
        averages[name] = np.average([each.tensors[name] for each in made], 0, weights).astype(
            np.float32
        )
    return averages


def _draw_others(spec: Spec, round_: int, count: int, seed: int) -> list[LabelledImages]:
    """Images of other plants: `count` or more, two of every class at least,
    and otherwise in shares of its own.
    """
    classes = len(spec.classes)
    drawn = []
    for number in range(count_others(spec, round_)):
        random = generator(seed, "other plant", number)
        more = random.choice(
            classes, max(0, count - 2 * classes), p=random.dirichlet(np.ones(classes))
        )
        labels = np.sort(np.concatenate([np.repeat(np.arange(classes), 2), more]))
        drawn.append(draw_labelled(labels, spec.preprocessing.size, seed, number + 1))
    return drawn


def _secret(seed: int, name: str) -> str:
    """What a participant's noise is drawn by: nothing of it leaves the plant,
    so it may follow from a seed.
    """
    return f"{key_to_seed(seed, name, 'noise'):064x}"
