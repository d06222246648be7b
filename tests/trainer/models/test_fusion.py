"""Fusion of a personal model's encoders, and the mix of two models into one."""

import numpy as np
import pytest
import torch

from tests.support.method_cases import CASES, CLASSES, drafted, images
from trainer.data.class_folders import Images
from trainer.data.training_set import TrainingSet
from trainer.models.fusion import (
    ALONE,
    CONCATENATION,
    LENGTH,
    NORMALISED,
    OWN,
    RECEIVED,
    SINGLE,
    WEIGHTED_SUM,
    Fusion,
    infer_fusion,
    mix,
    mix_logits,
    spread_ratio,
)
from trainer.models.network import Network, Tensors
from trainer.training.participant import Participant

OWN_CLASSES = [0, 1]
FUSED = {
    "fedavg": (OWN, ALONE),
    "afedcl": (RECEIVED, OWN, ALONE),
    "fenda": (RECEIVED, OWN, ALONE),
    "fedavg, normalised": (OWN, ALONE),
    "afedcl, normalised": (RECEIVED, OWN, ALONE),
}


def trained(method: str, seed: int) -> Tensors:
    """A personal model of the small network, before its first round but with its own values."""
    method, _, norm = method.partition(", ")
    spec, broadcast = drafted(method, seed)
    participant = Participant(spec, "plant-1", Images(images(seed), images(seed + 50)))
    state = participant.start(broadcast)
    personal = participant._deploy(state.tensors, participant.tensors(broadcast))
    return {**personal, LENGTH: torch.tensor(5.0)} if norm else personal


def pixels() -> torch.Tensor:
    spec, _ = drafted("fedavg")
    return TrainingSet.of(images(9), spec.preprocessing).network_input(slice(None))


@pytest.mark.parametrize("method", FUSED)
def test_a_mixed_model_computes_the_mix_of_two_models_logits(method: str) -> None:
    assert method.partition(", ")[0] in CASES
    together, alone = trained(method, 3), trained("local", 4)
    network = Network("small", len(CLASSES))
    mixed = mix(together, alone, OWN_CLASSES, 0.3)
    length = LENGTH if "normalised" in method else ""
    assert infer_fusion(mixed) == CONCATENATION._replace(encoders=FUSED[method], length=length)
    with torch.no_grad():
        expected = mix_logits(
            network.predict(together, pixels()), network.predict(alone, pixels()), OWN_CLASSES, 0.3
        )
        assert torch.allclose(network.predict(mixed, pixels()), expected, atol=1e-5)


def test_a_mix_tells_novelty_as_the_model_that_was_trained_with_others() -> None:
    together, alone = trained("fedavg", 3), trained("local", 4)
    middle = torch.ones(3)
    assert (
        mix({**together, "novelty.middle": middle}, alone, OWN_CLASSES, 1.0)["novelty.middle"]
        is middle
    )


def test_a_mix_takes_own_classes_half_from_either_side_and_the_others_from_the_federation() -> None:
    together = np.array([[3.0, 1.0, 4.0, -2.0]])
    # what it thinks of classes that it was not taught counts nothing
    alone = np.array([[-7.0, -5.0, 100.0, 100.0]])
    mixed = mix_logits(together, alone, [0, 1], 1.0)
    assert mixed[0, 2:].tolist() == [4.0, -2.0]
    # The level of own classes is together's 2; the differences from it, (1, -1) and (-1, 1), are
    # averaged.
    assert mixed[0, :2].tolist() == [2.0, 2.0]


def test_a_mix_of_equal_opinions_changes_nothing() -> None:
    logits = np.random.default_rng(5).normal(size=(4, 6))
    shifted = logits + 3.0  # softmax ignores it
    assert np.allclose(mix_logits(logits, shifted, [1, 2, 5], 1.0), logits)


def test_a_model_that_is_too_sure_of_itself_weighs_no_more_than_the_other() -> None:
    logits = np.random.default_rng(6).normal(size=(9, 4))
    loud = 7 * logits + 2.0
    loud[:, 3] = 1e6  # a class that neither is asked about
    scale = spread_ratio(logits, loud, [0, 1, 2])
    assert scale == pytest.approx(1 / 7)
    assert np.allclose(mix_logits(logits, loud, [0, 1, 2], scale), logits)


def test_a_model_without_an_opinion_has_no_spread_to_be_brought_to() -> None:
    assert spread_ratio(np.eye(3), np.ones((3, 3)), [0, 1, 2]) == 1.0


def test_a_plain_model_has_one_encoder() -> None:
    assert infer_fusion({"encoder.a.weight": 1, "classifier.weight": 1}) == SINGLE


def test_normalised_features_have_one_length_and_their_direction() -> None:
    features = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    fused = NORMALISED.fuse([features], {LENGTH: torch.tensor(10.0)})
    assert torch.allclose(fused, torch.tensor([[6.0, 8.0], [6.0, 8.0], [0.0, 0.0]]))


def test_a_model_that_holds_a_length_classifies_normalised_features() -> None:
    plain, network = trained("fedavg", 3), Network("small", len(CLASSES))
    normalised = {**plain, LENGTH: torch.tensor(5.0)}
    assert infer_fusion(normalised) == NORMALISED
    with torch.no_grad():
        features = network.features(plain, pixels())
        unit = features / features.square().sum(1, keepdim=True).sqrt()
        expected = 5 * unit @ plain["classifier.weight"].T + plain["classifier.bias"]
        assert torch.allclose(network.predict(normalised, pixels()), expected, atol=1e-5)
        assert torch.allclose(network.features(normalised, pixels()), 5 * unit, atol=1e-5)


@pytest.mark.parametrize(
    "fusion",
    [SINGLE, WEIGHTED_SUM, CONCATENATION, CONCATENATION._replace(encoders=(RECEIVED, OWN, ALONE))],
    ids=str,
)
@pytest.mark.parametrize("length", ["", LENGTH], ids=["plain", "normalised"])
def test_each_encoders_head_reads_its_features_as_they_are_and_heads_add_up_to_logits(
    fusion: Fusion, length: str
) -> None:
    fusion = fusion._replace(length=length)
    random = torch.Generator().manual_seed(7)
    features = [torch.rand(4, 6, generator=random) for _ in fusion.encoders]
    weight = torch.randn(3, fusion.width(6), generator=random)
    tensors = {"fusion": torch.tensor(0.3), LENGTH: torch.tensor(5.0)}
    heads = fusion.heads(weight, features, tensors)
    found = sum(
        (head @ each.unsqueeze(2)).squeeze(2) for head, each in zip(heads, features, strict=True)
    )
    assert torch.allclose(
        torch.as_tensor(found), fusion.fuse(features, tensors) @ weight.T, atol=1e-5
    )
