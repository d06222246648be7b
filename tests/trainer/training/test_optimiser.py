"""The optimiser takes the steps that torch's own classes take, without what these load."""

import subprocess
import sys

import pytest
import torch

from tests.support.paths import REPOSITORY
from trainer.methods.base import Sgd
from trainer.models.network import Tensors
from trainer.training.optimiser import Optimiser

RATES = {"encoder": 0.01, "bias": 0.01, "classifier": 0.1}
seeds = pytest.mark.parametrize("seed", range(3))


def drawn(seed: int) -> Tensors:
    random = torch.Generator().manual_seed(seed)
    shapes = {"encoder": (3, 4), "bias": (3,), "classifier": (2, 3)}
    return {
        name: torch.randn(shape, generator=random).requires_grad_()
        for name, shape in shapes.items()
    }


def descend(optimiser: Optimiser | torch.optim.Optimizer, tensors: Tensors, steps: int) -> None:
    """Against a loss of all tensors, at every second step of the classifier alone."""
    for step in range(steps):
        optimiser.zero_grad()
        sum(
            (tensors[name] ** 4).sum() for name in (tensors if step % 2 == 0 else ["classifier"])
        ).backward()  # type: ignore[union-attr]
        optimiser.step()


def groups(tensors: Tensors) -> list[dict[str, object]]:
    return [{"params": [tensor], "lr": RATES[name]} for name, tensor in tensors.items()]


@seeds
def test_adam_goes_on_with_the_moments_that_were_kept(seed: int) -> None:
    ours, theirs = drawn(seed), drawn(seed)
    before = Optimiser(ours, RATES, {})
    descend(before, ours, 3)
    kept = {name: value.clone() for name, value in before.moments.items()}
    descend(Optimiser(ours, RATES, before.moments | {"other/step": torch.ones(())}), ours, 5)
    adam = torch.optim.Adam(groups(theirs), fused=True)
    descend(adam, theirs, 3)
    descend(adam, theirs, 5)
    assert all(torch.equal(ours[name], theirs[name]) for name in RATES)
    assert all(torch.equal(before.moments[name], kept[name]) for name in kept)
    assert sorted(kept) == sorted(
        f"{name}/{moment}" for name in RATES for moment in ("step", "exp_avg", "exp_avg_sq")
    )


@seeds
@pytest.mark.parametrize("descent", [Sgd(0.1), Sgd(0.1, momentum=0.9, weight_decay=0.01)])
def test_sgd_is_torchs_and_keeps_no_moments(seed: int, descent: Sgd) -> None:
    ours, theirs = drawn(seed), drawn(seed)
    optimiser = Optimiser(ours, RATES, {"encoder/step": torch.ones(())}, descent)
    descend(optimiser, ours, 5)
    sgd = torch.optim.SGD(
        groups(theirs), momentum=descent.momentum, weight_decay=descent.weight_decay, fused=True
    )
    descend(sgd, theirs, 5)
    assert all(torch.equal(ours[name], theirs[name]) for name in RATES)
    assert optimiser.moments == {}


@pytest.mark.slow
def test_a_node_that_trains_the_default_model_loads_no_torch_compiler_nor_torchvision() -> None:
    code = """if True:
        import sys
        from tests.support.method_cases import CLASSES, shares
        from trainer.federation.server.spec import Participation, Request, draft
        from trainer.training.participant import Participant

        request = Request("afedcl_plus", {}, "mobilenet_v2", "surface", 32, {}, 1)
        spec, broadcast = draft(request, federation="test", classes=CLASSES, nodes=3, \
participation=Participation())
        participant = Participant(spec, "plant-1", shares()["plant-1"])
        participant.contribute(participant.start(broadcast), broadcast, 2)
        print([name for name in ("torch", "torch._dynamo", "torchvision") if name in sys.modules])
    """
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "['torch']"
