"""What every method promises. One table of cases, one list of properties."""

import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.protocol.messages import Preprocessing, Training
from broker_config.protocol.round_contents import contribution_tensors
from edge_node.cli.shared_options import DEFAULT_METHOD, Method
from edge_node.cli.shared_options import METHODS as NAMED
from tests.support.method_cases import (
    CASES,
    CLASSES,
    ON_ANY_MODEL,
    drafted,
    equal,
    images,
    one_round,
    shares,
    slow_except,
)
from tests.support.paths import REPOSITORY
from trainer.data.class_folders import Images
from trainer.data.training_set import TrainingSet
from trainer.federation.server.aggregation import FixedPointSum
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import SimulationResult, simulate
from trainer.methods import METHODS, RECOMMENDED, complete_options, make
from trainer.models.fusion import infer_fusion
from trainer.models.initial_weights import Shape
from trainer.models.named_tensors import Arrays, select, strip_prefix
from trainer.models.network import Network, to_arrays, to_tensors
from trainer.training import conclusion
from trainer.training.engine import run_phase
from trainer.training.participant import Participant, State

case = pytest.mark.parametrize("case", CASES)
few = pytest.mark.parametrize(
    "case", slow_except(("fedavg", "afedcl", "afedcl_plus", "fedala", "gaussian"), CASES)
)


def run(
    case: str, seed: int = 0, nodes: dict[str, Images] | None = None, **training: Any
) -> SimulationResult:
    return simulate(*drafted(case, seed, **training), nodes or shares())


@functools.cache
def plain(case: str) -> SimulationResult:
    """Two rounds as drafted, once for all tests that only look at them."""
    return run(case)


def same(one: SimulationResult, other: SimulationResult) -> bool:
    """Whether all tensors of two runs are the same, bit for bit."""
    return equal(one.broadcast, other.broadcast) and all(
        equal(to_arrays(one.models[name].tensors), to_arrays(other.models[name].tensors))
        for name in one.models
    )


@few
def test_a_seed_determines_every_tensor(case: str) -> None:
    assert same(plain(case), run(case))
    assert not same(plain(case), run(case, seed=4))


@few
def test_the_order_of_the_nodes_makes_no_difference(case: str) -> None:
    assert same(plain(case), run(case, nodes=dict(reversed(shares().items()))))


@case
def test_what_leaves_a_node_is_what_the_method_declares_and_stage_2_does_not_change_it(
    case: str,
) -> None:
    spec, broadcast = drafted(case)
    participant = Participant(spec, "plant-1", shares()["plant-1"])
    state, contributed, _ = participant.contribute(participant.start(broadcast), broadcast, 1)
    assert {name: (value.shape, value.dtype) for name, value in contributed.tensors.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in contribution_tensors(spec, 1).items()
    }
    kept = {name: value.copy() for name, value in contributed.tensors.items()}
    participant.refine(state, broadcast, 1)
    assert equal(kept, contributed.tensors)


@case
def test_training_leaves_the_state_it_was_given_as_it_was(case: str) -> None:
    spec, broadcast = drafted(case)
    participant = Participant(spec, "plant-1", shares()["plant-1"])
    state = participant.start(broadcast)
    before = to_arrays(state.tensors)
    after, _, _ = participant.contribute(state, broadcast, 1)
    assert equal(before, to_arrays(state.tensors))
    between = to_arrays(after.tensors), to_arrays(after.moments)
    participant.refine(after, broadcast, 1)
    assert equal(between[0], to_arrays(after.tensors))
    assert equal(between[1], to_arrays(after.moments))


@few
def test_a_state_survives_the_disk_between_any_two_stages(case: str, tmp_path: Path) -> None:
    spec, broadcast = drafted(case)
    participant = Participant(spec, "plant-1", shares()["plant-1"])

    def through_disk(state: State) -> State:
        state.save(tmp_path / "state.safetensors")
        return State.load(tmp_path / "state.safetensors")

    straight = interrupted = participant.start(broadcast)
    for round_ in range(1, spec.rounds + 1):
        straight, _, _ = participant.contribute(straight, broadcast, round_)
        straight, _ = participant.refine(straight, broadcast, round_)
        interrupted, _, _ = participant.contribute(through_disk(interrupted), broadcast, round_)
        interrupted, _ = participant.refine(through_disk(interrupted), broadcast, round_)
    assert equal(to_arrays(straight.tensors), to_arrays(interrupted.tensors))
    assert equal(to_arrays(straight.moments), to_arrays(interrupted.moments))


@case
def test_a_personal_model_judges_images_and_is_measured(case: str) -> None:
    network = Network("small", len(CLASSES))
    for model in plain(case).models.values():
        logits = network.predict(model.tensors, torch.zeros(2, 3, 16, 16))
        assert logits.shape == (2, 3)
        assert (
            0 <= model.metadata.metrics["accuracy_low"] <= model.metadata.metrics["accuracy"] <= 1
        )
        assert [line["round"] for line in model.metadata.history] == list(
            range(1, drafted(case)[0].rounds + 1)
        )


@pytest.mark.parametrize("case", [name for name in CASES if name != "fedavg"])
def test_a_method_differs_from_fedavg_after_one_round(case: str) -> None:
    """In the model that is deployed, at every node."""
    for other, mine in zip(
        one_round("fedavg").models.values(), one_round(case).models.values(), strict=True
    ):
        assert not equal(
            select(to_arrays(other.tensors), ("encoder",)),
            select(to_arrays(mine.tensors), ("encoder",)),
        )


@pytest.mark.slow
def test_federated_nodes_receive_from_each_other_and_local_ones_do_not() -> None:
    """Another plant's images change what plant-1 ends with, unless it is alone."""
    changed = {**shares(), "plant-3": Images(images(77), images(177))}
    for case in CASES:
        mine, theirs = plain(case), run(case, nodes=changed)
        untouched = equal(
            to_arrays(mine.models["plant-1"].tensors), to_arrays(theirs.models["plant-1"].tensors)
        )
        # Carried over, E_k is touched only through the discriminator's and the fusion's view of
        # E_G.
        assert untouched == (case == "local"), case


@pytest.mark.parametrize(
    "setting",
    [
        {"moments": "reset"},
        {"augment": False},
        {"batch_size": 3},
        {"learning_rate": 0.01},
        {"optimizer": "sgd"},
    ],
)
def test_each_training_setting_has_an_effect(setting: dict[str, Any]) -> None:
    assert not same(run("afedcl"), run("afedcl", **setting))


# A network with BatchNorm

MEAN, VARIANCE = "encoder.layer1.0.bn1.running_mean", "encoder.layer1.0.bn1.running_var"
MOVED = "encoder.layer1.0.conv1.weight"


class Contributed(NamedTuple):
    """A first round of two plants with 6 and 3 images: what they carry and sent,
    and what was made of it.
    """

    broadcast: Arrays
    states: list[State]
    sent: list[Arrays]
    average: Arrays


def resnet_round(method: str, mode: str = "train") -> Contributed:
    # one step is one effective step, which would hide what is divided by it
    epochs = 2 if method == "fednova" else 1
    training = {"batch_norm": mode, "local_epochs": epochs, "augment": False}
    request = Request(
        method, model="resnet18", weights="none", size=32, rounds=1, training=training
    )
    spec, broadcast = draft(request, federation="test", classes=CLASSES, nodes=2)
    made = make(method, spec.training, spec.options)
    sums = FixedPointSum(select(spec.tensors, spec.sends), 2, made.weight_cap)
    states, sent = [], []
    for seed, count in ((1, 6), (2, 3)):
        few = images(seed, count)
        share = Images(few._replace(images=few.images.repeat(2, 1).repeat(2, 2)), None)
        each = Participant(spec, f"plant-{seed}", share)
        state, contributed, _ = each.contribute(
            each.start(broadcast), broadcast, 1 + spec.statistics_first
        )
        sums.add(contributed.tensors.items(), made.weigh(contributed.weight))
        states.append(state)
        sent.append(contributed.tensors)
    return Contributed(broadcast, states, sent, made.finish(broadcast, sums.mean(), 1.0))


AVERAGING = [name for name in ON_ANY_MODEL if name not in ("local", "fedbn", "gaussian")]


@pytest.mark.parametrize("method", slow_except(("afedcl",), AVERAGING))
def test_batch_norm_statistics_are_averaged_with_the_weights(method: str) -> None:
    """By images 2:1; SCAFFOLD's plants count alike, AFedCL's by a loss that is nearly the same."""
    done = resnet_round(method)
    share = {"scaffold": 1 / 2, "afedcl": None}.get(method, 2 / 3)
    for name in (MEAN, VARIANCE):
        one, other = (state.tensors[name].numpy() for state in done.states)
        assert not np.allclose(one, other)
        between = done.average[name]
        assert (
            (between >= np.minimum(one, other) - 1e-6) & (between <= np.maximum(one, other) + 1e-6)
        ).all()
        if share is not None:
            np.testing.assert_allclose(
                between, share * one + (1 - share) * other, rtol=1e-5, atol=1e-6
            )
    assert not any("num_batches_tracked" in name for name in done.sent[0])


def test_fedbn_keeps_statistics_and_parameters_of_batch_norm_at_the_node() -> None:
    done = resnet_round("fedbn")
    layer = MEAN.removesuffix(".running_mean")
    private = select(done.broadcast, (layer,))
    assert set(private) == {
        f"{layer}.{name}" for name in ("weight", "bias", "running_mean", "running_var")
    }
    for name, value in private.items():
        assert name not in done.sent[0]
        np.testing.assert_array_equal(done.average[name], value)
        assert not np.array_equal(done.states[0].tensors[name].numpy(), value)
    assert MOVED in done.sent[0]


@pytest.mark.parametrize("method", ["afedcl", "fedavg"])
def test_batch_norm_statistics_stay_as_they_are_in_eval_mode(method: str) -> None:
    done = resnet_round(method, "eval")
    assert all(np.array_equal(sent[MEAN], done.broadcast[MEAN]) for sent in done.sent)
    assert not np.array_equal(done.sent[0][MOVED], done.broadcast[MOVED])


@pytest.mark.parametrize(
    ("method", "phase"),
    [("fedrep", "head"), pytest.param("fedala", "adapt", marks=pytest.mark.slow)],
)
def test_a_phase_that_leaves_the_encoder_alone_leaves_its_batch_norm_statistics_alone(
    method: str, phase: str
) -> None:
    training = Training(local_epochs=1)
    (found,) = [each for each in make(method, training, {}).train if each.name == phase]
    done = resnet_round(method)
    tensors = done.states[0].tensors
    few = images(1)
    data = TrainingSet.of(
        few._replace(images=few.images.repeat(2, 1).repeat(2, 2)), Preprocessing(size=32)
    )
    after, _, _ = run_phase(
        Network("resnet18", 3), found, tensors, {}, to_tensors(done.average), data, training, 0
    )
    assert equal(select(to_arrays(tensors), ("encoder",)), select(to_arrays(after), ("encoder",)))
    assert not equal(to_arrays(tensors), to_arrays(after))


# Few images


@case
def test_a_node_with_two_images_trains_on_both(case: str) -> None:
    """Nothing is left out for want of a full batch: the node moves,
    and its weight is that of two images.
    """
    spec, broadcast = drafted(case, batch_size=32, local_epochs=1)
    participant = Participant(spec, "plant-1", Images(images(1, 2), None))
    state, contributed, metrics = participant.contribute(
        participant.start(broadcast), broadcast, 1 + spec.statistics_first
    )
    moved = not equal(
        select(to_arrays(state.tensors), ("encoder",)), select(broadcast, ("encoder",))
    )
    assert moved or not participant.method.train
    assert all(np.isfinite(value) for value in metrics.values())
    assert make(spec.method, spec.training, spec.options).weigh(contributed.weight) > 0


@pytest.mark.parametrize(
    "case",
    slow_except(
        ("fedavg", "afedcl", "afedcl_plus", "fedala"),
        [case for case in CASES if case != "gaussian"],
    ),
)
def test_no_fold_is_judged_by_a_head_that_has_seen_it(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A classifier that was shared has learnt from every image:
    each fold has one that was drawn anew.

    Heads of a frozen encoder: tests/trainer/training/test_frozen_heads.py.
    """
    judged: list[Arrays] = []

    def record(network: Network, tensors: Any, data: TrainingSet) -> np.ndarray:
        judged.append(to_arrays(tensors))
        return np.zeros((len(data.labels), len(CLASSES)), np.float32)

    monkeypatch.setattr(conclusion, "predict", record)
    spec, broadcast = drafted(case, local_epochs=1)
    spec = msgspec.structs.replace(spec, rounds=1)
    few = {name: Images(share.train.take(np.arange(4)), None) for name, share in shares(2).items()}
    outcome = simulate(spec, broadcast, few)
    assert len(judged) == 2 * 4
    for tensors in judged:
        shared = outcome.broadcast.get("classifier.bias", np.full(3, np.inf))
        assert np.abs(tensors["classifier.bias"] - shared).max() > 0.01  # Adam's one step is 0.001


def test_cross_validation_gives_each_image_its_own_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an oracle in the model's place every verdict is right,
    whatever the order of the folds.
    """
    monkeypatch.setattr(
        conclusion, "predict", lambda network, tensors, data: np.eye(3)[data.labels]
    )
    spec, broadcast = drafted("local")
    model = simulate(spec, broadcast, {"plant-1": Images(images(1, 12), None)}).models["plant-1"]
    assert [verdict.digest for verdict in model.predictions] == list(images(1, 12).digests)
    assert [verdict.label for verdict in model.predictions] == [
        CLASSES[label] for label in images(1, 12).labels
    ]
    assert all(verdict.verdict == verdict.label for verdict in model.predictions)


def test_a_node_with_two_images_and_none_held_out_is_cross_validated() -> None:
    spec, broadcast = drafted("afedcl")
    outcome = simulate(spec, broadcast, {"plant-1": Images(images(1, 8), None)})
    metrics = outcome.models["plant-1"].metadata.metrics
    assert metrics["cross_validated"] == 1
    assert metrics["images"] == 8


def test_a_method_file_needs_no_torch_to_average() -> None:
    for name, entry in METHODS.items():
        method = make(name, Training(), complete_options(name, {}))
        encoder = {
            "encoder.project.weight": np.zeros((64, 3, 1, 1)),
            "encoder.encoding.hidden.weight": np.zeros((4, 9)),
        }
        arrays = method.init_server(encoder, Shape(4, 2), np.random.default_rng(0))
        assert all(isinstance(value, np.ndarray) for value in arrays.values()), entry


@pytest.mark.parametrize(
    ("method", "options", "hint"),
    [
        ("afedlc", {}, "afedcl"),
        ("afedcl", {"lamda": 1}, "lambda"),
        ("afedcl", {"lambda": "much"}, "lambda"),
        ("afedcl", {"lambda": -1}, "lambda"),
        ("afedcl", {"start": "globl"}, "global"),
        ("fedpox", {}, "fedprox"),
        ("scafold", {}, "scaffold"),
        ("fedprox", {"nu": 1}, "mu"),
        ("fedprox", {"mu": 0}, "mu"),
        ("ditto", {"lambda": 0}, "lambda"),
        ("ditto", {"lam": 1}, "lambda"),
        ("fedala", {"share": 80}, "share"),
        ("fednova", {"momentum": 1}, "momentum"),
    ],
)
def test_a_wrong_name_or_value_is_answered_with_the_right_one(
    method: str, options: dict[str, Any], hint: str
) -> None:
    with pytest.raises(UsageError, match=hint):
        complete_options(method, options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"fusion": "none", "deploy": "final"}, "deploy does not combine with fusion=none"),
        ({"fusion": "none", "fusion_start": 0.3}, "fusion_start does not combine with fusion=none"),
        (
            {"fusion": "fixed", "fusion_rate": 0.01},
            "fusion_rate does not combine with fusion=fixed",
        ),
        (
            {"fusion": "fixed", "fusion_range": "unit"},
            "fusion_range does not combine with fusion=fixed",
        ),
        ({"weights": "images", "floor": 0.1}, "floor does not combine with weights=images"),
        ({"weights": "equal", "ceiling": 1.0}, "ceiling does not combine with weights=equal"),
        ({"floor": 2.0}, "floor=2 is not below ceiling=1.38629"),
        (
            {"fusion_range": "unit", "fusion_start": 1.5},
            "fusion_start=1.5 lies outside fusion_range=unit",
        ),
    ],
)
def test_options_that_do_not_combine_say_why_and_what_to_do(
    options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError) as caught:
        make("afedcl", Training(), complete_options("afedcl", options))
    assert reason in caught.value.what
    assert caught.value.remedy


def test_every_method_stands_in_the_docs_and_in_the_help() -> None:
    page = (REPOSITORY / "docs" / "research.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)$", page, re.MULTILINE))
    assert rows.keys() >= {*METHODS}
    # an extension's method, which need not be installed, has a page of its own
    assert all(".md)" in rows[name] for name in rows.keys() - METHODS.keys())
    (option,) = Method.__metadata__
    assert re.split(r", | or ", option.help.rstrip(".")) == NAMED == sorted(METHODS)
    assert str(DEFAULT_METHOD) == RECOMMENDED


def test_options_from_a_command_line_are_read_as_their_type() -> None:
    assert complete_options("afedcl", {"lambda": "0.5"})["lambda"] == 0.5


def test_a_personal_tree_keeps_the_received_encoder_apart() -> None:
    tensors = next(iter(run("afedcl").models.values())).tensors
    assert strip_prefix("received", tensors).keys() == strip_prefix("encoder", tensors).keys()


@case
def test_a_method_explains_all_metrics_that_it_reports_and_no_others(case: str) -> None:
    spec, _ = drafted(case)
    declared = make(spec.method, spec.training, spec.options).metrics
    for model in plain(case).models.values():
        reported = {key for entry in model.metadata.history for key in entry} - {
            "round",
            "accuracy",
            "accuracy_all",
        }
        assert reported == {metric.key for metric in declared}
    assert all(metric.title and metric.meaning.endswith(".") for metric in declared)
    assert len({metric.key for metric in declared}) == len(declared)


@case
def test_a_personal_model_is_of_the_fusion_that_the_method_declares(case: str) -> None:
    spec, _ = drafted(case)
    method = make(spec.method, spec.training, spec.options)
    declared = (method.statistics or method).fusion
    network = Network(spec.model, len(CLASSES))
    for model in plain(case).models.values():
        assert infer_fusion(model.tensors) == declared
        assert model.tensors["classifier.weight"].shape == (
            len(CLASSES),
            declared.width(network.shape.features),
        )


def test_training_that_diverges_says_so() -> None:
    spec, broadcast = drafted("afedcl")
    participant = Participant(spec, "plant-1", shares()["plant-1"])
    state = participant.start(broadcast)
    state.tensors["classifier.bias"].fill_(float("inf"))
    with pytest.raises(EdgeNodeError, match="L_C is nan"):
        participant.contribute(state, broadcast, 1)
