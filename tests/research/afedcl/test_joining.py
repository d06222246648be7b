"""What joining gives a node: three candidates among its own classes,
rules that see few images, what is deployed.
"""

import numpy as np
import pytest
from msgspec.structs import replace

from research.afedcl.joining import (
    ALONE,
    MIXED,
    MIXINGS,
    RULES,
    SIZES,
    TOGETHER,
    Candidates,
    Validation,
    candidates,
    choose,
    judge,
    pairs,
    served,
)
from tests.support.finished_cells import NEU, answering, finished

LOGITS = MIXINGS["mean of logits"]


def node(probabilities: list[list[float]], labels: list[int]) -> Candidates:
    """One node whose own model gives 9 : 1 for class 1 of its classes 1 and 2,
    the federation's these probabilities.
    """
    alone = np.log(np.tile([0.0001, 0.9, 0.1], (len(labels), 1)))
    joined = np.log(np.array(probabilities))
    cells = (
        answering(finished("local", 0.5), labels, alone),
        answering(finished("fedavg", 0.5), labels, joined),
    )
    found = candidates(cells[0].nodes[0], cells[1].nodes[0], LOGITS)
    assert found
    return found


def test_candidates_are_judged_among_the_nodes_own_classes() -> None:
    found = node([[0.8, 0.15, 0.05], [0.8, 0.15, 0.05]], [1, 2])
    # class 0 is the favourite, but the node has no image of it
    assert found.right[TOGETHER].tolist() == [True, False]
    assert np.exp(-found.loss[TOGETHER]) == pytest.approx([0.75, 0.25], abs=1e-3)


def test_of_two_models_that_disagree_the_surer_one_prevails_in_the_mix() -> None:
    found = node([[0.01, 0.01, 0.98], [0.1, 0.3, 0.6], [0.1, 0.8, 0.1]], [2, 2, 1])
    assert found.right.tolist() == [[False, False, True], [True, True, True], [True, False, True]]


@pytest.mark.parametrize(
    ("mixing", "share"),
    [
        ("mean of logits", 0.75),  # sqrt(0.9 * 0.5) : sqrt(0.1 * 0.5) = 3 : 1
        ("mean of probabilities", 0.7),
        ("logits of equal spread", 0.75),  # a model without any spread stays as it is
    ],
)
def test_mixing_by_hand(mixing: str, share: float) -> None:
    found = MIXINGS[mixing](np.log([[0.9, 0.1]]), np.log([[0.5, 0.5]]))
    assert np.exp(found)[0, 0] / np.exp(found).sum() == pytest.approx(share)


def test_logits_of_equal_spread_let_a_timid_model_speak_as_loudly() -> None:
    bold, timid = np.array([[5.0, -5.0], [5.0, -5.0]]), np.array([[-0.2, 0.2], [0.1, -0.1]])
    assert LOGITS(bold, timid).argmax(1).tolist() == [0, 0]
    assert MIXINGS["logits of equal spread"](bold, timid).argmax(1).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("right", "chosen"),
    [
        # Right answers of alone, together and mixed among 4 images; then the choices of the rules,
        # in their order.
        ((4, 3, 3), (TOGETHER, MIXED, ALONE, ALONE, ALONE, TOGETHER, MIXED)),
        ((3, 3, 3), (TOGETHER, MIXED, TOGETHER, MIXED, ALONE, TOGETHER, MIXED)),
        ((2, 3, 3), (TOGETHER, MIXED, TOGETHER, MIXED, TOGETHER, TOGETHER, MIXED)),
        ((3, 4, 3), (TOGETHER, MIXED, TOGETHER, TOGETHER, TOGETHER, TOGETHER, MIXED)),
        ((4, 4, 3), (TOGETHER, MIXED, TOGETHER, TOGETHER, ALONE, TOGETHER, MIXED)),
        ((4, 0, 0), (TOGETHER, MIXED, ALONE, ALONE, ALONE, ALONE, ALONE)),
    ],
)
def test_what_each_rule_chooses(right: tuple[int, int, int], chosen: tuple[int, ...]) -> None:
    table = np.array([[number < count for number in range(4)] for count in right])
    seen = Validation(table, 1.0 - table)
    assert tuple(rule(seen) for rule in RULES.values()) == chosen


def test_a_rule_sees_as_many_images_as_it_may_of_every_class_alike_and_others_judge_it() -> None:
    labels = np.repeat([0, 1], [24, 6])
    numbers = np.arange(30.0)
    draws: list[set[int]] = []

    def rule(seen: Validation) -> int:
        draws.append({int(number) for number in seen.loss[ALONE]})
        return TOGETHER

    right = np.array([np.ones(30), labels == 1, np.zeros(30)], bool)
    outcomes = choose(Candidates(right, np.tile(numbers, (3, 1)), labels), {"spy": rule}, 10)["spy"]
    assert all(len(draw) == 10 and sum(number >= 24 for number in draw) == 5 for draw in draws)
    assert len({frozenset(draw) for draw in draws}) == len(draws) == len(outcomes) > 1
    # one image of class 1 is left
    assert {round(each.gain, 6) for each in outcomes} == {round(1 / 20 - 1, 6)}


@pytest.mark.parametrize("size", SIZES)
def test_choices_are_the_same_every_time(size: int) -> None:
    found = node([[0.1, 0.3, 0.6], [0.1, 0.6, 0.3]] * 20, [1, 1, 2, 2] * 10)
    assert choose(found, RULES, size) == choose(found, RULES, size)


@pytest.mark.parametrize(
    ("wrong", "below", "worse"),
    [(0, False, False), (1, True, False), (6, True, False), (20, True, True)],
)
def test_a_node_is_worse_off_for_certain_only_beyond_the_margin(
    wrong: int, below: bool, worse: bool
) -> None:
    right = np.ones((3, 60), bool)
    right[TOGETHER, :wrong] = False
    found = judge(Candidates(right, np.zeros((3, 60)), np.zeros(60, int)), TOGETHER)
    assert (found.gain, found.below, found.worse) == (pytest.approx(-wrong / 60), below, worse)
    assert found.regret == pytest.approx(wrong / 60)


def test_cells_are_paired_with_the_one_of_their_setting_and_seed_that_trained_alone() -> None:
    alone = [finished("local", 0.5, seed) for seed in (0, 1)]
    joined = [finished("fedavg", 0.5, seed) for seed in (1, 2)]
    elsewhere = finished("fedavg", 0.5, setting=replace(NEU, samples=20))
    assert list(pairs([*alone, *joined, elsewhere])) == [(alone[1], joined[0])]


def test_nodes_whose_outputs_are_not_stored_are_left_out_and_other_images_refused() -> None:
    stored = answering(finished("local", 0.5), [0, 1], np.zeros((2, 2))).nodes[0]
    assert candidates(stored, finished("fedavg", 0.5).nodes[0], LOGITS) is None
    other = answering(finished("fedavg", 0.5), [1, 1], np.zeros((2, 2))).nodes[0]
    with pytest.raises(ValueError, match="other images"):
        candidates(stored, other, LOGITS)


def test_a_class_that_was_never_taught_takes_an_image_if_five_times_as_likely() -> None:
    labels, alone = [1, 1, 2], np.log(np.tile([0.0001, 0.9, 0.1], (3, 1)))
    joined = np.log([[0.8, 0.15, 0.05], [0.7, 0.25, 0.05], [0.2, 0.1, 0.7]])
    cells = (
        answering(finished("local", 0.5), labels, alone),
        answering(finished("fedavg", 0.5), labels, joined),
    )
    found = served(cells[0].nodes[0], cells[1].nodes[0])
    assert found is not None
    assert found.right[ALONE].tolist() == [True, True, False]
    # 0.8 / 5 > 0.15, but 0.7 / 5 < 0.25
    assert found.right[TOGETHER].tolist() == [False, True, True]
