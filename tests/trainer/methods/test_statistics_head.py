"""A head of statistics on the encoder that a method has trained,
and which methods it combines with.
"""

import numpy as np
import pytest

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Spec
from tests.support.method_cases import CLASSES, ON_ANY_MODEL, equal, shares
from trainer.data.training_set import TrainingSet
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate
from trainer.models.fusion import NORMALISED, infer_fusion
from trainer.models.named_tensors import Arrays, select
from trainer.models.network import Network, to_arrays, to_tensors
from trainer.statistics import lda_head
from trainer.statistics.features import view_features
from trainer.statistics.sums import collect
from trainer.training import conclusion

REFUSED = {
    "afedcl_plus": "has no other head than that of statistics",
    "fedbn": "different encoders",
    "gaussian": "has no other head than that of statistics",
    "local": "different encoders",
}
COMBINES = tuple(name for name in ON_ANY_MODEL if name not in REFUSED)


def drafted(method: str, rounds: int = 1) -> tuple[Spec, Arrays]:
    request = Request(
        method, {}, "small", "none", 16, {"local_epochs": 1}, rounds, head="statistics"
    )
    return draft(request, federation="test", classes=CLASSES, nodes=3)


@pytest.mark.parametrize("method", REFUSED)
def test_a_head_of_statistics_is_refused_with_the_reason(method: str) -> None:
    with pytest.raises(UsageError, match=REFUSED[method]) as caught:
        drafted(method)
    assert method in caught.value.what
    assert "leave out --head" in caught.value.remedy


@pytest.mark.parametrize("method", COMBINES)
def test_every_method_whose_nodes_share_an_encoder_gets_a_head_on_the_last_average(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round more than asked for.

    The classifier is that of the formulas for features of the last averaged encoder; whatever the
    node has trained of its own is left out.
    """
    monkeypatch.setattr(conclusion, "fit_scale", lambda *_: 1.0)
    spec, broadcast = drafted(method)
    assert spec.rounds == 2
    averages: list[Arrays] = []
    result = simulate(spec, broadcast, shares(), closed=lambda _, after: averages.append(after))
    trained = select(averages[0], ("encoder",))
    assert not equal(trained, select(broadcast, ("encoder",)))
    assert equal(select(result.broadcast, ("encoder",)), trained)

    network = Network(spec.model, 3)
    collected = {}
    for name, share in shares().items():
        data = TrainingSet.of(share.train, spec.preprocessing)
        collected[name] = collect(
            view_features(network, to_tensors(trained), data), share.train.labels, 3
        )
    first, *others = collected.values()
    total = first
    for each in others:
        total = total.combine(each, np.add)
    assert equal(total.arrays(), {name: result.broadcast[name] for name in spec.statistics})
    for name, model in result.models.items():
        assert infer_fusion(model.tensors) == NORMALISED
        assert equal(select(to_arrays(model.tensors), ("encoder",)), trained)
        head, length = lda_head.fit(total, collected[name]), float(model.tensors["norm.scale"])
        certainty = lda_head.expected_scale(head.spread)
        np.testing.assert_allclose(
            model.tensors["classifier.weight"] * length, certainty * head.weight, rtol=1e-5
        )
        np.testing.assert_allclose(
            model.tensors["classifier.bias"], certainty * head.bias, rtol=1e-5
        )


def test_without_rounds_given_there_are_as_many_as_the_method_trains_and_one() -> None:
    request = Request("fedavg", model="small", head="statistics")
    assert draft(request, federation="test", classes=CLASSES, nodes=3)[0].rounds == 31


def test_how_certain_the_head_is_follows_from_images_that_training_has_not_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Held-out images where there are any: with their answers turned round, logits shrink."""
    spec, broadcast = drafted("fedavg")
    flipped = {
        name: share._replace(
            test=share.test and share.test._replace(labels=share.test.labels[::-1].copy())
        )
        for name, share in shares().items()
    }
    honest, fooled = (
        [
            model.tensors["classifier.weight"]
            for model in simulate(spec, broadcast, each).models.values()
        ]
        for each in (shares(), flipped)
    )
    for one, other in zip(honest, fooled, strict=True):
        factor = float(other.norm() / one.norm())
        assert factor < 0.8
        np.testing.assert_allclose(other, factor * one, rtol=1e-4, atol=1e-6)
