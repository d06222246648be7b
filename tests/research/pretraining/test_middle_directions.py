"""The directions of the last features that the default encoder takes;
test_efficientnet_lite.py has the digest of the shipped file.
"""

import numpy as np
import pytest
from safetensors.numpy import load_file

from research.pretraining.middle_directions import balance, find_directions
from trainer.models.catalogue import find_shipped
from trainer.models.initial_weights import initial_encoder
from trainer.models.named_tensors import strip_prefix


def test_directions_are_orthonormal_and_those_that_features_vary_in_most() -> None:
    """Here the last layer passes six channels on as they are, four vary."""
    deviation = np.array([0.0, 0.4, 0.0, 0.2, 0.3, 0.1])
    weights = {
        "_blocks.15._bn2.weight": deviation,
        "_blocks.15._bn2.bias": np.array([6.0, 2.0, 2.0, 2.0, 2.0, 2.0]),
        "_conv_head.weight": np.eye(6)[:, :, None, None],
        "_bn1.weight": np.ones(6),
        "_bn1.bias": np.zeros(6),
        "_bn1.running_mean": np.zeros(6),
        "_bn1.running_var": np.ones(6),
    }
    found = find_directions(weights, count=4, photographs=300)
    np.testing.assert_allclose(found @ found.T, np.eye(4), atol=1e-9)
    assert np.abs(found[:3]).argmax(1).tolist() == [1, 4, 3]


@pytest.mark.slow
def test_the_shipped_directions_are_found_anew() -> None:
    """Rounding may turn a few of the last ones into others that vary as much."""
    weights = strip_prefix("encoder", initial_encoder("efficientnet_lite0", "imagenet", 0))
    found = find_directions(weights)
    np.testing.assert_allclose(found @ found.T, np.eye(128), atol=1e-6)
    (name, shipped), *others = load_file(
        find_shipped("efficientnet_lite0_mid", "imagenet")[1]
    ).items()
    assert (name, shipped.shape, others) == ("_projection.weight", (128, 1280, 1, 1), [])
    rows = shipped[:, :, 0, 0].astype(np.float64)
    lengths = np.linalg.norm(rows, axis=1)
    assert lengths == pytest.approx(np.full(128, balance(weights, found)), rel=0.01)
    overlap = (found @ (rows / lengths[:, None]).T) ** 2
    assert overlap.sum() > 0.99 * 128
