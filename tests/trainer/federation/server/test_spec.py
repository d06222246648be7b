"""What a user asks for becomes a federation's spec and first broadcast,
or an error that says what to do instead.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from broker_config.protocol import topics
from broker_config.protocol.codec import decode, encode
from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Spec, Training
from tests.support.class_sums import register
from tests.support.method_cases import ON_ANY_MODEL, register_method_with_model
from trainer.federation.server.spec import (
    Participation,
    Request,
    check_training,
    draft,
    suited_model,
    suited_training,
)
from trainer.models.initial_weights import initial_encoder
from trainer.models.named_tensors import Arrays, select

CLASSES = ("inclusion", "patches", "scratches")


def drafted(request: Request, **changes: Any) -> tuple[Spec, Arrays]:
    return draft(request, **{"federation": "steel", "classes": CLASSES, "nodes": 3, **changes})


def small(**changes: Any) -> Request:
    return Request(model="small", **changes)


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(one[name], other[name]) for name in one
    )


def refused(request: Request, **changes: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        drafted(request, **changes)
    assert caught.value.remedy
    return caught.value


# What is settled


@pytest.mark.parametrize("method", ON_ANY_MODEL)
def test_what_training_changes_is_coded_where_nodes_send_a_model_and_no_other_codec_is_asked_for(
    method: str,
) -> None:
    uncoded = method in ("scaffold", "fednova")
    request = Request(method, model="small", weights="none")
    assert drafted(request._replace(codec="none"))[0].codec == "none"
    assert drafted(request._replace(codec=None))[0].codec == ("none" if uncoded else "int4")
    if not uncoded:
        assert drafted(request._replace(codec="int4"))[0].codec == "int4"
    else:
        assert (
            f"int4 does not combine with {method}" in refused(request._replace(codec="int4")).what
        )


def test_all_that_was_asked_for_is_in_the_spec() -> None:
    request = small(method="fedavg", size=48, rounds=7, seed=3, threads=2)
    spec, _ = drafted(request, participation=Participation(quorum=2))
    assert (spec.federation, spec.classes, spec.nodes, spec.quorum) == ("steel", CLASSES, 3, 2)
    assert (spec.method, spec.model, spec.preprocessing.size, spec.rounds) == (
        "fedavg",
        "small",
        48,
        7,
    )
    assert (spec.seed, spec.threads) == (3, 2)


def test_without_a_quorum_every_node_must_contribute() -> None:
    assert drafted(small())[0].quorum == 3


def test_the_small_model_starts_from_drawn_weights_at_64_pixels_and_others_at_128() -> None:
    spec, broadcast = drafted(small(seed=4))
    assert spec.preprocessing.size == 64
    assert same(select(broadcast, ("encoder",)), initial_encoder("small", "none", 4))
    assert drafted(Request(model="resnet18", weights="none"))[0].preprocessing.size == 128


def test_options_are_complete_so_that_a_nodes_own_defaults_never_matter() -> None:
    spec, _ = drafted(small(method="afedcl", options={"lambda": "0.5", "start": "carry"}))
    assert (spec.options["lambda"], spec.options["start"], spec.options["floor"]) == (
        0.5,
        "carry",
        1e-3,
    )


def test_training_suits_the_weights_and_what_was_given_wins(tmp_path: Path) -> None:
    assert drafted(small())[0].training == suited_training("none") == Training()
    weights = tmp_path / "pretrained.safetensors"
    save_file(
        {
            name.removeprefix("encoder."): a
            for name, a in initial_encoder("small", "none", 0).items()
        },
        weights,
    )
    spec, _ = drafted(
        small(weights=str(weights), training={"learning_rate": "0.01", "augment": "false"})
    )
    assert (spec.training.learning_rate, spec.training.augment, spec.training.batch_norm) == (
        0.01,
        False,
        "eval",
    )
    assert suited_training("imagenet") == suited_training(str(weights)) != Training()


@pytest.mark.parametrize("method", ON_ANY_MODEL)
def test_the_spec_tells_every_tensor_of_the_first_broadcast_and_which_a_node_sends(
    method: str,
) -> None:
    spec, broadcast = drafted(small(method=method))
    assert {name: tensor.shape for name, tensor in spec.tensors.items()} == {
        n: a.shape for n, a in broadcast.items()
    }
    assert all(array.dtype == np.float32 for array in broadcast.values())
    assert all(select(spec.tensors, (prefix,)) for prefix in spec.sends)


@pytest.mark.parametrize("method", ON_ANY_MODEL)
def test_a_node_reads_the_spec_as_it_was_drafted(method: str) -> None:
    spec, _ = drafted(small(method=method))
    assert decode(encode(spec), Spec) == spec


def test_a_seed_determines_the_first_broadcast_but_every_run_has_its_own_name() -> None:
    (one, first), (other, second), (_, third) = (
        drafted(small(method="fedavg", seed=seed)) for seed in (1, 1, 2)
    )
    assert same(first, second)
    assert not np.array_equal(first["classifier.weight"], third["classifier.weight"])
    assert not np.array_equal(
        first["encoder.features.0.weight"], third["encoder.features.0.weight"]
    )
    assert one.run != other.run


# Statistics


@pytest.fixture
def class_sums(monkeypatch: pytest.MonkeyPatch) -> str:
    return register(monkeypatch)


def test_statistics_are_in_the_spec_and_take_a_round_after_those_of_training(
    class_sums: str,
) -> None:
    spec, broadcast = drafted(small(method=class_sums, options={"trained": "true"}, rounds=7))
    assert spec.rounds == 8
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in spec.statistics.items()} == {
        "statistics.counts": ((3,), "int64"),
        "statistics.features": ((3, 64), "int64"),
    }
    assert not spec.statistics.keys() & broadcast.keys()
    assert decode(encode(spec), Spec) == spec


def test_a_method_that_trains_nothing_takes_one_round(class_sums: str) -> None:
    for rounds in (0, 1):
        assert drafted(small(method=class_sums, rounds=rounds))[0].rounds == 1
    error = refused(small(method=class_sums, rounds=30))
    assert "one round, not 30" in error.what
    assert error.remedy == "leave out --rounds"


def test_a_federation_trains_for_thirty_rounds_unless_told_otherwise() -> None:
    assert drafted(small(method="fedavg"))[0].rounds == 30


def test_a_method_that_takes_no_other_networks_than_its_own_comes_with_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert suited_model("fedavg", {}) == "efficientnet_lite0_mid"
    method = register_method_with_model(monkeypatch)
    assert suited_model(method, {}) == "small"
    assert drafted(Request(method=method, model="small", weights="none"))[0].model == "small"


def test_settings_of_training_alone_may_be_given_where_nothing_else_is_trained(
    class_sums: str,
) -> None:
    check_training(small(method=class_sums, training={"learning_rate": "0.1"}))


def test_statistics_do_not_combine_with_a_robust_rule(class_sums: str) -> None:
    assert "not alike" in refused(small(method=class_sums, aggregate="multi_krum")).what


# What cannot be


@pytest.mark.parametrize(
    ("request_", "hint"),
    [
        (Request(model="smal"), "did you mean 'small'?"),
        (small(method="fedavgg"), "did you mean 'fedavg'?"),
        (small(method="afedcl", options={"lamda": "1"}), "did you mean 'lambda'?"),
        (small(training={"learning_rat": "1"}), "did you mean 'learning_rate'?"),
        (small(training={"batch_norm": "off"}), "batch_norm is one of train, eval"),
        (small(training={"batch_size": "1"}), "batch_size"),
        (small(training={"learning_rate": "fast"}), "learning_rate"),
        (small(weights="missing.safetensors"), "existing .safetensors file"),
        (small(size=8), "give size a value of at least 16"),
        (small(method="fedavg", rounds=-1), "rounds"),
        (small(seed=-1), "seed"),
    ],
    ids=lambda value: None if isinstance(value, Request) else value,
)
def test_a_wrong_name_or_value_is_answered_with_the_right_one(request_: Request, hint: str) -> None:
    assert hint in refused(request_).remedy


@pytest.mark.parametrize("setting", ["learning_rate", "moments", "optimizer"])
@pytest.mark.parametrize("method", ["fednova", "scaffold"])
def test_a_setting_of_adams_is_refused_for_a_method_that_trains_with_sgd(
    method: str, setting: str
) -> None:
    value = {"learning_rate": "0.1", "moments": "reset", "optimizer": "adam"}[setting]
    with pytest.raises(UsageError, match=f"{method}.*--training {setting}") as caught:
        check_training(small(method=method, training={setting: value}))
    assert "--option rate=" in caught.value.remedy


@pytest.mark.parametrize("method", ["afedcl", "fedala", "local"])
def test_settings_of_adams_act_where_a_phase_uses_it(method: str) -> None:
    check_training(small(method=method, training={"learning_rate": "0.1", "moments": "reset"}))
    check_training(small(method="scaffold", training={"local_epochs": "2"}))


def test_sgd_has_a_larger_step_by_default_and_no_moments() -> None:
    assert drafted(small(training={"optimizer": "sgd"}))[0].training == Training(
        learning_rate=0.01, optimizer="sgd"
    )
    with pytest.raises(UsageError, match="moments"):
        check_training(small(training={"optimizer": "sgd", "moments": "keep"}))


def test_a_wrong_value_is_told_with_its_range() -> None:
    assert ">= 2" in refused(small(training={"batch_size": "1"})).what
    assert ">= 16" in refused(small(size=8)).what


@pytest.mark.parametrize("name", ["", "steel mill", "a/b", "+", "-x", "x" * 65])
def test_a_federations_name_that_cannot_stand_in_a_topic_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="federation's name") as caught:
        drafted(small(), federation=name)
    assert "letters, digits" in str(caught.value)


@pytest.mark.parametrize("classes", [(), ("one",), ("one", "two", "one")])
def test_fewer_than_two_or_repeated_classes_are_refused(classes: tuple[str, ...]) -> None:
    error = refused(small(), classes=classes)
    assert ", ".join(classes) in error.what
    assert "each class once" in error.remedy


@pytest.mark.parametrize(
    ("participation", "said"),
    [
        (Participation(quorum=4), "quorum of 4 cannot be had from 3"),
        (Participation(quorum=3, sample=2), "quorum of 3 cannot be had from 2"),
        (Participation(sample=4), "sample of 4 cannot be had from 3"),
    ],
)
def test_participation_that_the_nodes_cannot_reach_is_refused(
    participation: Participation, said: str
) -> None:
    assert said in refused(small(), participation=participation).what


def test_the_quorum_of_a_sample_is_the_sample() -> None:
    assert drafted(small(), participation=Participation(sample=2))[0].quorum == 2


def test_a_federation_has_no_name_under_which_brokers_are_tried_out() -> None:
    with pytest.raises(UsageError, match="'doctor'"):
        drafted(small(), federation="doctor")


@pytest.mark.parametrize("name", ["coordinator", "monitor"])
def test_a_node_has_no_name_that_is_somebody_else_s(name: str) -> None:
    with pytest.raises(UsageError, match=f"'{name}'"):
        topics.check_node(name)


def test_other_names_of_classes_are_in_the_spec() -> None:
    spec, _ = drafted(small(), aliases={"Kratzer": "scratches", "rayures": "scratches"})
    assert decode(encode(spec), Spec).aliases == {"Kratzer": "scratches", "rayures": "scratches"}


@pytest.mark.parametrize(
    ("aliases", "why"),
    [
        ({"patches": "scratches"}, "'patches' is a class itself"),
        ({"Kratzer": "scratch"}, "'Kratzer' is an alias of 'scratch', which is no class"),
        ({"../Kratzer": "scratches"}, "matching regex"),
        ({"K\x1b[2Jratzer": "scratches"}, "matching regex"),
        ({"": "scratches"}, "length >= 1"),
        ({"K" * 201: "scratches"}, "length <= 200"),
    ],
)
def test_an_alias_that_is_a_class_stands_for_none_or_can_be_no_folder_is_refused(
    aliases: dict[str, str], why: str
) -> None:
    assert why in refused(small(), aliases=aliases).what


# Secure aggregation


def masked(**changes: Any) -> Request:
    return Request(
        **{
            "method": "fedavg",
            "model": "small",
            "codec": None,
            "secure_aggregation": True,
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("nodes", "threshold"), [(3, 2), (4, 3), (5, 4), (6, 4), (10, 7), (100, 67), (200, 134)]
)
def test_two_thirds_of_the_nodes_unmask_a_sum(nodes: int, threshold: int) -> None:
    spec, _ = drafted(masked(), nodes=nodes)
    assert (spec.mask_threshold, spec.quorum) == (threshold, nodes)
    assert (
        drafted(masked(), nodes=nodes, participation=Participation(quorum=threshold))[0].quorum
        == threshold
    )
    assert (spec.aggregation.rule, spec.codec) == ("mean", "none")
    assert drafted(small(method="fedavg"), nodes=nodes)[0].mask_threshold == 0


@pytest.mark.parametrize(("nodes", "neighbours"), [(200, 0), (201, 96), (1000, 180)])
def test_many_nodes_share_their_secrets_with_some_others_alone(nodes: int, neighbours: int) -> None:
    assert drafted(masked(), nodes=nodes)[0].mask_neighbours == neighbours
    assert drafted(small(method="fedavg"), nodes=nodes)[0].mask_neighbours == 0


def test_masked_sums_lie_on_a_grid_of_32_bits() -> None:
    (spec, _), (open_, _) = drafted(masked(), nodes=10), drafted(small(method="fedavg"), nodes=10)
    below = {
        name: open_.tensors[name].scale - tensor.scale for name, tensor in spec.tensors.items()
    }
    assert set(below.values()) == {62 - 12 - 31}
    assert spec.tensors["classifier.bias"].scale == 31 - 4 + 2


@pytest.mark.parametrize(
    ("request_", "changes", "why"),
    [
        (masked(), {"nodes": 2}, "takes 3 to 1000 nodes, not 2"),
        (masked(), {"nodes": 1001}, "takes 3 to 1000 nodes, not 1001"),
        (
            masked(),
            {"nodes": 9, "participation": Participation(quorum=5)},
            "needs a quorum of 6 or more, not 5",
        ),
    ],
)
def test_masks_need_so_many_nodes_and_of_them_so_many_in_a_round(
    request_: Request, changes: dict[str, Any], why: str
) -> None:
    assert why in refused(request_, **changes).what


@pytest.mark.parametrize(
    "changes", [{"method": "gaussian"}, {"method": "afedcl_plus"}, {"head": "statistics"}]
)
def test_statistics_are_summed_behind_masks(changes: dict[str, Any]) -> None:
    spec, _ = drafted(masked(**changes))
    assert spec.mask_threshold == 2
    assert {tensor.dtype for tensor in spec.statistics.values()} == {"int64"}


@pytest.mark.parametrize("weights", ["images", "equal"])
def test_afedcl_combines_with_it_where_it_does_not_weigh_by_what_a_node_has_measured(
    weights: str,
) -> None:
    assert drafted(masked(method="afedcl", options={"weights": weights}))[0].mask_threshold == 2
