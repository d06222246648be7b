"""Rules of aggregation that a bounded number of lying nodes cannot spoil."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_config.protocol.codec import encode_tensors
from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Aggregation, TensorSpec
from research.studies.attacks import Trial, tampering
from tests.support.method_cases import ON_ANY_MODEL
from trainer.data.class_folders import Images, LabelledImages
from trainer.federation.server.robust_rules import (
    RULES,
    ContributionBlocks,
    InMemory,
    OnDisk,
    Source,
    aggregate,
    multi_krum,
)
from trainer.federation.server.round_sums import collect
from trainer.federation.server.spec import Participation, Request, draft
from trainer.federation.simulation import simulate
from trainer.methods import make
from trainer.models.named_tensors import Arrays
from trainer.training.participant import Contributed

Rows = list[list[float]]


def contributions(
    rows: Rows, start: list[float] | None = None, names: str = "abcdefghijkl"
) -> ContributionBlocks:
    """One tensor, a row from each node."""
    sources: dict[str, Source] = {
        name: InMemory({"w": np.asarray(row, np.float32)})
        for name, row in zip(names, rows, strict=False)
    }
    return ContributionBlocks(sources, {"w": np.asarray(start or [0.0] * len(rows[0]), np.float32)})


# By hand


def test_multi_krum_averages_those_whose_nearest_neighbours_are_nearest() -> None:
    """Five on a line, one liar.

    By two neighbours the scores are 37, 26, 34, 13, 29; by one 6 would go, by three 11.
    """
    rows: Rows = [[0.0], [1.0], [6.0], [9.0], [11.0]]
    assert multi_krum(contributions(rows), 1)["w"].tolist() == [(1 + 6 + 9 + 11) / 4]


def test_of_contributions_with_equal_scores_multi_krum_takes_those_of_the_first_names() -> None:
    rows: Rows = [[0.0], [0.0], [0.0], [0.0], [0.0], [5.0], [-5.0], [5.0], [-5.0]]
    for came, names in ((rows, "abcdefghi"), (rows[::-1], "ihgfedcba")):
        averaged = multi_krum(contributions(came, names=names), 3)["w"]
        assert averaged.tolist() == [np.float32(5 / 6)]  # five zeros and the first 5


def test_distances_are_of_all_tensors_together() -> None:
    """The last one stands alone by one tensor, and not by the other."""
    places = ((0, 0), (1, 0), (0, 1), (1, 1), (0, 9))
    sources: dict[str, Source] = {
        f"n{node}": InMemory({"a": np.asarray(a, np.float32), "b": np.asarray([b], np.float32)})
        for node, (a, b) in enumerate(places)
    }
    averaged = multi_krum(
        ContributionBlocks(sources, {"a": np.float32(0), "b": np.zeros(1, np.float32)}), 1
    )
    assert (float(averaged["a"]), averaged["b"].tolist()) == (0.5, [0.5])
    assert averaged["a"].shape == ()


# Properties


def drawn(seed: int, nodes: int, spread: float = 1.0) -> dict[str, Arrays]:
    """Contributions to three tensors, one of them a variance, in no order."""
    random = np.random.default_rng(seed)
    return {
        f"n{node}": {
            "bias": random.normal(0, spread, ()).astype(np.float32),
            "layer.running_var": random.gamma(0.1, 1, 9).astype(np.float32),
            "weight": random.normal(0, spread, (7, 3, 2)).astype(np.float32),
        }
        for node in random.permutation(nodes)
    }


def start(seed: int) -> Arrays:
    return next(iter(drawn(seed + 1, 1).values()))


def told(nodes: dict[str, Arrays]) -> dict[str, Source]:
    return {name: InMemory(tensors) for name, tensors in nodes.items()}


def flat(tensors: Arrays) -> np.ndarray:
    return np.concatenate([np.ravel(tensors[name]) for name in sorted(tensors)])


seeds = st.integers(0, 2**32 - 1)
every_rule = pytest.mark.parametrize("rule", RULES)


def liars_of(rule: str, nodes: int) -> int:
    """The most that the rule stands."""
    counts = {"multi_krum": (nodes - 3) // 2}
    return counts[rule]


@every_rule
@given(seed=seeds, nodes=st.integers(3, 12))
def test_the_order_of_arrival_does_not_matter(rule: str, seed: int, nodes: int) -> None:
    settings, came = Aggregation(rule, liars_of(rule, nodes)), told(drawn(seed, nodes))  # type: ignore[arg-type]
    other = dict(reversed(came.items()))
    one, two = (flat(aggregate(settings, each, start(seed))) for each in (came, other))
    assert one.tobytes() == two.tobytes()


def test_what_is_held_of_a_contribution_is_read_once_and_not_kept(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32)
    path = tmp_path / "blob"
    path.write_bytes(encode_tensors({"w": values}))
    source = OnDisk(path, {"w": TensorSpec(values.shape, 0)})
    with source.held():
        path.unlink()
        for _ in range(2):
            assert [(name, each.tolist()) for name, each in source.tensors()] == [
                ("w", values.tolist())
            ]
    with pytest.raises(FileNotFoundError):
        dict(source.tensors())


@every_rule
@given(seed=seeds, nodes=st.integers(3, 9), values=st.integers(1, 500))
def test_portions_from_disk_give_what_the_whole_gives(
    rule: str, seed: int, nodes: int, values: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    came, liars = drawn(seed, nodes), liars_of(rule, nodes)
    folder = tmp_path_factory.mktemp("blobs")
    sources: dict[str, Source] = {}
    for node, tensors in came.items():
        (folder / node).write_bytes(encode_tensors(tensors))
        sources[node] = OnDisk(
            folder / node, {name: TensorSpec(a.shape, 0) for name, a in tensors.items()}
        )
    whole = RULES[rule].combine(ContributionBlocks(told(came), start(seed)), liars)
    parts = RULES[rule].combine(ContributionBlocks(sources, start(seed), values), liars)
    assert {name: array.shape for name, array in parts.items()} == {
        n: a.shape for n, a in start(seed).items()
    }
    assert flat(parts).tobytes() == flat(whole).tobytes()


@every_rule
@given(seed=seeds, nodes=st.integers(3, 12))
def test_equal_contributions_come_out_as_they_are(rule: str, seed: int, nodes: int) -> None:
    one = start(seed)
    same = {f"n{node}": one for node in range(nodes)}
    found = aggregate(Aggregation(rule, liars_of(rule, nodes)), told(same), start(seed + 5))  # type: ignore[arg-type]
    np.testing.assert_allclose(flat(found), flat(one), rtol=1e-6)


@given(seed=seeds, nodes=st.integers(3, 12))
def test_without_liars_krum_is_the_mean(seed: int, nodes: int) -> None:
    came = drawn(seed, nodes)
    mean = np.mean([flat(tensors).astype(np.float64) for tensors in came.values()], axis=0)
    found = flat(multi_krum(ContributionBlocks(told(came), start(seed)), 0))
    np.testing.assert_allclose(found, mean, rtol=1e-5, atol=1e-6)


@given(seed=seeds, liars=st.integers(1, 4), lie=st.sampled_from([-1e6, -50.0, 50.0, 1e6]))
def test_krum_takes_no_contribution_that_lies_far_from_the_others(
    seed: int, liars: int, lie: float
) -> None:
    """Colluding ones neither: they are too few to be one another's only neighbours."""
    nodes = 2 * liars + 3
    came = drawn(seed, nodes)
    names = sorted(came)
    for name in names[:liars]:
        came[name] = {tensor: array + np.float32(lie) for tensor, array in came[name].items()}
    found = flat(multi_krum(ContributionBlocks(told(came), start(seed)), liars))
    assert np.abs(found).max() <= max(np.abs(flat(came[name])).max() for name in names[liars:])


@every_rule
@given(seed=seeds, nodes=st.integers(3, 12))
def test_variances_stay_variances(rule: str, seed: int, nodes: int) -> None:
    came, begin = drawn(seed, nodes, spread=100), start(seed)
    came["n0"]["layer.running_var"][:] = 0
    found = aggregate(Aggregation(rule, liars_of(rule, nodes)), told(came), begin)  # type: ignore[arg-type]
    assert found["layer.running_var"].min() >= 0


# A federation with a liar


@pytest.mark.parametrize("attack", ["scaling", "noise", "L_D inflation"])
def test_a_liar_moves_the_mean_beyond_what_honest_nodes_sent_and_multi_krum_not(
    attack: Any,
) -> None:
    """What it sends passes the coordinator's checks.

    All nodes train; of the last one's contribution a lie is made.
    """

    def broadcast(rule: Any) -> tuple[np.ndarray, list[np.ndarray]]:
        request = Request("afedcl", model="small", size=32, rounds=1, aggregate=rule, codec="none")
        spec, first = draft(request, federation="steel", classes=("x", "y"), nodes=5)
        trial = Trial(
            method="afedcl",
            pool="",
            nodes=5,
            liars=1,
            attack=attack,
            rule=rule,
            seed=0,
            rounds=1,
            samples=4,
        )
        lie, sent = tampering(trial, spec, ["n4"]), []

        def tamper(
            node: str, round_: int, contributed: Contributed, received: Arrays
        ) -> Contributed:
            told = lie(node, round_, contributed, received)
            collect(spec, make(spec.method, spec.training, spec.options), 1).validate(
                InMemory(told.tensors)
            )
            if node != "n4":
                assert told is contributed
                sent.append(flat(told.tensors))
            return told

        return flat(
            simulate(spec, first, {f"n{k}": few(k) for k in range(5)}, tamper=tamper).broadcast
        ), sent

    for rule in ("mean", "multi_krum"):
        found, sent = broadcast(rule)
        within = (found >= np.min(sent, axis=0)) & (found <= np.max(sent, axis=0))
        assert within.all() == (rule == "multi_krum")


def few(seed: int) -> Images:
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 32, 32, 3)).astype(np.uint8)
    digests = tuple(f"{seed:032x}{index:032x}" for index in range(4))
    images = LabelledImages(pixels, np.arange(4) % 2, digests, tuple(map(Path, digests)))
    return Images(images, images)


# What is refused


@pytest.mark.parametrize("rule", ["clipped_mean", "mean", *RULES])
def test_a_contribution_with_a_negative_variance_is_refused_under_every_rule(rule: Any) -> None:
    def check(variances: list[float], method: str = "fedavg", rule: Any = None) -> None:
        spec, _ = draft(
            Request(method, model="small", size=32, aggregate=rule),
            federation="steel",
            classes=("x", "y"),
            nodes=5,
        )
        name = "encoder.bn.running_var"
        spec = msgspec.structs.replace(
            spec, tensors={name: TensorSpec((2,), 40)}, sends=("encoder",)
        )
        contributions = collect(spec, make(method, spec.training, spec.options), 1)
        contributions.validate(InMemory({name: np.asarray(variances, np.float32)}))

    check([0, 3], rule=rule)
    check([0, -3], method="fednova")  # which sends differences
    with pytest.raises(ValueError, match=r"encoder\.bn\.running_var.*negative"):
        check([3, -1e-9], rule=rule)


def drafted(nodes: int = 5, quorum: int = 0, method: str = "fedavg", **request: Any) -> Aggregation:
    spec, _ = draft(
        Request(method, model="small", size=32, **request),
        federation="steel",
        classes=("x", "y"),
        nodes=nodes,
        participation=Participation(quorum=quorum),
    )
    return spec.aggregation


def test_one_liar_is_reckoned_with_where_nothing_else_is_said() -> None:
    assert drafted() == Aggregation("clipped_mean", 0)
    assert drafted(aggregate="multi_krum") == Aggregation("multi_krum", 1)
    assert drafted(aggregate="multi_krum", nodes=9, liars=3) == Aggregation("multi_krum", 3)


@pytest.mark.parametrize(("rule", "liars", "enough"), [("multi_krum", 1, 5), ("multi_krum", 2, 7)])
def test_a_round_must_not_close_with_fewer_contributions_than_its_rule_needs(
    rule: Any, liars: int, enough: int
) -> None:
    assert drafted(9, quorum=enough, aggregate=rule, liars=liars).rule == rule
    with pytest.raises(UsageError, match=f"{rule} needs {enough} contributions") as caught:
        drafted(9, quorum=enough - 1, aggregate=rule, liars=liars)
    assert f"may close with {enough - 1}" in caught.value.what
    assert "larger --quorum" in caught.value.remedy


@pytest.mark.parametrize("rule", ["clipped_mean", "mean"])
def test_a_number_of_liars_is_refused_where_a_rule_does_not_count_them(rule: Any) -> None:
    with pytest.raises(UsageError, match="--liars"):
        drafted(aggregate=rule, liars=1)


@pytest.mark.parametrize("method", ON_ANY_MODEL)
def test_rules_combine_with_those_methods_that_send_models(method: str) -> None:
    if method in ("local", "scaffold", "fednova", "gaussian", "afedcl_plus"):
        with pytest.raises(UsageError, match=f"multi_krum.*({method}|statistics)"):
            drafted(method=method, aggregate="multi_krum")
    else:
        assert drafted(method=method, aggregate="multi_krum").rule == "multi_krum"


@pytest.mark.parametrize("method", ON_ANY_MODEL)
def test_weights_and_updates_are_limited_unless_a_method_only_takes_the_mean(method: str) -> None:
    if method in ("local", "scaffold", "fednova", "gaussian"):
        assert drafted(method=method).rule == "mean"
        with pytest.raises(UsageError, match=f"clipped_mean.*{method}"):
            drafted(method=method, aggregate="clipped_mean")
    else:
        assert (
            drafted(method=method)
            == drafted(method=method, aggregate="clipped_mean")
            == Aggregation("clipped_mean")
        )
        assert drafted(method=method, aggregate="mean") == Aggregation("mean")


def test_rounds_of_training_are_limited_between_those_of_sums() -> None:
    assert drafted(method="afedcl", head="statistics").rule == "clipped_mean"


@pytest.mark.parametrize("nodes", [1, 2])
def test_limits_need_no_number_of_contributions(nodes: int) -> None:
    """Fewer than three promise nothing, and are averaged as they are."""
    assert drafted(nodes).rule == "clipped_mean"
