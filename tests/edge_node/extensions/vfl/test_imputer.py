"""Embeddings of absent sensors, learnt from the others' embeddings."""

from itertools import product

import pytest
import torch
from torch import Tensor

from broker_config.protocol.errors import UsageError
from edge_node.extensions.vfl.imputer import LARGEST, Imputer


def linked(
    sizes: list[int], seed: int, rows: int = 600, noise: float = 0.0, hidden: int = 3
) -> list[Tensor]:
    """Embeddings of products with a few hidden properties that every sensor sees,
    each in its own way; not centred.
    """
    random = torch.Generator().manual_seed(seed)
    views = [torch.randn(hidden, size, generator=random) for size in sizes]
    properties = torch.randn(rows, hidden, generator=random)
    return [
        properties @ view + 5 + noise * torch.randn(rows, view.shape[1], generator=random)
        for view in views
    ]


def error(ours: Tensor, theirs: Tensor) -> float:
    """Mean squared, as a share of the variance."""
    return float(((ours - theirs) ** 2).mean() / theirs.var(0).mean())


@pytest.mark.parametrize("pattern", [p for p in product([True, False], repeat=3) if any(p)])
def test_what_is_a_linear_function_of_the_others_is_recovered_for_every_pattern(
    pattern: tuple[bool, ...],
) -> None:
    embeddings = linked([4, 6, 5], seed=sum(pattern))
    imputer = Imputer([4, 6, 5])
    imputer.update([each[:400] for each in embeddings])
    new = [each[400:] for each in embeddings]
    filled = imputer.impute(
        [each if there else None for each, there in zip(new, pattern, strict=True)], 200
    )
    for ours, theirs, there in zip(filled, new, pattern, strict=True):
        assert torch.equal(ours, theirs) if there else error(ours, theirs) < 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_on_correlated_embeddings_it_is_better_than_the_mean_and_better_with_more_sensors(
    seed: int,
) -> None:
    sizes = [4] * 8
    embeddings = linked(sizes, seed, rows=2000, noise=1.0, hidden=6)
    imputer = Imputer(sizes)
    for start in range(0, 1500, 100):  # online
        imputer.update([each[start : start + 100] for each in embeddings])
    new = [each[1500:] for each in embeddings]
    errors = [
        error(imputer.impute([*new[:known], *[None] * (8 - known)], 500)[7], new[7])
        for known in range(8)
    ]
    assert abs(errors[0] - 1) < 0.1  # nobody there: the mean
    assert errors[1] < 0.95
    assert errors[7] < errors[4] < errors[1]
    assert errors[7] < 0.5


def test_rows_of_several_patterns_are_filled_each_by_its_own() -> None:
    embeddings = linked([2, 3, 2], seed=1, noise=0.3)
    imputer = Imputer([2, 3, 2])
    imputer.update(embeddings)
    present = torch.rand(600, 3, generator=torch.Generator().manual_seed(2)) < 0.6
    holed = [
        each.where(there[:, None], torch.inf)
        for each, there in zip(embeddings, present.T, strict=True)
    ]
    filled = imputer.impute_rows(holed, present)
    for row in range(0, 600, 7):
        alone = [
            each[row : row + 1] if there else None
            for each, there in zip(embeddings, present[row], strict=True)
        ]
        for ours, theirs in zip(filled, imputer.impute(alone, 1), strict=True):
            torch.testing.assert_close(ours[row : row + 1], theirs)


def test_the_weights_of_a_pattern_are_plain_matrices_that_do_the_same() -> None:
    embeddings = linked([2, 3, 2], seed=3, noise=0.3)
    imputer = Imputer([2, 3, 2])
    imputer.update(embeddings)
    matrix, offset = imputer.regression([True, False, True])
    # what stands for the absent one does not count
    given = [embeddings[0], torch.full((600, 3), 1e6), embeddings[2]]
    filled = imputer.impute([embeddings[0], None, embeddings[2]], 600)
    torch.testing.assert_close(
        torch.cat(given, 1) @ matrix + offset, torch.cat(filled, 1), rtol=1e-4, atol=1e-4
    )


def test_before_anything_was_learnt_absent_embeddings_are_zeros() -> None:
    there = torch.ones(5, 2)
    filled = Imputer([2, 3]).impute([there, None], 5)
    assert torch.equal(filled[0], there)
    assert torch.equal(filled[1], torch.zeros(5, 3))
    imputer = Imputer([2, 3])
    imputer.update([torch.empty(0, 2), torch.empty(0, 3)])
    assert torch.equal(imputer.impute([there, None], 5)[1], torch.zeros(5, 3))


@pytest.mark.parametrize("rows", [1, 5, 15, 400])
def test_dead_and_copied_features_and_few_rows_do_no_harm(rows: int) -> None:
    [first, second] = linked([4, 3], seed=rows, rows=rows + 100)
    copies = first + 1e-4 * torch.randn(first.shape, generator=torch.Generator().manual_seed(rows))
    first = torch.cat(
        [first, copies, torch.zeros(len(first), 3), torch.full((len(first), 1), 7.0)], 1
    )
    second = torch.cat([second, torch.zeros(len(second), 2)], 1)
    imputer = Imputer([12, 5])
    imputer.update([first[:rows], second[:rows]])
    filled = imputer.impute([first[rows:], None], 100)[1]
    assert torch.equal(filled[:, 3:], torch.zeros(100, 2))
    assert error(filled[:, :3], second[rows:, :3]) < {1: 10, 5: 0.5, 15: 0.01, 400: 0.001}[rows]


def test_weights_of_features_that_differ_by_little_stay_small_enough_for_float32() -> None:
    [first, second] = linked([4, 3], seed=1, noise=0.1)
    imputer = Imputer([8, 3])
    imputer.update([torch.cat([first, first + 1e-4 * torch.randn(first.shape)], 1), second])
    assert imputer.regression([True, False]).matrix.abs().max() < 5


def test_it_follows_embeddings_that_move() -> None:
    imputer = Imputer([3, 3])
    new = linked([3, 3], seed=2)
    for each in range(100):
        if each == 50:
            assert error(imputer.impute([new[0], None], 600)[1], new[1]) > 0.5
        imputer.update(linked([3, 3], seed=1 if each < 50 else 2))
    assert error(imputer.impute([new[0], None], 600)[1], new[1]) < 0.1


def test_it_goes_on_after_a_restart_as_if_there_had_been_none() -> None:
    rounds = [linked([3, 4], seed) for seed in range(4)]
    through, first, second = (Imputer([3, 4]) for _ in range(3))
    for each in rounds:
        through.update(each)
    for each in rounds[:2]:
        first.update(each)
    second.regression([True, False])
    second.restore({name: value.clone() for name, value in first.state().items()})
    assert second.regression([True, False]).offset.any()
    for each in rounds[2:]:
        second.update(each)
    for one, other in zip(
        through.regression([True, False]), second.regression([True, False]), strict=True
    ):
        assert torch.equal(one, other)


def test_embeddings_too_long_for_it_are_refused() -> None:
    with pytest.raises(UsageError, match="too long"):
        Imputer([LARGEST, 1])
