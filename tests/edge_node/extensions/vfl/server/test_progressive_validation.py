"""How well new products are judged before anybody learns from them,
and what is said of a run that is of no use.
"""

import math

import pytest
import torch

from broker_config.protocol.messages import Validation
from edge_node.extensions.vfl.server.progressive_validation import ProgressiveValidation
from tests.support.vfl_runs import vfl_spec


def classes(*labels: int) -> torch.Tensor:
    return torch.tensor(labels)


def sure(*answers: int, of: int = 3) -> torch.Tensor:
    """Logits [N, classes] of products that are judged so."""
    return 20 * torch.eye(of)[list(answers)]


def judged(labels: torch.Tensor, answers: torch.Tensor, of: int = 2) -> ProgressiveValidation:
    found = ProgressiveValidation(vfl_spec(classes=tuple("abc"[:of])))
    found.add(20 * torch.eye(of)[answers], labels)
    return found


def trouble(found: ProgressiveValidation, loss: float, *, ended: bool = False) -> str:
    return found.find_trouble(loss, found.score(), ended=ended)


def test_what_is_right_stands_beside_what_needs_no_model() -> None:
    found = ProgressiveValidation(vfl_spec(classes=("a", "b", "c")))
    assert found.score() is None
    found.add(sure(0, 0, 0), classes(0, 0, 1))
    found.add(sure(1), classes(1))
    assert found.score() == Validation(products=4, accuracy=0.75, recall=0.75, baseline=0.5)
    found.add(sure(0), classes(0))
    score = found.score()
    assert score
    assert (score.products, score.accuracy, score.recall) == (5, 0.8, 0.75)


def test_only_the_newest_thousand_products_count() -> None:
    found = ProgressiveValidation(vfl_spec(classes=("a", "b", "c")))
    found.add(sure(*[1] * 700), classes(*[0] * 700))
    found.add(sure(*[2] * 900), classes(*[2] * 900))
    score = found.score()
    assert score
    assert (score.products, score.accuracy) == (1000, 0.9)


def test_of_numbers_the_error_stands_beside_that_of_their_mean() -> None:
    found = ProgressiveValidation(vfl_spec(classes=("0", "10", "20"), reading="expectation"))
    found.add(sure(1, 1), classes(0, 2))
    assert found.score() == Validation(
        products=2, rmse=pytest.approx(10), baseline=pytest.approx(10)
    )
    found = ProgressiveValidation(vfl_spec(classes=("0", "10", "20"), reading="expectation"))
    found.add(torch.tensor([[0.0, 0.0, -50.0]]), classes(0))
    assert found.score() == Validation(products=1, rmse=pytest.approx(5), baseline=0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_model_that_always_says_the_same_is_called_useless_once(seed: int) -> None:
    labels = (torch.rand(3000, generator=torch.Generator().manual_seed(seed)) < 0.1).long()
    found = judged(labels, torch.zeros(3000, dtype=torch.int64))
    said = trouble(found, 0.4)
    assert said.startswith("nothing of use is learnt yet: of the newest 1000 products")
    assert "--chunk" in said
    assert not trouble(found, 0.4, ended=True)


def test_a_model_that_finds_what_is_rare_is_of_use_though_it_is_not_right_more_often() -> None:
    labels, answers = torch.zeros(1000, dtype=torch.int64), torch.zeros(1000, dtype=torch.int64)
    labels[:50], answers[:40], answers[100:140] = 1, 1, 1
    assert not trouble(judged(labels, answers), 0.1, ended=True)


@pytest.mark.parametrize(("bad", "told"), [(0, False), (19, False), (20, True)])
def test_where_nearly_all_products_are_of_one_class_nothing_can_be_said(
    bad: int, told: bool
) -> None:
    labels = torch.zeros(1000, dtype=torch.int64)
    labels[:bad] = 1
    assert (
        bool(trouble(judged(labels, torch.zeros(1000, dtype=torch.int64)), 0.1, ended=True)) == told
    )
    assert not trouble(judged(labels, labels), 0.1, ended=True)


@pytest.mark.parametrize(
    ("products", "ended", "told"), [(2999, False, False), (2999, True, True), (499, True, False)]
)
def test_of_few_products_nothing_is_said_before_the_end(
    products: int, ended: bool, told: bool
) -> None:
    labels = torch.zeros(products, dtype=torch.int64)
    labels[-50:] = 1
    found = judged(labels, torch.zeros(products, dtype=torch.int64))
    assert bool(trouble(found, 0.3, ended=ended)) == told


def test_of_numbers_no_better_than_their_mean_is_useless_unless_they_are_all_the_same() -> None:
    spec = vfl_spec(classes=("0", "10", "20"), reading="expectation")
    found = ProgressiveValidation(spec)
    found.add(sure(*[1] * 1000), classes(*[0, 2] * 500))
    assert "always their mean" in trouble(found, 1.0, ended=True)
    found = ProgressiveValidation(spec)
    found.add(sure(*[1] * 1000), classes(*[1] * 1000))
    assert not trouble(found, 1.0, ended=True)


@pytest.mark.parametrize("high", [5.0, math.inf, math.nan])
def test_steps_that_are_too_large_are_told_once_the_loss_stays_above_that_of_guessing(
    high: float,
) -> None:
    found = judged(classes(0), classes(0))
    # one round that overshoots is none
    for loss in (0.7, 9.0, 0.6, 0.6, 0.5, 0.5, 0.5, 0.4, 0.4, 0.4, 0.4):
        assert not trouble(found, loss)
    said = [trouble(found, high) for _ in range(20)]
    assert sum(map(bool, said)) == 1
    assert "steps are too large" in "".join(said)
    assert "--eta" in "".join(said)
