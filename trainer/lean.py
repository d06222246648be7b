"""The encoders as training runs them: the same function of the same tensors as their modules, in fewer, faster steps.

Small batches of small images on one processor core spend most of their time beside the arithmetic. So

- a 1 x 1 convolution is a matrix product over pixels,
- BatchNorm on stored statistics is folded into the weights of the convolution before it, gradients included,
- ReLU works in place, or within the matrix product.

Results differ from the modules' in rounding only. Every choice depends on shapes alone, never on what ran before.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from trainer import backbones

# Folding is work on every weight, a BatchNorm of its own on every pixel: where weights are many, it is not worth it.
_FOLDED = 600  # weights an output channel, at most
# oneDNN's matrix product is twice as fast as torch's own on AMD's processors, where MKL holds back.
_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
_EPS, _MOMENTUM = 1e-5, 0.1  # of every BatchNorm


class Run(NamedTuple):
    """What an encoder runs with."""

    tree: Mapping[str, Tensor]  # the encoder's tensors
    training: bool  # whether BatchNorm uses batch statistics, and updates those in the tree in place


class Lean:
    """An encoder's structure, free of values."""

    def __init__(self, encoder: nn.Module):
        self.shapes = {name: tuple(value.shape) for name, value in encoder.state_dict().items()}
        convolutions = [module for module in encoder.modules() if isinstance(module, nn.Conv2d)]
        # Matrix products want pixels of adjacent channels; other convolutions are faster without.
        by_pixels = sum(map(_pointwise, convolutions)) * 2 >= len(convolutions)
        self._layout = torch.channels_last if by_pixels else torch.contiguous_format
        self._graph = _rewrite(encoder, by_pixels)

    def __call__(self, images: Tensor, run: Run) -> Tensor:
        """Features [n, features] of images [n, 3, S, S]."""
        return cast(Tensor, self._graph(images.contiguous(memory_format=self._layout), run))


@lru_cache
def lean(model: str) -> Lean:
    """The structure of the backbone `model`."""
    with torch.device("meta"):
        return Lean(backbones.build(model))


def _rewrite(encoder: nn.Module, by_pixels: bool) -> fx.GraphModule:
    """The encoder's graph, its layers exchanged for ours, with a second input: the run."""
    traced = fx.symbolic_trace(encoder)
    graph, modules = traced.graph, dict(traced.named_modules())
    (images,) = graph.find_nodes(op="placeholder")
    with graph.inserting_after(images):
        run = graph.placeholder("run")
    for node in graph.find_nodes(op="call_module"):
        module = modules[node.target]
        if isinstance(module, nn.Conv2d):
            norm = _only_user(node, modules, nn.BatchNorm2d)
            relu = _only_user(norm or node, modules, nn.ReLU, nn.ReLU6)
            block: nn.Module = _Convolution(
                node.target,
                module,
                None if norm is None else str(norm.target),
                None if relu is None else _CEILINGS[type(modules[str(relu.target)])],
                by_pixels and _pointwise(module),
            )
            for absorbed in filter(None, (relu, norm)):
                absorbed.replace_all_uses_with(node)
                graph.erase_node(absorbed)
        elif isinstance(module, nn.GroupNorm):
            block = _GroupNorm(node.target, module)
        else:
            continue
        traced.set_submodule(node.target, block)
        node.args = (*node.args, run)
    traced.recompile()
    return traced


def _pointwise(convolution: nn.Conv2d) -> bool:
    return convolution.kernel_size == (1, 1) and convolution.groups == 1


_CEILINGS = {nn.ReLU: float("inf"), nn.ReLU6: 6.0}


def _only_user(node: fx.Node, modules: Mapping[str, nn.Module], *kinds: type[nn.Module]) -> fx.Node | None:
    users = list(node.users)
    if len(users) == 1 and users[0].op == "call_module" and isinstance(modules[str(users[0].target)], kinds):
        return users[0]
    return None


class _GroupNorm(nn.Module):
    def __init__(self, name: str, norm: nn.GroupNorm):
        super().__init__()
        self.name, self.groups, self.eps = name, norm.num_groups, norm.eps

    def forward(self, x: Tensor, run: Run) -> Tensor:
        weight, bias = run.tree[f"{self.name}.weight"], run.tree[f"{self.name}.bias"]
        return functional.group_norm(x, self.groups, weight, bias, self.eps)


class _Convolution(nn.Module):
    """A convolution with the BatchNorm and the ReLU that follow it, if any."""

    def __init__(self, name: str, convolution: nn.Conv2d, norm: str | None, ceiling: float | None, by_pixels: bool):
        super().__init__()
        self.name, self.norm, self.ceiling = name, norm, ceiling
        self.stride, self.padding, self.groups = convolution.stride[0], int(convolution.padding[0]), convolution.groups
        self.foldable = norm is not None and convolution.weight[0].numel() <= _FOLDED
        self.by_pixels = by_pixels
        self.biased = convolution.bias is not None

    def forward(self, x: Tensor, run: Run) -> Tensor:
        tree, norm = run.tree, self.norm
        weight = tree[f"{self.name}.weight"]
        if norm is None:
            return self._convolve(x, weight, tree[f"{self.name}.bias"] if self.biased else None, self.ceiling)
        mean, variance = tree[f"{norm}.running_mean"], tree[f"{norm}.running_var"]
        scale, shift = tree[f"{norm}.weight"], tree[f"{norm}.bias"]
        if self.foldable and not run.training:
            factor = scale * (variance + _EPS).rsqrt()
            weight = weight * factor[:, None, None, None]
            return self._convolve(x, weight, torch.addcmul(shift, mean, factor, value=-1), self.ceiling)
        x = self._convolve(x, weight, None, None)
        x = functional.batch_norm(x, mean, variance, scale, shift, run.training, _MOMENTUM, _EPS)
        return _clip(x, self.ceiling)

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, ceiling: float | None) -> Tensor:
        if self.by_pixels:
            return _multiply(x[:, :, :: self.stride, :: self.stride], weight.flatten(1), bias, ceiling)
        padding = self.padding
        if self.groups > 1 and min(x.shape[2:]) < 3:  # oneDNN pads such small images ten times slower than we do
            x, padding = functional.pad(x, (padding,) * 4), 0
        return _clip(functional.conv2d(x, weight, bias, self.stride, padding, 1, self.groups), ceiling)


def _clip(x: Tensor, ceiling: float | None) -> Tensor:
    """ReLU up to `ceiling`, in place."""
    return x if ceiling is None else cast(Tensor, _Clip.apply(x, ceiling))  # type: ignore[no-untyped-call]


class _Clip(torch.autograd.Function):
    """As hardtanh_, which keeps a copy of its input; but the output tells as much."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ceiling: float) -> Tensor:
        ctx.mark_dirty(x.clamp_(0.0, ceiling))
        ctx.save_for_backward(x)
        ctx.ceiling = ceiling
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        return torch.ops.aten.hardtanh_backward(gradient, out, 0.0, ctx.ceiling), None


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, ceiling: float | None) -> Tensor:
    count, channels, height, width = x.shape
    pixels = x.permute(0, 2, 3, 1).reshape(-1, channels)
    if _ONEDNN and x.device.type == "cpu" and x.dtype == torch.float32:
        out: Tensor = _Product.apply(pixels, weight, bias, ceiling)  # type: ignore[no-untyped-call]
    else:
        out = _clip(functional.linear(pixels, weight, bias), ceiling)
    return out.view(count, height, width, -1).permute(0, 3, 1, 2)


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None, ceiling: float | None = None) -> Tensor:
    """a [n, k] times b [m, k] transposed, plus bias, clipped."""
    clip, bounds = ("none", []) if ceiling is None else ("hardtanh", [0.0, ceiling])
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(a, b, bias, clip, bounds, ""))


class _Product(torch.autograd.Function):
    """Pixels [n, i] times weight [o, i] transposed, plus bias [o], clipped."""

    @staticmethod
    def forward(ctx: Any, pixels: Tensor, weight: Tensor, bias: Tensor | None, ceiling: float | None) -> Tensor:
        out = _product(pixels, weight, bias, ceiling)
        ctx.save_for_backward(pixels, weight, None if ceiling is None else out)
        ctx.ceiling = ceiling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        pixels, weight, out = ctx.saved_tensors
        if out is not None:
            gradient = torch.ops.aten.hardtanh_backward(gradient, out, 0.0, ctx.ceiling)
        of_pixels, of_weight, of_bias, _ = ctx.needs_input_grad
        return (
            _product(gradient, weight.t()) if of_pixels else None,
            _weight_gradient(gradient, pixels) if of_weight else None,
            gradient.sum(0) if of_bias else None,
            None,
        )


def _weight_gradient(gradient: Tensor, pixels: Tensor) -> Tensor:
    """[o, i]. oneDNN is fastest with the longer side in b, if turning the result round costs little."""
    (rows, outputs), inputs = gradient.shape, pixels.shape[1]
    if outputs > inputs and rows > inputs:
        return _product(pixels.t(), gradient.t()).t()
    return _product(gradient.t(), pixels.t())
