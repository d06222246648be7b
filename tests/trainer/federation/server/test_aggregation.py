"""Weighted means as exact fixed-point sums,
and the limits of what one contribution can move in them.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_config.protocol.messages import TensorSpec, Training
from trainer.federation.server.aggregation import (
    FixedPointSum,
    Influence,
    Limits,
    limit,
    measure_updates,
    scale_for,
)
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


def mean(
    contributions: list[tuple[dict[str, np.ndarray], float]], cap: float
) -> dict[str, np.ndarray]:
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
    """Also batch variances over eight orders of magnitude:
    each keeps float32's relative precision.
    """
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
        with pytest.raises(ValueError, match="weight"):
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


@pytest.mark.parametrize(
    ("method", "told"), [("afedcl", -0.1), ("afedcl", math.nan), ("fedavg", 0.0), ("fedavg", 2.5)]
)
def test_a_weight_that_cannot_be_is_refused(method: str, told: float) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        make(method, Training(), {}).weigh(told)


# Limits


def influences(weights: list[float], norms: list[float]) -> dict[str, Influence]:
    """Of nodes that send one tensor."""
    return {
        f"n{k}": Influence(w, {"w": float(norm)})
        for k, (w, norm) in enumerate(zip(weights, norms, strict=True))
    }


def limits(*counted: tuple[float, float]) -> dict[str, Limits]:
    """Weight and share of each node's update."""
    return {f"n{k}": Limits(weight, {"w": share}) for k, (weight, share) in enumerate(counted)}


def test_a_weight_is_limited_to_the_median() -> None:
    """FedAvg's liar that has 8 images and tells 4,096 counts like the others: a fifth,
    not 99.2 %.
    """
    assert limit(influences([8, 8, 4096, 8, 8], [1] * 5)) == limits(*[(8, 1)] * 5)
    assert limit(influences([5, 20, 10, 12], [1] * 4)) == limits((5, 1), (11, 1), (10, 1), (11, 1))


def test_the_update_of_a_tensor_is_limited_to_the_median_norm() -> None:
    assert limit(influences([1] * 3, [3, 1, 24])) == limits((1, 1), (1, 1), (1, 3 / 24))


def test_each_tensor_has_a_limit_of_its_own() -> None:
    """A liar cannot spend on a small tensor what others need for a large one."""
    norms = [
        {"large": 100.0, "small": 0.1},
        {"large": 80.0, "small": 0.2},
        {"large": 1.0, "small": 4.0},
    ]
    found = limit({f"n{k}": Influence(1, each) for k, each in enumerate(norms)})
    assert [each.shares for each in found.values()] == [
        {"large": 0.8, "small": 1},
        {"large": 1, "small": 1},
        {"large": 1, "small": 0.05},
    ]


def test_what_most_leave_as_it_is_nobody_moves() -> None:
    """BatchNorm's statistics, where they are kept: any update of them is a lie."""
    assert limit(influences([1] * 3, [0, 0, 1e-6])) == limits((1, 1), (1, 1), (1, 0))


@pytest.mark.parametrize("nodes", [1, 2])
def test_of_fewer_than_three_contributions_none_is_limited(nodes: int) -> None:
    assert limit(influences([1, 4096][:nodes], [1, 1000][:nodes])) == limits(
        *[(1, 1), (4096, 1)][:nodes]
    )


def test_an_update_is_shortened_towards_the_broadcast_and_a_variance_stays_one() -> None:
    broadcast = {"w": np.array([1, 1], np.float32), "running_var": np.array([0, 1e-6], np.float32)}
    sent = {"w": np.array([5, -3], np.float32), "running_var": np.array([100, 0], np.float32)}
    clipped = dict(Limits(1, {"w": 0.25, "running_var": 1 / 3}).clip(sent.items(), broadcast))
    assert clipped["w"].tolist() == [2, 0]
    assert clipped["running_var"].min() >= 0
    assert {value.dtype for value in clipped.values()} == {np.dtype(np.float32)}
    untouched = dict(Limits(1, {"w": 1, "running_var": 1}).clip(sent.items(), broadcast))
    assert untouched["w"] is sent["w"]


def test_norms_do_not_depend_on_how_the_values_lie_in_memory() -> None:
    """The coordinator reads a node's tensors from a file;
    in a simulation they lie as torch has left them.
    """
    values = np.random.default_rng(3).normal(size=(33, 17, 5)).astype(np.float32)
    lying = (values, np.asfortranarray(values), values.transpose(2, 0, 1).copy().transpose(1, 2, 0))
    (norm,) = {measure_updates([("w", each)], {"w": np.ones_like(each)})["w"] for each in lying}
    assert norm == pytest.approx(np.linalg.norm((values.astype(np.float64) - 1).ravel()))


@given(
    honest=st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 100)), min_size=2, max_size=9),
    lies=st.lists(st.tuples(st.floats(0.1, 1e6), st.floats(0, 1e9)), min_size=1, max_size=4),
)
def test_liars_in_the_minority_weigh_and_move_no_more_than_some_honest_node(
    honest: list[tuple[float, float]], lies: list[tuple[float, float]]
) -> None:
    lies = lies[: len(honest) - 1]
    everyone = influences(*map(list, zip(*honest, *lies, strict=True)))
    for node, counted in limit(everyone).items():
        assert counted.weight <= max(weight for weight, _ in honest)
        moved = counted.shares["w"] * everyone[node].norms["w"]
        assert moved <= max(norm for _, norm in honest) * (1 + 1e-12)
