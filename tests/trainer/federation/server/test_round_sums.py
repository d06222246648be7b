"""Contributions to an open round.

Robust rules: test_robust_rules.py; relayed tensors: the tests of the methods that have some.
"""

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_config.protocol.codec import encode_tensors
from broker_config.protocol.messages import Rule, Spec, TensorSpec
from tests.support import class_sums
from tests.support.class_sums import COUNTS, FEATURES, GRID
from tests.support.frame_mutation import small_encoder
from trainer.federation.server.robust_rules import InMemory, OnDisk
from trainer.federation.server.round_sums import Contributions, StatisticsContributions, collect
from trainer.federation.server.spec import Request, draft
from trainer.methods import make
from trainer.methods.base import Statistics
from trainer.models.fusion import SINGLE
from trainer.models.named_tensors import Arrays

NODES = 5
LARGEST = (2**63 - 1) // NODES


def drafted(method: str, **options: bool) -> tuple[Spec, Arrays]:
    return drafted_by(None, method, **options)


def drafted_by(rule: Rule | None, method: str, **options: bool) -> tuple[Spec, Arrays]:
    rounds = int(options.get("trained", 0)) * 2
    request = Request(method, options, model="small", size=32, rounds=rounds, aggregate=rule)
    return draft(request, federation="f", classes=("a", "b"), nodes=NODES, encoder=small_encoder())


# Weighted means


def trained(broadcast: Arrays, seed: int, length: float = 1.0) -> Arrays:
    """Each tensor moved so far in a direction of its own."""
    random = np.random.default_rng(seed)
    directions = {name: random.normal(size=value.shape) for name, value in broadcast.items()}
    return {
        name: (broadcast[name] + length * each / np.linalg.norm(each.ravel())).astype(np.float32)
        for name, each in directions.items()
    }


def averaged(rule: Rule, nodes: dict[str, tuple[Arrays, float]]) -> Arrays:
    """What a round of FedAvg makes of these contributions and weights."""
    spec, broadcast = drafted_by(rule, "fedavg")
    opened = collect(spec, make(spec.method, spec.training, spec.options), 1)
    for node, (tensors, weight) in nodes.items():
        opened.validate(InMemory(tensors))
        opened.add(node, InMemory(tensors), weight)
    return opened.aggregate(broadcast)


def as_bytes(tensors: Arrays) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in tensors.items()}


def moved(after: Arrays, before: Arrays) -> float:
    return float(
        np.sqrt(
            sum(
                np.square(after[name].astype(np.float64) - value).sum()
                for name, value in before.items()
            )
        )
    )


BROADCAST = drafted("fedavg")[1]
HONEST = {
    f"plant-{k}": (trained(BROADCAST, k, length), 8.0)
    for k, length in enumerate((0.9, 1.0, 1.1, 1.0))
}
LIAR = trained(BROADCAST, 99, 500.0)
EVERYONE = {**HONEST, "liar": (LIAR, 4096.0)}


def test_where_nobody_goes_beyond_the_limits_the_clipped_mean_is_the_mean_to_the_last_bit() -> None:
    """Updates of one length.

    Their norms are those of the medians exactly, since their values are.
    """
    same = {name: value + np.float32(0.5) for name, value in BROADCAST.items()}
    other = {name: 2 * value - same[name] for name, value in BROADCAST.items()}
    nodes = {"a": (same, 8.0), "b": (other, 3.0), "c": (same, 8.0)}
    assert as_bytes(averaged("clipped_mean", nodes)) == as_bytes(averaged("mean", nodes))


def test_a_liar_owns_the_mean_and_not_the_clipped_mean() -> None:
    """One of five, with FedAvg's largest weight and a long update."""
    assert moved(averaged("mean", EVERYONE), LIAR) < 0.01 * moved(LIAR, BROADCAST)
    assert moved(averaged("clipped_mean", EVERYONE), BROADCAST) < 1.1 * moved(
        averaged("mean", HONEST), BROADCAST
    )


def test_a_limited_contribution_counts_as_though_its_node_had_sent_it_so() -> None:
    """By hand: lengths 0.9, 1, 1, 1.1 and 500, so that the liar's update counts a 500th;
    weights 8 and 4,096.
    """
    short = {
        name: start + (LIAR[name] - start) / np.float32(500) for name, start in BROADCAST.items()
    }
    long = {
        name: start + (HONEST["plant-2"][0][name] - start) / np.float32(1.1)
        for name, start in BROADCAST.items()
    }
    by_hand = averaged("mean", {**HONEST, "plant-2": (long, 8.0), "liar": (short, 8.0)})
    for name, value in averaged("clipped_mean", EVERYONE).items():
        np.testing.assert_allclose(value, by_hand[name], rtol=1e-4, atol=1e-5)


def test_it_is_known_how_much_counts_of_what_was_limited() -> None:
    """Lengths 0.9, 1, 1, 1.1 and 500; weights 8 and 4,096."""
    spec, broadcast = drafted_by("clipped_mean", "fedavg")
    opened = collect(spec, make(spec.method, spec.training, spec.options), 1)
    for node, (tensors, weight) in EVERYONE.items():
        opened.add(node, InMemory(tensors), weight)
    opened.aggregate(broadcast)
    assert opened.limited.keys() == {"plant-2", "liar"}
    assert opened.limited["plant-2"] == {"weight": 1.0, "update": pytest.approx(1 / 1.1, rel=1e-3)}
    assert opened.limited["liar"] == {
        "weight": 8 / 4096,
        "update": pytest.approx(1 / 500, rel=1e-3),
    }


def test_the_clipped_mean_does_not_depend_on_the_order_of_arrival_nor_on_where_tensors_lie(
    tmp_path: Path,
) -> None:
    spec, broadcast = drafted_by("clipped_mean", "fedavg")
    opened = collect(spec, make(spec.method, spec.training, spec.options), 1)
    for node, (tensors, weight) in reversed(EVERYONE.items()):
        (tmp_path / node).write_bytes(encode_tensors(tensors))
        opened.add(node, OnDisk(tmp_path / node, spec.tensors), weight)
    backwards = {
        node: (dict(reversed(tensors.items())), weight)
        for node, (tensors, weight) in EVERYONE.items()
    }
    assert as_bytes(opened.aggregate(broadcast)) == as_bytes(averaged("clipped_mean", backwards))


# Statistics, whatever they are of

THREE = {"statistics": TensorSpec((3,), 0, "int64")}
ANYTHING = Statistics(
    lambda *_: THREE,
    lambda *_: {},
    lambda *_: {},
    lambda *_: None,
    lambda *_: None,
    lambda *_: {},
    SINGLE,
)
SPEC = msgspec.structs.replace(drafted("fedavg")[0], statistics=THREE)
VALUES = st.lists(
    st.lists(st.integers(-LARGEST, LARGEST), min_size=3, max_size=3), min_size=1, max_size=NODES
)


def totals(values: list[list[int]]) -> np.ndarray:
    opened = StatisticsContributions(SPEC, ANYTHING, SPEC.rounds)
    for number, row in enumerate(values):
        source = InMemory({"statistics": np.array(row, np.int64)})
        opened.validate(source)
        opened.add(f"plant-{number}", source, 1.0)
    return opened.aggregate({})["statistics"]


@given(VALUES, st.randoms())
def test_totals_are_exact_sums_in_any_order(values: list[list[int]], order: random.Random) -> None:
    result = totals(values)
    assert result.dtype == np.int64
    assert result.tolist() == [sum(column) for column in zip(*values, strict=True)]
    order.shuffle(values)
    assert np.array_equal(totals(values), result)


@pytest.mark.parametrize("value", [LARGEST + 1, -LARGEST - 1, 2**63 - 1, -(2**63)])
def test_a_value_that_as_many_nodes_could_overflow_with_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match=f"statistics.*{LARGEST}"):
        totals([[0, value, 0]])


# Statistics of a federation


@pytest.fixture
def method(monkeypatch: pytest.MonkeyPatch) -> str:
    return class_sums.register(monkeypatch)


def sums(counts: tuple[int, int] = (3, 0), feature: int = 3) -> Arrays:
    features = np.zeros((2, 64), np.int64)
    features[0, 0] = feature * 2**GRID
    return {COUNTS: np.array(counts), FEATURES: features}


def test_the_last_round_collects_statistics_and_the_others_do_not(method: str) -> None:
    spec, _ = drafted(method, trained=True)
    value = make(spec.method, spec.training, spec.options)
    kinds = [type(collect(spec, value, round_)) for round_ in (0, 1, 2, 3)]
    assert kinds == [Contributions] * 3 + [StatisticsContributions]


def test_the_result_is_the_unchanged_broadcast_and_the_totals(method: str, tmp_path: Path) -> None:
    spec, broadcast = drafted(method)
    opened = collect(spec, make(spec.method, spec.training, spec.options), 1)
    for node, each in {"a": sums(), "b": sums((1, 4), -1)}.items():
        (tmp_path / node).write_bytes(encode_tensors(each))
        source = OnDisk(tmp_path / node, spec.statistics)
        opened.validate(source)
        opened.add(node, source, 1.0)
    result = opened.aggregate(broadcast, absent={"c"})
    assert opened.contributors == {"a", "b"}
    assert {name: result.pop(name).tolist() for name in spec.statistics} == {
        COUNTS: [4, 4],
        FEATURES: (sums()[FEATURES] + sums(feature=-1)[FEATURES]).tolist(),
    }
    assert {name: value.tobytes() for name, value in result.items()} == {
        n: v.tobytes() for n, v in broadcast.items()
    }


@pytest.mark.parametrize(
    ("false", "why"),
    [
        (sums((5000, 0)), "cannot have 5000 images"),
        (sums((-1, 0)), "cannot have -1 images"),
        (sums((3, 0), 4), "longer than 1"),
        (sums((3, 0), LARGEST >> GRID), "longer than 1"),
        (sums((3, 0), (LARGEST >> GRID) + 1), "its share of 63 bits"),
    ],
)
def test_sums_that_no_honest_node_has_are_refused(method: str, false: Arrays, why: str) -> None:
    spec, _ = drafted(method)
    opened = collect(spec, make(spec.method, spec.training, spec.options), 1)
    with pytest.raises(ValueError, match=why):
        opened.validate(InMemory(false))


@pytest.mark.parametrize("weight", [0.0, 0.999, 2.0, 4096.0])
def test_the_statistics_of_all_nodes_weigh_one(method: str, weight: float) -> None:
    spec, _ = drafted(method)
    opened = collect(spec, make(spec.method, spec.training, spec.options), 1)
    with pytest.raises(ValueError, match=f"weigh 1, not {weight}"):
        opened.add("a", InMemory(sums()), weight)


def test_a_method_is_told_the_share_of_all_nodes_that_contributed() -> None:
    """SCAFFOLD goes by it. Here three nodes out of ten."""
    spec = drafted_by("mean", "fedavg")[0]
    method = make(spec.method, spec.training, spec.options)._replace(
        finish=lambda _, __, share: {"s": np.array(share)}
    )
    opened = collect(msgspec.structs.replace(spec, nodes=10), method, 1)
    for name, (tensors, weight) in [*HONEST.items()][:3]:
        opened.add(name, InMemory(tensors), weight)
    assert opened.aggregate(BROADCAST)["s"] == 3 / 10
