"""FedTFI's losses by hand."""

import torch

from trainer.methods.fedtfi.losses import triplet_gaps


def test_the_triplet_loss_by_hand() -> None:
    """|a - p| = 5, |a - n| = 13, m = 1: 0 (-7); |a - p| = 5, |a - n| = 4, m = 1: 2; equal ones: m."""
    a = torch.zeros(3, 2, requires_grad=True)
    p, n = torch.tensor([[3.0, 4], [3, 4], [0, 0]]), torch.tensor([[5.0, 12], [0, 4], [0, 0]])
    found = triplet_gaps(a, p, n, 1.0)
    assert found.tolist() == [0, 2, 1]
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert a.grad is not None
    assert a.grad.isfinite().all()
