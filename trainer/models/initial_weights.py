"""Initial weights as numpy arrays. torch is needed only to draw or download an encoder,
not to read one from a file.
"""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from broker_config.protocol.errors import UsageError
from trainer.models.catalogue import (
    FEATURES,
    KNOWN,
    LACKS,
    SHIPPED,
    VALUES,
    find_shipped,
    suggest_weights,
)
from trainer.models.named_tensors import Arrays, select, strip_prefix

# published networks' ImageNet classifiers: not part of the encoder
_HEADS = ("classifier.", "fc.", "_fc.")


class Shape(NamedTuple):
    """What the heads' shapes follow from."""

    features: int
    classes: int


def init_linear(name: str, inputs: int, outputs: int, random: np.random.Generator) -> Arrays:
    """A fully connected layer, uniform in +-1/sqrt(inputs) as torch's: weight [outputs,
    inputs], bias [outputs].
    """
    bound = 1 / np.sqrt(inputs)
    return {
        f"{name}.weight": random.uniform(-bound, bound, (outputs, inputs)).astype(np.float32),
        f"{name}.bias": random.uniform(-bound, bound, outputs).astype(np.float32),
    }


def choose_weights(model: str) -> str:
    """The initial weights that serve a model best here: ImageNet's,
    where they are at hand or can be downloaded.
    """
    if model == "small":
        return "none"
    shipped = SHIPPED.get(model)
    if shipped is None or shipped.weights == "imagenet" or _can_download_imagenet(model):
        return "imagenet"
    return shipped.weights


def _can_download_imagenet(model: str) -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    from trainer.models import backbones  # noqa: PLC0415  (imports torch)

    return backbones.can_download(model)


def initial_encoder(model: str, weights: str, seed: int) -> Arrays:
    """The first global encoder, names below `encoder.`.

    Args:
        model: a key of FEATURES.
        weights: `none` (drawn from `seed`), `surface` (comes with edge-node-weights), `imagenet`
            (likewise, or is downloaded by torchvision) or a safetensors file: with the model's
            names (docs/protocol.md says whose they are), or what a federation has left, of
            which the encoder is taken. An encoder with a `beginning` may take its first layers
            alone from what is downloaded or in a file: the rest is drawn.
        seed: of the draw.

    Raises:
        UsageError: no such model, no such file, a file that is not this model's, or torch or the
            package edge-node-weights is needed and missing.
    """
    if model not in FEATURES:
        raise UsageError(f"there is no model {model!r}", f"take one of {', '.join(FEATURES)}")
    shipped = find_shipped(model, weights)
    if weights == "surface" and not shipped:
        have = [name for name, each in SHIPPED.items() if each.weights == weights]
        # another model is no remedy for a method that needs an encoder of this kind
        other = "" if KNOWN[model].beginning else f", or take --model {' or '.join(have)}"
        raise UsageError(
            f"no surface weights for {model!r} come with edge-node",
            f"{suggest_weights(model)}{other}",
        )
    if weights in ("none", "imagenet") and not shipped:
        backbones = _backbones(model, weights)
        encoder = (
            backbones.draw(model, seed) if weights == "none" else backbones.download(model, seed)
        )
    else:
        encoder = {}
        for path in shipped or (Path(weights),):
            encoder |= _read_weights(model, path)
        found = sum(array.size for array in encoder.values())
        if found != VALUES[model]:
            begun = _apply_beginning(model, weights, seed, encoder)
            if begun is None:
                raise UsageError(
                    f"{weights} holds {found:,} numbers beside a classifier, {model} has "
                    f"{VALUES[model]:,}",
                    "take the weights that were made for this model, or another --model",
                )
            encoder = begun
    return {f"encoder.{name}": array for name, array in encoder.items()}


def depends_on_seed(model: str, weights: str) -> bool:
    """Whether a model's first values follow from the seed,
    all of them or those behind what it begins with.
    """
    return weights == "none" or KNOWN[model].beginning is not None


def _apply_beginning(model: str, weights: str, seed: int, arrays: Arrays) -> Arrays | None:
    """An encoder that begins with `arrays` and is drawn from there on;
    None if it does not begin with such arrays.
    """
    beginning = KNOWN[model].beginning
    if beginning is None:
        return None
    begun = beginning.rename(arrays)
    drawn = _backbones(model, weights).draw(model, seed)
    expected = {name: array.shape for name, array in select(drawn, [beginning.part]).items()}
    return (
        {**drawn, **begun}
        if {name: array.shape for name, array in begun.items()} == expected
        else None
    )


def _backbones(model: str, weights: str) -> ModuleType:
    if importlib.util.find_spec("torch") is None:
        shipped = SHIPPED.get(model)
        kinds = (
            f"{shipped.weights} or a FILE.safetensors"
            if shipped
            else "a FILE.safetensors of the whole network"
        )
        raise UsageError(
            f"--weights {weights} needs torch, which is not installed here",
            f"install edge-node[train], or pass --weights {kinds}",
        )
    from trainer.models import backbones  # noqa: PLC0415  (imports torch)

    return backbones


def _read_weights(model: str, path: Path) -> Arrays:
    if not path.is_file():
        names = "none, imagenet" if KNOWN[model].beginning else "none, surface, imagenet"
        raise UsageError(
            f"there is no weights file {path}", f"pass {names} or an existing .safetensors file"
        )
    try:
        arrays = load_file(path)
    # the latter for bfloat16, which numpy does not have
    except (SafetensorError, TypeError) as error:
        raise UsageError(
            f"{path} is not a safetensors file of weights ({error})",
            "save them as float32 with safetensors.torch.save_file; pickled files (.pt, .pth) "
            "are never read",
        ) from error
    # a federation's model names it so, beside heads and sums
    arrays = strip_prefix("encoder", arrays) or arrays
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise UsageError(
            f"{path} holds NaN or infinity", "take weights of a training that has not diverged"
        )
    left_out = (*_HEADS, *LACKS.get(model, ()))
    return {
        name: array.astype(np.float32)
        for name, array in arrays.items()
        if not name.startswith(left_out) and not name.endswith("num_batches_tracked")
    }
