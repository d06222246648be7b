"""The encoders as training runs them compute what their modules compute."""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import cache
from threading import Event

import pytest
import torch
from torch import Tensor, nn

from trainer.models import backbones, fast_kernels
from trainer.models.catalogue import KNOWN
from trainer.models.named_tensors import add_prefix, is_trainable
from trainer.models.network import Network


def encoder(model: str) -> nn.Module:
    """A copy of `made`."""
    return deepcopy(made(model))


@cache
def made(model: str) -> nn.Module:
    """The modules, with statistics and affine maps like those of a trained network:
    none is 0 or 1.
    """
    random = torch.Generator().manual_seed(0)
    built = backbones.build(model)
    for module in built.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, generator=random)
        if isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
            nn.init.uniform_(module.weight, 0.8, 1.2, generator=random)
            nn.init.normal_(module.bias, 0, 0.1, generator=random)
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0, 0.1, generator=random)
            nn.init.uniform_(module.running_var, 0.8, 1.2, generator=random)
    return built


def tree_of(built: nn.Module) -> dict[str, Tensor]:
    state = {name: value.clone() for name, value in built.state_dict().items()}
    return {
        name: value.requires_grad_(is_trainable(name))
        for name, value in add_prefix("encoder", state).items()
    }


def images(count: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1)).to(dtype)


# At 64 px the last layers see 2 x 2 pixels, as federated images have; at 33 px strides leave a
# remainder.
@pytest.mark.parametrize(
    ("model", "size", "training"),
    [
        *(
            pytest.param(
                model, size, training, marks=pytest.mark.slow if size == 64 or not training else ()
            )
            for model in ("mobilenet_v2", "efficientnet_lite0", "small")
            for size in (33, 64)
            for training in (False, True)
        ),
        pytest.param("resnet18", 33, False, marks=pytest.mark.slow),
        ("resnet18", 33, True),
        ("efficientnet_lite0_mid", 33, True),  # whose features are of two layers
        pytest.param(
            "resnet50", 33, False, marks=pytest.mark.slow
        ),  # its layers differ from ResNet18's in their order alone
    ],
)
def test_features_gradients_and_statistics_are_the_modules(
    model: str, size: int, training: bool
) -> None:
    """In double precision: ReLU's kinks blow up the rounding of single precision."""
    built = encoder(model).train(training).double()
    tensors, batch = tree_of(built), images(3, size, torch.float64)
    theirs = built(batch)
    mine = Network(model, 3).encode(tensors, batch, training=training)
    torch.testing.assert_close(mine, theirs)
    direction = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(2))
    theirs.backward(direction)
    mine.backward(direction)
    for name, value in built.named_parameters():
        torch.testing.assert_close(
            tensors[f"encoder.{name}"].grad, value.grad, rtol=1e-6, atol=1e-9
        )
    for name, value in built.named_buffers():
        torch.testing.assert_close(tensors[f"encoder.{name}"], value)


@pytest.mark.parametrize("model", [name for name, each in KNOWN.items() if not each.only_size])
def test_in_single_precision_features_are_the_modules_to_rounding(model: str) -> None:
    """At an odd size; for one node, and mapped over stacked nodes."""
    built = encoder(model).eval()
    tensors = tree_of(built)
    stacked = {name: torch.stack([value, value]) for name, value in tensors.items()}
    batch = images(2, 97, torch.float32)
    with torch.no_grad():
        theirs = built(batch)
        mine = Network(model, 3).encode(tensors, batch)
        mapped = torch.func.vmap(Network(model, 3, mapped=True).encode)(stacked, batch.unsqueeze(1))
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(mapped.flatten(0, 1), theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "shape", [(40, 24, 144), (40, 144, 24), (640, 24, 144), (640, 144, 24), (5, 64, 64)]
)
@pytest.mark.parametrize("ceiling", [None, 6.0, float("inf")])
def test_the_fast_matrix_product_and_its_gradients_are_torchs(
    shape: tuple[int, int, int], ceiling: float | None
) -> None:
    rows, inputs, outputs = shape
    random = torch.Generator().manual_seed(0)
    pixels, weight, bias, direction = (
        torch.randn(size, generator=random)
        for size in ((rows, inputs), (outputs, inputs), (outputs,), (rows, outputs))
    )
    results = []
    for product in (fast_kernels._Product.apply, lambda x, w, b, c: clipped(x @ w.T + b, c)):
        arguments = [value.clone().requires_grad_() for value in (pixels, weight, bias)]
        out = product(*arguments, ceiling)
        results.append((out, *torch.autograd.grad(out, arguments, direction)))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)


def clipped(x: Tensor, ceiling: float | None) -> Tensor:
    return x if ceiling is None else x.clamp(0, ceiling)


def test_a_frozen_encoder_is_left_without_gradients() -> None:
    tensors = {name: value.detach() for name, value in tree_of(encoder("mobilenet_v2")).items()}
    assert (
        not Network("mobilenet_v2", 3).encode(tensors, images(2, 32, torch.float32)).requires_grad
    )


def test_other_threads_run_their_modules_while_an_encoder_is_traced() -> None:
    """Tracing replaces `nn.Module.__call__` for all threads: "NameError:
    module is not installed as a submodule".
    """
    begun, resumed = Event(), Event()

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            begun.set()
            assert resumed.wait(60)
            return self.layer(x)

    other, rows, slow = nn.Linear(2, 1), torch.ones(4, 2), Slow()
    with ThreadPoolExecutor() as pool:
        tracing = pool.submit(fast_kernels.FunctionalModule, slow, mapped=False)
        try:
            assert begun.wait(60)
            assert other(rows).shape == (4, 1)
        finally:
            resumed.set()
    context = fast_kernels.Context(dict(slow.named_parameters()), training=False)
    torch.testing.assert_close(tracing.result()(rows, context), slow.layer(rows))
