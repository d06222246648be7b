"""The grid of masked contributions: how exact it is, and that nothing runs over."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_config.protocol.messages import TensorSpec
from broker_config.protocol.round_contents import MASKED_WEIGHT
from trainer.federation.masking import grid
from trainer.models.named_tensors import Arrays


def contribute(
    tensors: list[Arrays], weights: list[float], broadcast: Arrays, nodes: int
) -> tuple[Arrays, dict[str, TensorSpec]]:
    """What some of `nodes` nodes contribute, added up, and the scales."""
    scales = {
        name: TensorSpec(each.shape, grid.scale_for(each, nodes))
        for name, each in broadcast.items()
    }
    sums: Arrays = {}
    for each, weight in zip(tensors, weights, strict=True):
        words = grid.encode(each.items(), broadcast, scales, nodes, weight)
        sums = {
            name: np.asarray(sums.get(name, np.uint32(0)) + value, np.uint32)
            for name, value in words.items()
        }
    return sums, scales


@given(st.integers(3, 200), st.integers(0, 2**32), st.floats(0.001, 1))
def test_the_mean_is_as_exact_as_is_said(nodes: int, seed: int, largest: float) -> None:
    """Half a step of each contribution, by the mean of their weights;
    and the rounding to float32.
    """
    generator = np.random.default_rng(seed)
    broadcast = {
        "a": generator.normal(0, 0.3, 50).astype(np.float32),
        "b": np.float32(0.1) * np.ones((), np.float32),
    }
    weights = [float(each) for each in generator.uniform(0.001, largest, nodes)]
    tensors = [
        {
            name: np.asarray(each + generator.normal(0, 0.05, each.shape), np.float32)
            for name, each in broadcast.items()
        }
        for _ in range(nodes)
    ]
    sums, scales = contribute(tensors, weights, broadcast, nodes)
    mean = grid.decode(sums, broadcast, scales, nodes)
    shares = [max(1, round(each * 2**24)) for each in weights]
    for name in broadcast:
        exact = sum(
            s * t[name].astype(np.float64) for s, t in zip(shares, tensors, strict=True)
        ) / sum(shares)
        step = 2.0 ** -scales[name].scale / (sum(shares) / nodes * 2.0**-24)
        assert np.abs(mean[name] - exact).max() <= 0.5 * step + np.abs(exact).max() * 2.0**-24
        assert mean[name].dtype == np.float32


@pytest.mark.parametrize("nodes", [3, 4, 10, 100, 200])
def test_the_largest_contributions_of_all_nodes_do_not_run_over(nodes: int) -> None:
    broadcast = {"a": np.array([0.5, -0.5], np.float32)}
    far = [{"a": np.array([1e6, -1e6], np.float32)} for _ in range(nodes)]
    sums, scales = contribute(far, [1.0] * nodes, broadcast, nodes)
    mean = grid.decode(sums, broadcast, scales, nodes)["a"]
    assert mean == pytest.approx([0.5 + 0.5, -0.5 - 0.5])


def test_what_nobody_has_moved_stays_as_it_was_bit_for_bit() -> None:
    broadcast = {"a": np.random.default_rng(1).normal(size=100).astype(np.float32)}
    sums, scales = contribute([broadcast] * 5, [0.2, 1.0, 0.001, 0.7, 0.3], broadcast, 5)
    assert grid.decode(sums, broadcast, scales, 5)["a"].tobytes() == broadcast["a"].tobytes()


def test_a_variance_that_rounding_brings_below_zero_is_zero() -> None:
    broadcast = {
        "bn.running_var": np.array([3e-9], np.float32),
        "bn.running_mean": np.array([3e-9], np.float32),
    }
    gone = {name: np.array([-1e-8], np.float32) for name in broadcast}
    sums, scales = contribute([gone] * 3, [1.0] * 3, broadcast, 3)
    mean = grid.decode(sums, broadcast, scales, 3)
    assert mean["bn.running_var"] == 0
    assert mean["bn.running_mean"] < 0


@pytest.mark.parametrize(("shares", "count"), [(2, 3), (3 * 2**24 + 1, 3)])
def test_weights_that_no_nodes_can_have_are_refused(shares: int, count: int) -> None:
    with pytest.raises(ValueError, match=rf"{count} contributions.*{shares} parts"):
        grid.decode({MASKED_WEIGHT: np.array(shares, np.uint32)}, {}, {}, count)
