"""A round of `gaussian` computed by hand, and what is its own beside the properties of all
methods.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Preprocessing, Spec, TensorSpec, Training
from tests.support.method_cases import CLASSES, drafted, equal, shares
from trainer.data.class_folders import Images, LabelledImages
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate
from trainer.methods import complete_options
from trainer.models.fusion import LENGTH
from trainer.models.initial_weights import Shape
from trainer.models.named_tensors import select
from trainer.models.network import Network, Tensors, to_arrays
from trainer.statistics.sums import specs
from trainer.training import frozen_heads, participant
from trainer.training.frozen_heads import Mixture


class Plane(Network):
    """An encoder that doubles: an image of one pixel has its first two channels as features."""

    def __init__(self, model: str = "plane", classes: int = 2) -> None:
        self.shape = Shape(2, classes)

    @property
    def has_stem(self) -> bool:
        return False

    def check(self, tensors: Tensors, source: str) -> None:
        """It fits."""

    def encode(
        self, tensors: Tensors, images: Tensor, *, prefix: str = "encoder", training: bool = False
    ) -> Tensor:
        return images[:, :2, 0, 0] * tensors[f"{prefix}.factor"]


def points(*labelled: tuple[int, tuple[int, int]]) -> LabelledImages:
    """Images of a class and two coordinates each, as channels of their only pixel; 100 is zero."""
    pixels = np.array([[[[100 + x, 100 + y, 0]]] for _, (x, y) in labelled], np.uint8)
    names = tuple(f"{labelled}{number}" for number in range(len(labelled)))
    return LabelledImages(
        pixels, np.array([label for label, _ in labelled]), names, tuple(map(Path, names))
    )


SEEN = points((0, (4, 3)), (1, (-8, 6)))
PLANTS = {
    "a": Images(points(*[(0, (4, 3)), (0, (4, -3))] * 2), SEEN),
    "b": Images(points((0, (0, -7)), (1, (0, 7)), (1, (0, 5))), SEEN),
}


def test_a_round_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of length one: a's four images of class 0 at (0.8, +-0.6), b's of class 1 twice at (0,
    1), of class 0 at (0, -1).

    Means: a's (0.8, 0); b's (0, -1) and (0, 1). About them only a's scatter, 4 * 0.36 along the
        second axis. Degrees of
    freedom: 7 images less 3 means, 4. So s2 = 1.44 / 4 = 0.36, and the covariance is diag(0, 0.36).

    Shrinkage: the fourth powers are 4/3 * 4 * 0.36^2 = 0.6912, over 4: 0.1728. phi = 0.36^2 =
        0.1296. Noise
    (0.1728 - 0.1296) / 4 = 0.0108; excess 0.1296 - 0.36^2 / 2 = 0.0648; a sixth. Sigma = diag(0.03,
    0.33).

    Between plants: A = 4 * 0.64 + 1 + 2 = 5.56. S_0 = (3.2, -1), |S_0|^2 / 5 = 2.248; |S_1|^2 / 2 =
    2. One pair more than classes. N - sum B / N = 7 - 17 / 5 - 4 / 2 = 1.6. tau2 = (5.56 - 4.248 -
    0.36) / 1.6 = 0.595.
    """
    tau2, within, precision = 0.595, 0.36, np.diag([1 / 0.03, 1 / 0.33])
    # Class 0 is on both sides: 0.4 of tau2 is the plant's offset; what is left counts twice where
    # one plant is all others (1 + 1 / 1), and 1 + 16 / 16 as well.
    signal, rest = 0.4 * tau2, 0.6 * tau2 * 2
    certain = signal / (signal + rest + within / 1 + within / 4)
    offset = {"a": certain * np.array([0.8, 1.0]), "b": certain * np.array([-0.8, -1.0])}
    general = {"a": np.array([0.0, -1.0]), "b": np.array([0.8, 0.0])}
    own = {"a": np.array([0.8, 0.0]), "b": np.array([0.0, -1.0])}
    others, mine = {"a": 1, "b": 4}, {"a": 4, "b": 1}

    spec = Spec(
        federation="plane",
        run="0" * 16,
        software="",
        method="gaussian",
        options=complete_options("gaussian", {}),
        model="plane",
        classes=("0", "1"),
        training=Training(),
        preprocessing=Preprocessing(size=1, mean=(100 / 255,) * 3, std=(1 / 255,) * 3),
        rounds=1,
        nodes=2,
        quorum=2,
        seed=0,
        sends=(),
        statistics=specs(2, 2),
        tensors={"encoder.factor": TensorSpec((1,), 30)},
    )
    monkeypatch.setattr(participant, "Network", Plane)
    consensus = Mixture(strength=1.0, together_scale=1.0, alone_scale=1.0, share=1.0)
    monkeypatch.setattr(frozen_heads, "fit_mixture", lambda *_: consensus)
    result = simulate(spec, {"encoder.factor": np.array([2], np.float32)}, PLANTS)
    assert result.broadcast["statistics.images"].tolist() == [5, 2]
    for plant in "ab":
        variance = rest + within / others[plant]
        weight = variance / (variance + within / mine[plant])
        first = weight * own[plant] + (1 - weight) * (general[plant] + offset[plant])
        # b alone has the class
        second = np.array([0.0, 1.0]) + (offset["a"] if plant == "a" else 0)
        by_hand = [
            [z @ precision @ h - h @ precision @ h / 2 for h in (first, second)]
            for z in np.array([[0.8, 0.6], [-0.8, 0.6]])
        ]
        tensors = result.models[plant].tensors
        pixels = torch.tensor([[4.0, 3, 0], [-8, 6, 0]])[:, :, None, None]
        certainty = 4 / (4 + 0.6 * 2)  # of 4 degrees of freedom in 2 dimensions
        logits = Plane().predict(tensors, pixels).numpy()
        np.testing.assert_allclose(np.diff(logits), certainty * np.diff(by_hand), rtol=1e-3)
        assert float(tensors[LENGTH]) == 1


def test_nothing_is_trained_and_the_model_has_the_encoder_that_came() -> None:
    spec, broadcast = drafted("gaussian")
    assert (spec.rounds, spec.sends) == (1, ())
    result = simulate(spec, broadcast, shares())
    assert equal(select(result.broadcast, ("encoder",)), broadcast)
    for model in result.models.values():
        assert equal(select(to_arrays(model.tensors), ("encoder",)), broadcast)
        personal = {name for name in model.tensors if not name.startswith("novelty.")}
        assert personal == broadcast.keys() | {"classifier.weight", "classifier.bias", LENGTH}


def projected(dimensions: int) -> dict[str, np.ndarray]:
    """Logits of each node's model for some images,
    from features projected to so many directions.
    """
    request = Request("gaussian", {"dimensions": dimensions}, "small", size=16)
    spec, broadcast = draft(request, federation="test", classes=CLASSES, nodes=3)
    assert spec.statistics["statistics.sums"].shape == (3, dimensions or 64)
    network, pixels = (
        Network("small", 3),
        torch.rand((8, 3, 16, 16), generator=torch.Generator().manual_seed(1)),
    )
    models = simulate(spec, broadcast, shares()).models
    return {node: network.predict(model.tensors, pixels).numpy() for node, model in models.items()}


def test_features_projected_to_as_many_directions_as_they_have_say_the_same() -> None:
    """No formula knows one direction from another: only the grid does."""
    plain, turned, fewer = projected(0), projected(64), projected(32)
    for node, logits in plain.items():
        np.testing.assert_allclose(turned[node], logits, rtol=1e-2, atol=1e-2 * np.ptp(logits))
        assert not np.allclose(fewer[node], logits, rtol=1e-2, atol=1e-2 * np.ptp(logits))


def test_more_directions_than_features_are_refused() -> None:
    with pytest.raises(UsageError, match=r"64 .*65"):
        draft(
            Request("gaussian", {"dimensions": 65}, "small", size=16),
            federation="t",
            classes=CLASSES,
            nodes=2,
        )
