"""FedTFI's losses by hand."""

import pytest
import torch

from edge_node.extensions.textures.losses import draw_others, triplet_gaps


def test_the_triplet_loss_by_hand() -> None:
    """|a - p| = 5, |a - n| = 13, m = 1: 0 (-7); |a - p| = 5, |a - n| = 4, m = 1: 2;
    equal ones: m.
    """
    a = torch.zeros(3, 2, requires_grad=True)
    p, n = torch.tensor([[3.0, 4], [3, 4], [0, 0]]), torch.tensor([[5.0, 12], [0, 4], [0, 0]])
    found = triplet_gaps(a, p, n, 1.0)
    assert found.tolist() == [0, 2, 1]
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert a.grad is not None
    assert a.grad.isfinite().all()


@pytest.mark.parametrize("seed", range(5))
def test_a_negative_among_samples_is_any_of_another_label(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    labels = torch.tensor([0, 0, 1, 2, 2, 2])
    drawn = [draw_others(labels, random) for _ in range(60)]
    assert all(there.all() for _, there in drawn)
    assert all((labels[rows] != labels).all() for rows, _ in drawn)
    assert {int(rows[0]) for rows, _ in drawn} == {2, 3, 4, 5}


def test_of_images_of_one_label_none_is_a_negative() -> None:
    assert not draw_others(torch.tensor([1, 1, 1]), torch.Generator())[1].any()
