"""The end of a run deploys one candidate and measures it on images that it has not seen."""

from typing import Any

import msgspec
import numpy as np
import pytest

from broker_config.protocol.messages import Spec
from edge.uncertainty.performance import unseen_performance
from tests.support.method_cases import CLASSES, equal
from tests.support.method_cases import images as drawn_images
from trainer.data.class_folders import Images, LabelledImages
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate
from trainer.models.named_tensors import Arrays
from trainer.models.network import to_arrays
from trainer.progress import Stopped, ignore, watched
from trainer.training import frozen_heads
from trainer.training.frozen_heads import LeftOut
from trainer.training.personal_model import PersonalModel

PLANT = "plant-1"
OTHER = "plant-2"


def images(seed: int, count: int = 12, pairs: bool = True) -> LabelledImages:
    """Draw images of classes 1 and 2 where the seed is odd, of 0 and 1 otherwise.

    Every fourth image looks like the second one after it, which has the same class.
    """
    found = drawn_images(seed, count)
    numbers = np.arange(count)
    if pairs:
        numbers[2::4] -= 2
    return found._replace(groups=numbers)


def drafted(nodes: int = 2, method: str = "gaussian", **changes: Any) -> tuple[Spec, Arrays]:
    request = Request(method, model="small", weights="none", size=16, seed=3)
    spec, broadcast = draft(
        request._replace(**changes), federation="test", classes=CLASSES, nodes=nodes
    )
    return msgspec.structs.replace(spec, run="1" * 16), broadcast


def concluded(
    train: LabelledImages,
    test: LabelledImages | None = None,
    other: LabelledImages | None = None,
    **changes: Any,
) -> PersonalModel:
    """The plant's model of a simulated federation, with another plant's images if given."""
    nodes = {PLANT: Images(train, test)}
    if other is not None:
        nodes[OTHER] = Images(other, None)
    return simulate(*drafted(len(nodes), **changes), nodes).models[PLANT]


def check_one_figure(model: PersonalModel) -> None:
    """The accuracy that is told is that of the calibration, and of the comparison's choice."""
    metadata = model.metadata
    assert metadata.confidence is not None
    found = unseen_performance(metadata.confidence, metadata.classes, [*metadata.trained])
    assert found is not None
    metrics = metadata.metrics
    told = (metrics["accuracy"], metrics["accuracy_low"], metrics["accuracy_high"])
    assert told == (found.accuracy.share, found.accuracy.low, found.accuracy.high)
    assert told[1] <= told[0] <= told[2]
    assert metadata.confidence.images == metrics["images"]
    assert metadata.confidence.groups == metrics["groups"]
    if metadata.comparison is not None:
        best = metadata.comparison.chosen
        assert told == (best.accuracy, best.low, best.high)
        assert metadata.comparison.images == metrics["images"]


def test_all_images_of_a_plant_judge_look_alikes_left_out_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[LeftOut] = []
    leave_out = frozen_heads.leave_out

    def record(*arguments: Any) -> LeftOut:
        seen.append(leave_out(*arguments))
        return seen[-1]

    monkeypatch.setattr(frozen_heads, "leave_out", record)
    train = images(1)
    model = concluded(train)
    (found,) = seen
    folds = [set(fold.tolist()) for fold in found.folds]
    assert sorted(np.concatenate(found.folds)) == [*range(12)]
    for group in train.sets:
        assert any(fold >= set(group) for fold in folds)
    assert len(folds) == len(train.sets) == 9
    assert (model.metadata.metrics["images"], model.metadata.metrics["groups"]) == (12, 9)
    assert model.metadata.metrics["cross_validated"] == 1
    assert [each.digest for each in model.predictions] == [*train.digests]
    check_one_figure(model)


def test_a_class_that_only_one_group_shows_is_judged_where_others_know_it() -> None:
    train = images(1)
    of_two = train.labels == 2
    numbers = np.where(of_two, 100, np.arange(12))
    train = train._replace(groups=numbers)
    alone = concluded(train)
    assert alone.metadata.metrics["images"] == 6
    assert {each.label for each in alone.predictions} == {CLASSES[1]}
    check_one_figure(alone)
    together = concluded(train, other=images(3))
    assert together.metadata.metrics["images"] == 12
    assert len(together.predictions) == 12
    check_one_figure(together)


def test_images_that_were_brought_to_test_judge_and_choose_nothing() -> None:
    train = images(1)
    test = images(101, 8)
    left_out = concluded(train, other=images(3))
    model = concluded(train, test, other=images(3))
    assert equal(to_arrays(model.tensors), to_arrays(left_out.tensors))
    shuffled = test._replace(labels=test.labels[::-1].copy())
    misled = concluded(train, shuffled, other=images(3))
    assert equal(to_arrays(misled.tensors), to_arrays(left_out.tensors))
    metrics = model.metadata.metrics
    assert (metrics["images"], metrics["groups"], metrics["cross_validated"]) == (8, 6, 0)
    assert [each.digest for each in model.predictions] == [*test.digests]
    assert metrics != misled.metadata.metrics
    check_one_figure(model)


def test_the_images_of_a_plant_with_a_single_group_say_nothing() -> None:
    train = images(1, 4)._replace(groups=np.zeros(4, int))
    model = concluded(train, other=images(3))
    metadata = model.metadata
    assert (metadata.metrics, metadata.confidence, metadata.comparison) == ({}, None, None)
    assert model.predictions == ()
    assert len(model.training_images) == 4


def test_test_images_judge_a_plant_with_a_single_group_too() -> None:
    train = images(1, 4)._replace(groups=np.zeros(4, int))
    test = images(101, 8)
    model = concluded(train, test, other=images(3))
    assert model.metadata.metrics["images"] == 8
    assert [each.digest for each in model.predictions] == [*test.digests]
    check_one_figure(model)


def test_a_plant_without_images_has_a_model_and_no_figures() -> None:
    model = concluded(Images.none(16).train, other=images(3))
    metadata = model.metadata
    assert (metadata.metrics, metadata.confidence, metadata.comparison) == ({}, None, None)
    assert (model.predictions, metadata.trained) == ((), {})
    assert model.tensors["classifier.weight"][1].any()


def test_in_a_private_federation_a_plants_own_images_judge_as_they_are() -> None:
    train = images(1)
    privacy = {"epsilon": "8"}
    model = concluded(train, other=images(3), privacy=privacy)
    assert model.metadata.privacy is not None
    assert model.metadata.metrics["images"] == 12
    check_one_figure(model)
    exact = concluded(train, other=images(3))
    assert not equal(to_arrays(model.shared), to_arrays(exact.shared))


@pytest.mark.parametrize("method", ["fedavg", "afedcl_plus"])
def test_a_trained_model_is_judged_by_images_that_were_held_out_or_by_folds(method: str) -> None:
    training = {"local_epochs": 1, "batch_norm": "eval"}
    held_out = concluded(
        images(1), images(101, 8), other=images(3), method=method, rounds=1, training=training
    )
    assert held_out.metadata.metrics["cross_validated"] == 0
    assert held_out.metadata.metrics["images"] == 8
    check_one_figure(held_out)
    folds = concluded(images(1), other=images(3), method=method, rounds=1, training=training)
    assert folds.metadata.metrics["cross_validated"] == 1
    check_one_figure(folds)


def test_verdicts_are_of_what_is_deployed_and_as_sure_as_a_line_shows_them() -> None:
    """Cross-fitted, so that no image has a part in its own temperature."""
    model = concluded(images(1), other=images(3))
    confidence = model.metadata.confidence
    assert confidence is not None
    assert confidence.held_out is not None
    _, probabilities, _ = confidence.held_out.arrays(len(CLASSES))
    told = [each.confidence for each in model.predictions]
    np.testing.assert_allclose(told, probabilities.max(1), atol=1e-3)


@pytest.mark.parametrize("method", ["gaussian", "fedavg"])
def test_after_a_stop_no_further_batch_begins(method: str) -> None:
    """Neither of images that are looked at, nor of folds that are trained."""
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked >= 30

    nodes = {PLANT: Images(images(1), None)}
    with pytest.raises(Stopped), watched(ignore, stop):
        simulate(*drafted(1, method, rounds=int(method != "gaussian")), nodes, compare=True)
    assert asked == 30
