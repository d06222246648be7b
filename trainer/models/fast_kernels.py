"""The encoders as training runs them: the same function of the same tensors as their modules,
in fewer, faster steps.

Small batches of small images on one processor core spend most of their time beside the arithmetic.
So

- a 1 x 1 convolution is a matrix product over pixels, as a linear layer is one over tokens,
- BatchNorm on stored statistics is folded into the weights of the convolution before it, gradients
  included,
- ReLU works in place, or within the matrix product.

What else has tensors runs as its module does, on the values passed in.

Mapped over stacked nodes (`torch.func.vmap`) they do the same in operations that can be mapped.
Results differ from the modules' in rounding only. Every choice depends on shapes alone, never on
what ran before.
"""

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.models import backbones
from trainer.models.named_tensors import strip_prefix

# Folding is work on every weight, a BatchNorm of its own on every pixel: where weights are many, it
# is not worth it.
_FOLDED = 600  # weights an output channel, at most
# oneDNN's matrix product is twice as fast as torch's own on AMD's processors, where MKL holds back.
_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
_MOMENTUM = 0.1  # of every BatchNorm


class Context(NamedTuple):
    """The values that an encoder runs with."""

    tensors: Mapping[str, Tensor]  # the encoder's tensors
    # whether BatchNorm uses batch statistics, and updates those in the tensors in place
    training: bool


class FunctionalModule:
    """An encoder's structure, or a part's, free of values."""

    def __init__(self, encoder: nn.Module, mapped: bool):
        convolutions = [module for module in encoder.modules() if isinstance(module, nn.Conv2d)]
        # Matrix products want pixels of adjacent channels; other convolutions are faster without.
        by_pixels = sum(map(_pointwise, convolutions)) * 2 >= len(convolutions) > 0
        # A mapped tensor has no layout of its own to choose.
        self._layout = torch.channels_last if by_pixels and not mapped else torch.contiguous_format
        self._graph = _rewrite(encoder, by_pixels, mapped)
        # Attention's fused form cannot be mapped: it is written out.
        self._attention = partial(sdpa_kernel, SDPBackend.MATH) if mapped else nullcontext

    def __call__(self, inputs: Tensor, context: Context) -> Any:
        """What the module gives for images [n, 3, S, S], or for what it begins with."""
        # a part may begin with tokens
        layout = self._layout if inputs.ndim == 4 else torch.contiguous_format
        with self._attention():
            return self._graph(inputs.contiguous(memory_format=layout), context)


class FunctionalEncoder:
    """A backbone's structure, free of values: its frozen stem, where it has one, and the rest."""

    def __init__(self, model: str, mapped: bool):
        with torch.device("meta"):
            whole = backbones.build(model)
        self.shapes = {name: tuple(value.shape) for name, value in whole.state_dict().items()}
        self.rest = FunctionalModule(whole.without_stem(), mapped)
        self._children = dict(whole.named_children())
        self._parts = dict[str, FunctionalModule]()
        self._mapped = mapped

    @property
    def has_stem(self) -> bool:
        """Whether it begins with a stem."""
        return "stem" in self._children

    def part(self, name: str) -> FunctionalModule:
        """The child `name` by itself; it takes the whole encoder's tensors."""
        if name not in self._parts:
            self._parts[name] = FunctionalModule(
                nn.Sequential(OrderedDict({name: self._children[name]})), self._mapped
            )
        return self._parts[name]


@lru_cache
def functional_encoder(model: str, mapped: bool = False) -> FunctionalEncoder:
    """The structure of the backbone `model`, to be run as it is or `mapped` over stacked nodes."""
    return FunctionalEncoder(model, mapped)


# tracing replaces `nn.Module.__call__` for the whole process until it is done
_TRACING = threading.Lock()


class _Tracer(fx.Tracer):
    """Stops at modules that hold tensors themselves: a graph refers to modules' inputs,
    not to their tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """As in fx; but what other threads call meanwhile is no part of the graph,
        and simply runs.
        """
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return next(m.parameters(recurse=False), None) is not None or super().is_leaf_module(
            m, module_qualified_name
        )


def _rewrite(encoder: nn.Module, by_pixels: bool, mapped: bool) -> fx.GraphModule:
    """The encoder's graph, its layers exchanged for ours, with a second input: the context."""
    with _TRACING:
        traced = fx.GraphModule(encoder, _Tracer().trace(encoder))
    graph = traced.graph
    modules = dict(traced.named_modules())
    (images,) = graph.find_nodes(op="placeholder")
    with graph.inserting_after(images):
        context = graph.placeholder("context")
    for node in graph.find_nodes(op="call_module"):
        module = modules[node.target]
        if isinstance(module, nn.Conv2d):
            norm = _only_user(node, modules, nn.BatchNorm2d)
            relu = _only_user(norm or node, modules, nn.ReLU, nn.ReLU6)
            batch_norm = (
                None if norm is None else _BatchNorm(str(norm.target), modules[str(norm.target)])
            )
            ceiling = None if relu is None else _CEILINGS[type(modules[str(relu.target)])]
            block: nn.Module = _Convolution(
                node.target, module, batch_norm, ceiling, by_pixels and _pointwise(module), mapped
            )
            for absorbed in filter(None, (relu, norm)):
                absorbed.replace_all_uses_with(node)
                graph.erase_node(absorbed)
        elif isinstance(module, nn.BatchNorm2d):
            block = _BatchNorm(node.target, module)
        elif isinstance(module, nn.GroupNorm):
            block = _GroupNorm(node.target, module, mapped)
        elif isinstance(module, nn.Linear):
            block = _Linear(node.target, mapped)
        elif next(module.parameters(), None) is not None:
            block = _AsItIs(node.target, module)
        else:
            continue
        traced.set_submodule(node.target, block)
        node.args = (*node.args, context)
    traced.recompile()
    return traced


def _pointwise(convolution: nn.Conv2d) -> bool:
    return convolution.kernel_size == (1, 1) and convolution.groups == 1


_CEILINGS = {nn.ReLU: float("inf"), nn.ReLU6: 6.0}


def _only_user(
    node: fx.Node, modules: Mapping[str, nn.Module], *kinds: type[nn.Module]
) -> fx.Node | None:
    users = list(node.users)
    if (
        len(users) == 1
        and users[0].op == "call_module"
        and isinstance(modules[str(users[0].target)], kinds)
    ):
        return users[0]
    return None


class _AsItIs(nn.Module):
    """Any other module, on the values passed in.

    They are put into it while it runs, so each thread has a copy.
    """

    def __init__(self, name: str, module: nn.Module):
        super().__init__()
        self.name = name
        self.module = module
        self.copies = threading.local()

    def forward(self, x: Tensor, context: Context) -> Any:
        if not hasattr(self.copies, "module"):
            self.copies.module = copy.deepcopy(self.module)
        return functional_call(self.copies.module, strip_prefix(self.name, context.tensors), (x,))


class _Linear(nn.Module):
    def __init__(self, name: str, mapped: bool):
        super().__init__()
        self.name = name
        self.multiply = _multiply_rows_mapped if mapped else _multiply_rows

    def forward(self, x: Tensor, context: Context) -> Tensor:
        weight = context.tensors[f"{self.name}.weight"]
        out = self.multiply(
            x.flatten(0, -2), weight, context.tensors.get(f"{self.name}.bias"), None
        )
        return out.reshape(*x.shape[:-1], -1)


class _BatchNorm(nn.Module):
    def __init__(self, name: str, norm: nn.Module):
        super().__init__()
        self.name = name
        self.eps = cast(nn.BatchNorm2d, norm).eps

    def values(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean, variance, weight and bias."""
        mean = tensors[f"{self.name}.running_mean"]
        variance = tensors[f"{self.name}.running_var"]
        return mean, variance, tensors[f"{self.name}.weight"], tensors[f"{self.name}.bias"]

    def forward(self, x: Tensor, context: Context) -> Tensor:
        values = self.values(context.tensors)
        # Without cuDNN, whose choice of a kernel cannot be mapped over nodes. Switching is slow, so
        # only on a GPU.
        flags = torch.backends.cudnn.flags(enabled=False) if x.is_cuda else nullcontext()
        with flags:
            return functional.batch_norm(x, *values, context.training, _MOMENTUM, self.eps)


class _GroupNorm(nn.Module):
    def __init__(self, name: str, norm: nn.GroupNorm, mapped: bool):
        super().__init__()
        self.name = name
        self.groups = norm.num_groups
        self.eps = norm.eps
        self.mapped = mapped

    def forward(self, x: Tensor, context: Context) -> Tensor:
        weight = context.tensors[f"{self.name}.weight"]
        bias = context.tensors[f"{self.name}.bias"]
        if self.mapped:
            x = x.contiguous()  # vmap does not normalise what is laid out by pixels
        return functional.group_norm(x, self.groups, weight, bias, self.eps)


class _Convolution(nn.Module):
    """A convolution with the BatchNorm and the ReLU that follow it, if any."""

    def __init__(
        self,
        name: str,
        convolution: nn.Conv2d,
        norm: _BatchNorm | None,
        ceiling: float | None,
        by_pixels: bool,
        mapped: bool,
    ):
        super().__init__()
        self.multiply, self.clip = (
            (_multiply_rows_mapped, _clip_mapped) if mapped else (_multiply_rows, _clip)
        )
        self.name = name
        self.norm = norm
        self.ceiling = ceiling
        self.stride = convolution.stride[0]
        self.padding = int(convolution.padding[0])
        self.groups = convolution.groups
        self.foldable = norm is not None and convolution.weight[0].numel() <= _FOLDED
        self.by_pixels = by_pixels
        self.biased = convolution.bias is not None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        tensors = context.tensors
        norm = self.norm
        weight = tensors[f"{self.name}.weight"]
        if norm is None:
            bias = tensors[f"{self.name}.bias"] if self.biased else None
            return self._convolve(x, weight, bias, self.ceiling)
        if self.foldable and not context.training:
            mean, variance, scale, shift = norm.values(tensors)
            factor = scale * (variance + norm.eps).rsqrt()
            weight = weight * factor[:, None, None, None]
            return self._convolve(
                x, weight, torch.addcmul(shift, mean, factor, value=-1), self.ceiling
            )
        return self.clip(norm(self._convolve(x, weight, None, None), context), self.ceiling)

    def _convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, ceiling: float | None
    ) -> Tensor:
        if self.by_pixels:
            x = x[:, :, :: self.stride, :: self.stride]
            return _images(self.multiply(_pixels(x), weight.flatten(1), bias, ceiling), x)
        padding = self.padding
        # oneDNN pads these ten times slower than we do
        if self.groups > 1 and padding == 1 and min(x.shape[2:]) < 3:
            x = functional.pad(x, (padding,) * 4)
            padding = 0
        return self.clip(
            functional.conv2d(x, weight, bias, self.stride, padding, 1, self.groups), ceiling
        )


def _clip(x: Tensor, ceiling: float | None) -> Tensor:
    """ReLU up to `ceiling`, in place."""
    if ceiling is None:
        return x
    return cast(Tensor, _Clip.apply(x, ceiling))  # type: ignore[no-untyped-call]


def _clip_mapped(x: Tensor, ceiling: float | None) -> Tensor:
    return x if ceiling is None else functional.hardtanh(x, 0.0, ceiling)


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


def _multiply_rows(
    rows: Tensor, weight: Tensor, bias: Tensor | None, ceiling: float | None
) -> Tensor:
    if _ONEDNN and rows.device.type == "cpu" and rows.dtype == torch.float32:
        product = _Product.apply(rows, weight, bias, ceiling)  # type: ignore[no-untyped-call]
        return cast(Tensor, product)
    return _clip(functional.linear(rows, weight, bias), ceiling)


def _multiply_rows_mapped(
    rows: Tensor, weight: Tensor, bias: Tensor | None, ceiling: float | None
) -> Tensor:
    return _clip_mapped(functional.linear(rows, weight, bias), ceiling)


def _pixels(x: Tensor) -> Tensor:
    """[n, channels, height, width] -> [n * height * width, channels]."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def _images(pixels: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_pixels`, for images of the size of `like`."""
    count, _, height, width = like.shape
    return pixels.view(count, height, width, -1).permute(0, 3, 1, 2)


def _product(
    a: Tensor, b: Tensor, bias: Tensor | None = None, ceiling: float | None = None
) -> Tensor:
    """a [n, k] times b [m, k] transposed, plus bias, clipped."""
    clip, bounds = ("none", []) if ceiling is None else ("hardtanh", [0.0, ceiling])
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(a, b, bias, clip, bounds, ""))


class _Product(torch.autograd.Function):
    """Pixels [n, i] times weight [o, i] transposed, plus bias [o], clipped."""

    @staticmethod
    def forward(
        ctx: Any, pixels: Tensor, weight: Tensor, bias: Tensor | None, ceiling: float | None
    ) -> Tensor:
        out = _product(pixels, weight, bias, ceiling)
        saved = None if ceiling is None else out
        ctx.save_for_backward(pixels, weight, saved)
        ctx.ceiling = ceiling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        pixels, weight, out = ctx.saved_tensors
        if out is not None:
            gradient = torch.ops.aten.hardtanh_backward(gradient, out, 0.0, ctx.ceiling)
        of_pixels, of_weight, of_bias, _ = ctx.needs_input_grad
        pixel_gradient = _product(gradient, weight.t()) if of_pixels else None
        weight_gradient = _weight_gradient(gradient, pixels) if of_weight else None
        bias_gradient = gradient.sum(0) if of_bias else None
        return (
            pixel_gradient,
            weight_gradient,
            bias_gradient,
            None,
        )


def _weight_gradient(gradient: Tensor, pixels: Tensor) -> Tensor:
    """[o, i]. oneDNN is fastest with the longer side in b,
    if turning the result round costs little.
    """
    (rows, outputs) = gradient.shape
    inputs = pixels.shape[1]
    if outputs > inputs and rows > inputs:
        return _product(pixels.t(), gradient.t()).t()
    return _product(gradient.t(), pixels.t())
