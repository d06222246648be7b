"""AFedCL's gradients against values computed by hand, on a network small enough to do so.

One image x = 1, label 0. Encoder f = e x with e = 2; received encoder g = 3. Classifier logits (f -
2, 0). Discriminator: hidden h = relu(f), logits (h - 2, 0); label 0 is local, 1 is global.

Classification: logits (0, 0), p = (1/2, 1/2). L_C = ln 2. Logits' gradient (-1/2, 1/2), hence
    dL_C/df = -1/2.
Discrimination, local half: logits (0, 0), loss ln 2, gradient (-1/2, 1/2); dL/dh = -1/2.
Global half: logits (1, 0), p = (0.731059, 0.268941), loss 1.313262, gradient (0.731059, -0.731059).
L_D is the mean of both halves, so each half's gradient counts half.
"""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from broker_config.protocol.messages import Training
from trainer.data.training_set import TrainingSet
from trainer.methods import make
from trainer.methods.base import Batch, Method, Step
from trainer.models.initial_weights import Shape
from trainer.models.named_tensors import select
from trainer.models.network import Network, Tensors
from trainer.training.engine import run_phase

X = torch.ones(1, 1)
LABEL = torch.tensor([0])
RECEIVED = {"encoder.weight": torch.tensor([[3.0]])}
L_D = (math.log(2) + 1.313262) / 2
# dL_D by hand: rows of the second layer, its biases, the first layer's weight and bias, and the
# local feature.
D1 = -0.25 * 2 + 0.365529 * 3
D_GRADIENTS = {
    "discriminator.1.weight": [[D1], [-D1]],
    "discriminator.1.bias": [-0.25 + 0.365529, 0.25 - 0.365529],
    "discriminator.0.weight": [[-0.25 * 2 + 0.365529 * 3]],
    "discriminator.0.bias": [-0.25 + 0.365529],
}
C_GRADIENTS = {"classifier.weight": [[-1.0], [1.0]], "classifier.bias": [-0.5, 0.5]}


class Toy(Network):
    """An encoder of one weight."""

    def __init__(self) -> None:
        self.shape = Shape(1, 2)

    @property
    def has_stem(self) -> bool:
        return False

    def encode(
        self, tensors: Tensors, images: Tensor, *, prefix: str = "encoder", training: bool = False
    ) -> Tensor:
        return images.flatten(1) @ tensors[f"{prefix}.weight"].T


def tensors() -> Tensors:
    values = {
        "encoder.weight": [[2.0]],
        "classifier.weight": [[1.0], [0.0]],
        "classifier.bias": [-2.0, 0.0],
        "discriminator.0.weight": [[1.0]],
        "discriminator.0.bias": [0.0],
        "discriminator.1.weight": [[1.0], [0.0]],
        "discriminator.1.bias": [-2.0, 0.0],
        "fusion": 0.25,
    }
    return {name: torch.tensor(value).requires_grad_() for name, value in values.items()}


def method(**options: Any) -> Method:
    return make(
        "afedcl",
        Training(),
        {name.replace("lam", "lambda"): value for name, value in options.items()},
    )


def gradients(step: Step) -> tuple[dict[str, Tensor], dict[str, float]]:
    """What the tensors under `step.trains` descend, and the reported metrics."""
    network, values = Toy(), tensors()
    batch = Batch(X, LABEL, network.encode(RECEIVED, X), RECEIVED)
    loss, metrics = step.loss(network, values, batch, network.encode)
    moved = select(values, step.trains)
    found = torch.autograd.grad(loss, list(moved.values()))
    return dict(zip(moved, found, strict=True)), {
        name: float(value.detach()) for name, value in metrics.items()
    }


def agree(found: Mapping[str, Tensor], by_hand: Mapping[str, Any]) -> None:
    for name, value in by_hand.items():
        assert torch.allclose(found[name], torch.tensor(value), rtol=1e-5, atol=1e-6), (
            name,
            found[name],
            value,
        )


@pytest.mark.parametrize("lam", [0.0, 0.1, 1.0])
def test_stage_1_descends_equations_4_to_7(lam: float) -> None:
    """E_k: dL_C/de - lambda dL_D/de = -1/2 - lambda * (-1/4).

    C_k and D_k: their own losses, whatever lambda is.
    """
    (step,) = method(lam=lam).train[0].steps
    found, metrics = gradients(step)
    agree(found, {"encoder.weight": [[-0.5 + lam * 0.25]], **C_GRADIENTS, **D_GRADIENTS})
    assert metrics == {"L_C": pytest.approx(math.log(2)), "L_D": pytest.approx(L_D, abs=1e-6)}
    assert set(found) == set(tensors()) - {"fusion"}


@pytest.mark.parametrize("lam", [0.0, 0.1, 1.0])
def test_the_discriminators_gradient_may_be_scaled_as_equation_7_writes_it(lam: float) -> None:
    (step,) = method(lam=lam, discriminator_gradient="lambda").train[0].steps
    found, _ = gradients(step)
    scaled = {name: (lam * torch.tensor(value)).tolist() for name, value in D_GRADIENTS.items()}
    agree(found, {"encoder.weight": [[-0.5 + lam * 0.25]], **C_GRADIENTS, **scaled})


def test_in_alternating_play_the_discriminator_moves_first_and_alone() -> None:
    first, second = method(lam=0.1, play="alternating").train[0].steps
    found, _ = gradients(first)
    agree(found, D_GRADIENTS)
    assert set(found) == set(D_GRADIENTS)
    found, _ = gradients(second)
    agree(found, {"encoder.weight": [[-0.5 + 0.1 * 0.25]], **C_GRADIENTS})
    assert not any(name.startswith("discriminator") for name in found)


def test_stage_2_descends_equations_9_to_11() -> None:
    """f = 1/4 * 3 + 3/4 * 2 = 2.25; logits (0.25, 0), p = (0.562177, 0.437823); dL/df = -0.437823.

    de = 3/4 dL/df, dA = (g - f_k) dL/df = dL/df.
    """
    (step,) = method().refine[0].steps
    found, metrics = gradients(step)
    slope = -0.437823
    agree(
        found,
        {
            "encoder.weight": [[0.75 * slope]],
            "fusion": slope,
            "classifier.weight": [[2.25 * slope], [-2.25 * slope]],
            "classifier.bias": [slope, -slope],
        },
    )
    assert metrics == {"L_F": pytest.approx(-math.log(0.562177), abs=1e-5)}
    assert set(found) == {"encoder.weight", "fusion", "classifier.weight", "classifier.bias"}


def run_stage(
    method: Method, stage: int, batch_norm: str = "train"
) -> tuple[Tensors, dict[str, float]]:
    """One epoch on the one image.

    Adam's first step is its learning rate along each gradient's sign.
    """
    phases = (method.train, method.refine)[stage]
    data = TrainingSet(
        torch.full((1, 1, 1, 1), 255, dtype=torch.uint8),
        LABEL,
        torch.zeros(1, 1, 1),
        torch.ones(1, 1, 1),
    )
    training = Training(learning_rate=1e-3, local_epochs=1, augment=False)
    values = {name: value.detach() for name, value in tensors().items()}
    metrics: dict[str, float] = {}
    for phase in phases:
        values, _, measured = run_phase(
            Toy(), phase._replace(epochs=1), values, {}, RECEIVED, data, training, 0
        )
        metrics |= measured
    return values, metrics


def test_the_engine_moves_each_tensor_along_its_gradient() -> None:
    after, metrics = run_stage(method(lam=0.1), 0)
    before = tensors()
    for name, sign in {
        "encoder.weight": 1,
        "discriminator.0.weight": -1,
        "discriminator.1.bias": -1,
    }.items():
        assert float((after[name] - before[name]).detach().flatten()[0]) == pytest.approx(
            sign * 1e-3, rel=1e-3
        )
    assert torch.equal(after["fusion"], before["fusion"])
    assert metrics["L_D"] == pytest.approx(L_D, abs=1e-6)


def test_stage_2_may_move_the_fusion_weight_at_a_rate_of_its_own_and_within_a_range() -> None:
    after, _ = run_stage(method(fusion_rate=0.02), 1)
    assert float(after["fusion"]) == pytest.approx(0.25 + 0.02, rel=1e-3)
    assert float(after["encoder.weight"]) == pytest.approx(2 + 1e-3, rel=1e-3)
    after, _ = run_stage(method(fusion_rate=2.0), 1)
    assert float(after["fusion"]) == pytest.approx(2.25, rel=1e-3)
    after, _ = run_stage(method(fusion_rate=2.0, fusion_range="unit"), 1)
    assert float(after["fusion"]) == 1.0


def test_the_reported_loss_may_be_measured_after_training() -> None:
    trained, last_epoch = run_stage(method(), 0)
    same, evaluated = run_stage(method(report="evaluation"), 0)
    assert all(torch.equal(trained[name], same[name]) for name in trained)
    assert evaluated["L_D"] < last_epoch["L_D"]  # the discriminator has learnt something in between
    assert evaluated["L_D"] == pytest.approx(discrimination_loss(trained), abs=1e-5)


def test_or_by_a_discriminator_that_has_learnt_to_tell_the_encoders_of_the_rounds_end() -> None:
    trained, _ = run_stage(method(), 0)
    _, evaluated = run_stage(method(report="evaluation"), 0)
    refitted, measured = run_stage(method(report="refitted", lam=0.1), 0)
    moved = {name for name in trained if not torch.equal(trained[name], refitted[name])}
    assert moved == {name for name in trained if name.startswith("discriminator")}
    assert measured["L_D"] < evaluated["L_D"]
    assert measured["L_D"] == pytest.approx(discrimination_loss(refitted), abs=1e-5)


def discrimination_loss(tensors: Tensors) -> float:
    """By hand."""
    w, b = tensors["discriminator.0.weight"].item(), tensors["discriminator.0.bias"].item()
    loss = 0.0
    for feature, label in ((float(tensors["encoder.weight"]), 0), (3.0, 1)):
        logits = (
            tensors["discriminator.1.weight"].flatten() * (w * feature + b)
            + tensors["discriminator.1.bias"]
        )
        loss += -float(torch.log_softmax(logits, 0)[label]) / 2
    return loss


def test_the_encoder_starts_from_the_global_one_or_carries_over() -> None:
    own, received = tensors(), {"encoder.weight": torch.tensor([[3.0]])}
    assert float(method().receive(own, received)["encoder.weight"].detach()) == 3.0
    assert float(method(start="carry").receive(own, received)["encoder.weight"].detach()) == 2.0
    kept = method().receive(own, received)
    assert all(kept[name] is own[name] for name in own if not name.startswith("encoder"))


def test_only_the_encoder_leaves_the_node() -> None:
    assert set(select(tensors(), method().sends({}))) == {"encoder.weight"}
    assert method().measure({"L_C": 1.0, "L_D": 0.4}, 10) == 0.4


def test_what_is_deployed_fuses_both_encoders() -> None:
    personal = method().deploy(
        {name: value.detach() for name, value in tensors().items()}, RECEIVED
    )
    assert set(personal) == {
        "encoder.weight",
        "received.weight",
        "classifier.weight",
        "classifier.bias",
        "fusion",
    }
    logits = Toy().predict(personal, X)
    torch.testing.assert_close(logits, torch.tensor([[0.25, 0.0]]))
