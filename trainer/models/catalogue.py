"""The models that there are: how wide their features are, how many numbers they hold,
what they can begin with.
"""

from pathlib import Path

from trainer.models.encoders import ENCODERS
from trainer.models.encoders.encoder import Encoder
from trainer.models.weights_package import find_file

KNOWN: dict[str, Encoder] = dict(ENCODERS)
"""The backbones there are."""

FEATURES = {name: each.features for name, each in KNOWN.items()}
"""Width of each backbone's feature vector."""

VALUES = {name: each.values for name, each in KNOWN.items()}
"""How many numbers each backbone's encoder holds."""

LACKS = {name: each.lacks for name, each in KNOWN.items()}
"""What published weights hold beside a backbone's own tensors: beginnings of names."""

ONLY_SIZE = {name: each.size for name, each in KNOWN.items() if each.only_size}
"""Pixels of the images that a backbone takes, where it takes one size only."""

DEFAULT_SIZE = {name: each.size for name, each in KNOWN.items()}
"""Pixels of the images that a backbone takes, if a federation names none."""

SHIPPED = {name: each.shipped for name, each in KNOWN.items() if each.shipped}
"""By backbone.

`research/pretraining` made them: `surface` of drawn images alone, `imagenet` of published weights.
"""


CANDIDATES = ("efficientnet_lite0_mid", "mobilenet_v2_mid")
"""The backbones that `--weights auto` chooses among."""

CANDIDATE_SIZES = (128, 224)
"""Pixels of the images with which it compares them, unless a federation names a size."""

MILLISECONDS = {
    ("efficientnet_lite0_mid", 128): 3.6,
    ("efficientnet_lite0_mid", 224): 9.7,
    ("mobilenet_v2_mid", 128): 2.1,
    ("mobilenet_v2_mid", 224): 5.4,
}
"""Time for an image by backbone and pixels: fp32 in onnxruntime, one thread, as
`python -m benchmarks.backbones efficientnet_lite0_mid mobilenet_v2_mid` measured it.
"""


def find_shipped(model: str, weights: str) -> tuple[Path, ...]:
    """Return the files of these weights; none if they do not come with edge-node-weights.

    Raises:
        UsageError: they do, but the package is not installed here.
    """
    shipped = SHIPPED.get(model)
    if shipped is None or shipped.weights != weights:
        return ()
    return tuple(find_file(name) for name in shipped.files)


def suggest_weights(model: str) -> str:
    """A remedy where a model's initial weights cannot be had:
    what else `--weights` takes for it.
    """
    if model in SHIPPED:
        return f"pass --weights {SHIPPED[model].weights}, none or a FILE.safetensors"
    beginning = KNOWN[model].beginning
    if beginning is None:
        return "pass --weights none or a FILE.safetensors"
    return f"pass --weights none or a FILE.safetensors of {beginning.source}"
