"""Weighted means as exact fixed-point sums."""

import itertools
import math

import numpy as np
import pytest

from broker_config.protocol.messages import TensorSpec, Training
from trainer.federation.server.aggregation import FixedPointSum, scale_for
from trainer.methods import make
from trainer.methods.afedcl import CHANCE
from trainer.methods.base import MAX_IMAGES_WEIGHT


def tensors(seed: int, magnitude: float = 1.0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "weight": (magnitude * random.normal(size=(4, 3))).astype(np.float32),
        "variance": (10.0 ** random.uniform(-6, 2, 5)).astype(np.float32),
        "scalar": np.asarray(random.normal(), np.float32),
    }


def specs(like: dict[str, np.ndarray], nodes: int) -> dict[str, TensorSpec]:
    return {name: TensorSpec(value.shape, scale_for(value, nodes)) for name, value in like.items()}


def mean(contributions: list[tuple[dict[str, np.ndarray], float]], cap: float) -> dict[str, np.ndarray]:
    total = FixedPointSum(specs(contributions[0][0], len(contributions)), len(contributions), cap)
    for values, weight in contributions:
        total.validate(values.items())
        total.add(values.items(), weight)
    return total.mean()


@pytest.mark.parametrize("seed", range(5))
def test_the_mean_is_the_weighted_mean(seed: int) -> None:
    weights = np.random.default_rng(seed).uniform(0.01, 1.3, 5)
    contributions = [(tensors(seed * 10 + k), float(w)) for k, w in enumerate(weights)]
    result = mean(contributions, 2 * CHANCE)
    for name, value in result.items():
        exact = sum(w * v[name].astype(np.float64) for v, w in contributions) / weights.sum()
        assert value.dtype == np.float32
        np.testing.assert_allclose(value, exact, rtol=1e-6, atol=1e-9)


def test_the_mean_does_not_depend_on_the_order_of_arrival() -> None:
    contributions = [(tensors(k), w) for k, w in enumerate((0.3, 0.69, 1.2, 0.001))]
    results = [mean(list(order), 2 * CHANCE) for order in itertools.permutations(contributions)]
    for result in results[1:]:
        for name, value in result.items():
            assert np.array_equal(value, results[0][name])


def test_equal_contributions_average_to_themselves() -> None:
    """Also batch variances over eight orders of magnitude: each keeps float32's relative precision."""
    values = tensors(3)
    for name, value in mean([(values, 20.0)] * 5, MAX_IMAGES_WEIGHT).items():
        np.testing.assert_allclose(value, values[name], rtol=1e-6)


def test_a_value_beyond_the_range_is_named_before_anything_is_summed() -> None:
    values = tensors(0)
    total = FixedPointSum(specs(values, 2), 2, 1.0)
    total.validate(values.items())
    for bad in (1e30, np.inf, np.nan):
        diverged = values["weight"].copy()
        diverged[2, 1] = bad
        with pytest.raises(ValueError, match="weight holds a value"):
            total.validate([("weight", diverged)])


def test_the_largest_contributions_that_pass_do_not_overflow() -> None:
    values = {"weight": np.full(2, 0.9, np.float32)}
    nodes = 5
    spec = specs(values, nodes)
    bound = 2.0 ** (62 - spec["weight"].scale) / 8  # 8: five nodes, rounded up to a power of two
    extreme = {"weight": np.full(2, bound, np.float32)}
    total = FixedPointSum(spec, nodes, 1.0)
    for _ in range(nodes):
        total.validate(extreme.items())
        total.add(extreme.items(), 1.0)
    np.testing.assert_array_equal(total.mean()["weight"], extreme["weight"])


def test_afedcl_weighs_by_discrimination_loss_as_in_equation_8() -> None:
    """Two nodes, L_D 0.2 and 0.6: E_G = (0.2 * 1 + 0.6 * 5) / 0.8 = 4."""
    method = make("afedcl", Training(), {})
    spec = {"encoder.w": TensorSpec((1,), 40)}
    total = FixedPointSum(spec, 2, method.weight_cap)
    for value, loss in ((1.0, 0.2), (5.0, 0.6)):
        total.add([("encoder.w", np.array([value], np.float32))], method.weigh(loss))
    assert total.mean()["encoder.w"] == pytest.approx(4.0, abs=1e-5)


@pytest.mark.parametrize(("told", "counts"), [(0.0, 1e-3), (0.5, 0.5), (5.0, 2 * math.log(2))])
def test_afedcl_bounds_the_weight_that_a_node_tells(told: float, counts: float) -> None:
    assert make("afedcl", Training(), {}).weigh(told) == pytest.approx(counts)


@pytest.mark.parametrize(("method", "told"), [("afedcl", -0.1), ("afedcl", math.nan), ("fedavg", 0.0), ("fedavg", 2.5)])
def test_a_weight_that_cannot_be_is_refused(method: str, told: float) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        make(method, Training(), {}).weigh(told)
