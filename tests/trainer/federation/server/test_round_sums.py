"""Contributions to an open round. Rules other than the mean: test_robust_rules.py; relayed tensors: fedtfi's tests."""

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_config.protocol.codec import encode_tensors
from broker_config.protocol.messages import Spec, TensorSpec
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
    request = Request(method, options, model="small", size=32, rounds=int(options.get("trained", 0)) * 2)
    return draft(request, federation="f", classes=("a", "b"), nodes=NODES, encoder=small_encoder())


# Whatever they are of

THREE = {"statistics": TensorSpec((3,), 0, "int64")}
ANYTHING = Statistics(
    lambda *_: THREE, lambda *_: {}, lambda *_: {}, lambda *_: None, lambda *_: None, lambda *_: {}, SINGLE
)
SPEC = msgspec.structs.replace(drafted("fedavg")[0], statistics=THREE)
VALUES = st.lists(st.lists(st.integers(-LARGEST, LARGEST), min_size=3, max_size=3), min_size=1, max_size=NODES)


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
    with pytest.raises(ValueError, match=f"statistics holds a value beyond ..{LARGEST}"):
        totals([[0, value, 0]])


# Of a federation


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
        COUNTS: [4, 4], FEATURES: (sums()[FEATURES] + sums(feature=-1)[FEATURES]).tolist()
    }  # fmt: skip
    assert {name: value.tobytes() for name, value in result.items()} == {n: v.tobytes() for n, v in broadcast.items()}


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
