"""The conversion of a published state dict;
test_efficientnet_lite.py has the digest of what came of it.
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file

from research.pretraining.convert_lite0 import convert


def test_convolutions_are_halved_and_the_classifier_and_counters_left_out(tmp_path: Path) -> None:
    published = {
        "_conv_stem.weight": torch.randn(4, 3, 3, 3),
        "_bn0.running_var": torch.rand(4),
        "_bn0.num_batches_tracked": torch.tensor(7),
        "_fc.weight": torch.randn(5, 4),
        "_fc.bias": torch.randn(5),
    }
    torch.save(published, tmp_path / "published.pth")
    convert(tmp_path / "published.pth", tmp_path / "made.safetensors")
    made = load_file(tmp_path / "made.safetensors")
    assert {name: array.dtype for name, array in made.items()} == {
        "_conv_stem.weight": np.float16,
        "_bn0.running_var": np.float32,
    }
    assert np.array_equal(made["_bn0.running_var"], published["_bn0.running_var"].numpy())
