"""What is `afedcl_plus`'s own beside the properties of all methods: sums,
a classifier of directions, sums.
"""

import numpy as np
import pytest
import torch

from broker_config.protocol.messages import Spec
from broker_config.protocol.round_contents import (
    broadcast_tensors,
    contribution_tensors,
    count_training_rounds,
    is_statistics_round,
)
from tests.support.method_cases import CLASSES, equal, shares
from trainer.data.training_set import TrainingSet
from trainer.federation.server import round_sums
from trainer.federation.server.aggregation import largest
from trainer.federation.server.robust_rules import InMemory
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate
from trainer.methods import METHODS, make
from trainer.models.named_tensors import Arrays, select
from trainer.models.network import Network, to_arrays, to_tensors
from trainer.statistics import lda_head
from trainer.statistics.features import view_features
from trainer.statistics.sums import VIEWS, Sums, collect
from trainer.training.alone import alone_spec


def drafted(rounds: int = 2, seed: int = 0) -> tuple[Spec, Arrays]:
    request = Request(
        "afedcl_plus", {}, "small", "none", 16, {"local_epochs": 1}, rounds, seed=seed
    )
    return draft(request, federation="test", classes=CLASSES, nodes=3)


def totals(spec: Spec, encoder: Arrays) -> Sums:
    network = Network(spec.model, len(spec.classes))
    sums = [
        collect(
            view_features(
                network, to_tensors(encoder), TrainingSet.of(share.train, spec.preprocessing)
            ),
            share.train.labels,
            len(spec.classes),
        )
        for share in shares().values()
    ]
    return sums[0].combine(sums[1], np.add).combine(sums[2], np.add)


def test_there_are_two_rounds_for_sums_around_those_of_training() -> None:
    spec, _ = drafted(rounds=2)
    assert (spec.rounds, count_training_rounds(spec)) == (4, 2)
    assert [is_statistics_round(spec, round_) for round_ in range(1, 5)] == [
        True,
        False,
        False,
        True,
    ]
    assert contribution_tensors(spec, 1) == contribution_tensors(spec, 4) == spec.statistics
    assert broadcast_tensors(spec, 1).keys() == spec.tensors.keys()
    for round_ in range(2, 6):  # 5 is the result
        assert broadcast_tensors(spec, round_) == {**spec.tensors, **spec.statistics}
    assert alone_spec(spec).rounds == 2


@pytest.mark.parametrize("seed", [0, 5])
def test_training_begins_with_the_head_of_all_sums_and_that_of_the_trained_encoder_is_served(
    seed: int,
) -> None:
    spec, broadcast = drafted(rounds=1, seed=seed)
    after: list[Arrays] = []
    result = simulate(spec, broadcast, shares(), closed=lambda _, made: after.append(made))
    first, trained, last = after
    assert equal(select(first, ("encoder",)), select(broadcast, ("encoder",)))
    assert first.keys() == broadcast.keys() | spec.statistics.keys()
    total = totals(spec, first)
    for made in (first, trained):
        assert equal(total.arrays(), {name: made[name] for name in spec.statistics})
    head = lda_head.fit(total, total.without(total))
    certainty = lda_head.expected_scale(head.spread)
    np.testing.assert_allclose(first["classifier.weight"], certainty * head.weight, rtol=1e-5)
    np.testing.assert_allclose(first["classifier.bias"], certainty * head.bias, rtol=1e-5)
    for part in ("encoder", "classifier"):
        assert not equal(select(trained, (part,)), select(first, (part,)))
    assert equal(totals(spec, trained).arrays(), {name: last[name] for name in spec.statistics})
    assert equal(
        select(to_arrays(result.models["plant-1"].tensors), ("encoder",)),
        select(trained, ("encoder",)),
    )


def test_what_is_served_lies_halfway_between_the_first_encoder_and_the_trained_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def trained(settles: bool) -> Arrays:
        after: list[Arrays] = []
        with monkeypatch.context() as patch:
            if not settles:
                entry = METHODS["afedcl_plus"]
                as_trained = entry._replace(
                    factory=lambda *given: entry.factory(*given)._replace(settle=None)
                )
                patch.setitem(METHODS, "afedcl_plus", as_trained)
            simulate(spec, broadcast, shares(), closed=lambda _, made: after.append(made))
        return after[-2]

    spec, broadcast = drafted(rounds=2)
    halfway, whole = trained(settles=True), trained(settles=False)
    assert equal(select(halfway, ("classifier",)), select(whole, ("classifier",)))
    for name, value in select(whole, ("encoder",)).items():
        np.testing.assert_allclose(halfway[name], (broadcast[name] + value) / 2, atol=1e-6)


def test_the_classifier_takes_directions_however_long_features_are() -> None:
    """So the head of sums, which are of directions, means the same to training."""
    spec, broadcast = drafted()
    network, made = Network(spec.model, len(spec.classes)), to_tensors(broadcast)
    personal = make(spec.method, spec.training, spec.options).deploy({}, made)
    inputs = torch.rand(4, 3, 16, 16)
    assert personal["norm.scale"] == 1
    features = network.features(personal, inputs)
    torch.testing.assert_close(features.norm(dim=1), torch.ones(4))


def test_what_training_begins_with_may_be_sent_back_however_alike_images_of_a_class_are() -> None:
    """Where they hardly differ the head is surer than the fixed-point sums have room for:
    all would be refused.
    """
    spec, broadcast = drafted()
    of = np.repeat(np.eye(len(CLASSES), 64, dtype=np.float32), 4, axis=0)[:, None].repeat(
        VIEWS, axis=1
    )
    labels = np.repeat(np.arange(len(CLASSES)), 4)
    contributions = round_sums.collect(spec, make(spec.method, spec.training, spec.options), 1)
    for node in ("plant-1", "plant-2", "plant-3"):
        contributions.add(node, InMemory(collect(of, labels, len(CLASSES)).arrays()), 1.0)
    begun = contributions.aggregate(broadcast)
    for name in ("classifier.weight", "classifier.bias"):
        assert 100 < np.abs(begun[name]).max() <= largest(spec.tensors[name], spec.nodes) / 2
    assert (of[:, 0] @ begun["classifier.weight"].T + begun["classifier.bias"]).argmax(
        1
    ).tolist() == labels.tolist()


def test_a_class_that_nobody_has_is_not_named_by_the_first_head() -> None:
    request = Request("afedcl_plus", {}, "small", "none", 16, {"local_epochs": 1}, 1)
    spec, broadcast = draft(request, federation="test", classes=(*CLASSES, "never seen"), nodes=3)
    after: list[Arrays] = []
    simulate(spec, broadcast, shares(), closed=lambda _, made: after.append(made))
    weight, bias = after[0]["classifier.weight"], after[0]["classifier.bias"]
    assert not weight[3].any()
    assert bias[3] < (bias - np.linalg.norm(weight, axis=1))[:3].min()
