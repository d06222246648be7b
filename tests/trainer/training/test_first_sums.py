"""A federation's first sums are a model, which training must beat."""

import msgspec
import numpy as np
import pytest

from broker_config.protocol.messages import Spec
from tests.support.method_cases import CLASSES, equal
from tests.support.method_cases import images as drawn_images
from trainer.data.class_folders import Images, LabelledImages
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate
from trainer.models.named_tensors import Arrays
from trainer.models.network import to_arrays
from trainer.training.first_sums import measure_gain
from trainer.training.personal_model import PersonalModel

PLANT, OTHER = "plant-1", "plant-2"
OWN = [0, 1]


def drafted(method: str, codec: str = "none") -> tuple[Spec, Arrays]:
    request = Request(method, model="small", weights="none", size=16, seed=3, codec=codec)
    if method != "gaussian":
        request = request._replace(rounds=1)
    spec, broadcast = draft(request, federation="test", classes=CLASSES, nodes=2)
    return msgspec.structs.replace(spec, run="1" * 16), broadcast


def concluded(method: str, plant: Images, codec: str = "none") -> PersonalModel:
    spec, broadcast = drafted(method, codec)
    nodes = {PLANT: plant, OTHER: Images(drawn_images(2, 12), None)}
    return simulate(spec, broadcast, nodes, compare=True).models[PLANT]


def split(images: LabelledImages) -> Images:
    held_out = np.arange(2, len(images.labels), 6)
    kept = np.setdiff1d(np.arange(len(images.labels)), held_out)
    return Images(images.take(kept), images.take(held_out), were_split=True)


@pytest.mark.parametrize("codec", ["none", "int4"])
def test_without_images_that_judge_training_the_model_is_that_of_one_message(codec: str) -> None:
    whole = Images(drawn_images(1, 12), None)
    after = concluded("afedcl_plus", whole, codec)
    first = concluded("gaussian", whole, codec)
    assert equal(to_arrays(after.tensors), to_arrays(first.tensors))
    assert after.predictions == first.predictions
    assert after.metadata.method == "gaussian"
    assert after.metadata.comparison is not None
    gain = after.metadata.comparison.training
    assert gain is not None
    assert (gain.images, gain.is_shown) == (0, False)
    assert len(after.metadata.history) == 3


def test_the_model_of_the_first_sums_tells_what_the_whole_run_has_spent() -> None:
    request = Request(
        "afedcl_plus",
        model="small",
        weights="none",
        size=16,
        rounds=1,
        seed=3,
        privacy={"epsilon": "4"},
        training={"batch_norm": "eval"},
    )
    spec, broadcast = draft(request, federation="test", classes=CLASSES, nodes=2)
    nodes = {name: Images(drawn_images(seed, 12), None) for seed, name in ((1, PLANT), (2, OTHER))}
    model = simulate(spec, broadcast, nodes, compare=True).models[PLANT]
    assert model.metadata.method == "gaussian"
    assert model.metadata.privacy is not None
    spent = model.metadata.history[-1]["epsilon"]
    assert model.metadata.privacy.epsilon == spent > 3


def test_images_that_training_has_not_seen_are_in_the_model_of_one_message() -> None:
    images = drawn_images(1, 12)
    after = concluded("afedcl_plus", split(images))
    comparison = after.metadata.comparison
    assert comparison is not None
    assert comparison.training is not None
    assert comparison.training.images == 2
    if not comparison.training.is_shown:
        assert {each.digest for each in after.training_images} == {*images.digests}
        assert after.metadata.metrics["images"] == 12


def test_images_that_were_brought_to_test_never_train() -> None:
    images = drawn_images(1, 12)
    test = drawn_images(101, 8)
    after = concluded("afedcl_plus", Images(images, test))
    assert {each.digest for each in after.training_images} == {*images.digests}
    assert after.metadata.metrics["images"] == 8


def logits(labels: np.ndarray, right: int, margin: float) -> np.ndarray:
    """Logits of a model that is right about the first images."""
    named = np.where(np.arange(len(labels)) < right, labels, 1 - labels)
    return margin * np.eye(len(CLASSES))[named]


@pytest.mark.parametrize(
    ("count", "first_right", "trained_right", "is_shown"),
    [
        (40, 25, 40, True),
        (40, 40, 25, False),
        (40, 38, 39, False),
        (3, 0, 3, True),
        (3, 1, 3, False),
    ],
    ids=["clearly better", "worse", "hardly better", "just enough", "too few"],
)
def test_training_is_deployed_where_held_out_images_show_that_it_pays(
    count: int, first_right: int, trained_right: int, is_shown: bool
) -> None:
    images = drawn_images(2, count)
    first = logits(images.labels, first_right, 3)
    trained = logits(images.labels, trained_right, 3)
    gain = measure_gain(OWN, images, (images, first), trained)
    assert gain.is_shown == is_shown
    assert gain.images == count
    assert (gain.first, gain.trained) == (first_right / count, trained_right / count)
    assert gain.low <= gain.trained - gain.first <= gain.high


def test_look_alikes_are_one_piece_of_evidence() -> None:
    images = drawn_images(2, 40)
    alike = images._replace(groups=np.arange(40) // 20)
    judged = [
        measure_gain(OWN, each, (each, logits(each.labels, 25, 3)), logits(each.labels, 40, 3))
        for each in (images, alike)
    ]
    assert [gain.is_shown for gain in judged] == [True, False]


def test_models_are_compared_on_the_images_that_both_were_judged_by() -> None:
    images = drawn_images(2, 12)
    later = images.take(np.arange(4, 12))
    gain = measure_gain(
        OWN, images, (later, logits(later.labels, 8, 3)), logits(images.labels, 4, 3)
    )
    assert (gain.images, gain.first, gain.trained) == (8, 1, 0)
    none = images.take(np.arange(0))
    assert (
        measure_gain(OWN, images, (none, np.zeros((0, 3))), logits(images.labels, 4, 3)).images == 0
    )
