"""Encoders by name: their structure, features, and first tensors."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import numpy as np
import torch
from torch import Tensor, nn

from broker_config.protocol.errors import UsageError
from trainer.models.catalogue import KNOWN, SHIPPED, suggest_weights
from trainer.models.encoders.encoder_module import EncoderModule
from trainer.models.named_tensors import Arrays, select
from trainer.models.torchvision_import import torchvision_models
from trainer.seeding import key_to_seed

_PATIENCE = 3.0  # seconds for a server to say that it is there


def build(model: str) -> EncoderModule:
    """The encoder's structure, without BatchNorm's integer counters: nothing uses them,
    and they do not average.
    """
    encoder = KNOWN[model].build()
    for module in encoder.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.num_batches_tracked = None
    return encoder


def draw(model: str, seed: int) -> Arrays:
    """Random initial weights, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key_to_seed(seed, "encoder"))
        return _to_arrays(build(model).state_dict())


def can_download(model: str) -> bool:
    """Whether `download` can be expected to succeed: the file is in torch's cache,
    or its server answers.
    """
    if not KNOWN[model].imagenet:
        return False
    url = _imagenet_weights(model).url
    if (Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[1]).is_file():
        return True
    try:
        # Torchvision's own address
        with urlopen(Request(url, method="HEAD"), timeout=_PATIENCE):  # noqa: S310
            return True
    except OSError:
        return False


def _imagenet_weights(model: str) -> Any:
    return getattr(torchvision_models(), KNOWN[model].imagenet).DEFAULT


def download(model: str, seed: int) -> Arrays:
    """torchvision's ImageNet weights; where a model only begins with them,
    the rest is drawn from `seed`.

    Raises:
        UsageError: the model has none, or there is no internet connection.
    """
    offline = [name for name, each in SHIPPED.items() if each.weights == "imagenet"]
    if not KNOWN[model].imagenet:
        others = [*offline, *(name for name, known in KNOWN.items() if known.imagenet)]
        raise UsageError(
            f"there are no ImageNet weights for {model!r}", f"take one of {', '.join(others)}"
        )
    weights = _imagenet_weights(model)
    beginning = KNOWN[model].beginning
    try:
        # torch says there what it downloads; our standard output may be JSON
        with redirect_stdout(sys.stderr):
            state = weights.get_state_dict(progress=True, check_hash=True, weights_only=True)
    except (URLError, OSError, RuntimeError) as error:
        other = (
            "" if beginning else f", or take --model {offline[0]}, whose ImageNet weights are here"
        )
        raise UsageError(
            f"the ImageNet weights could not be downloaded from {weights.url} ({error})",
            f"connect to the internet once, or {suggest_weights(model)}{other}",
        ) from error
    if beginning is None:
        return _to_arrays({name: state[name] for name in build(model).state_dict()})
    drawn = draw(model, seed)
    begun = beginning.rename(_to_arrays(state))
    return {**drawn, **select(begun, drawn)}


def _to_arrays(state: dict[str, Tensor]) -> Arrays:
    return {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in state.items()}
