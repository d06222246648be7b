"""What a coordinator would have of a plant: what its node would send,
and behind masks a sum with others.
"""

import msgspec
import numpy as np
import pytest

from edge_node.extensions.audit.contributions import audited_rounds, count_others, observe
from tests.support.audited_plant import drafted, striped
from trainer.data.class_folders import Images
from trainer.training.participant import Participant

QUICK = {"batch_norm": "eval", "local_epochs": 1}


def test_in_the_open_it_is_the_contribution_bit_for_bit() -> None:
    spec, broadcast = drafted("fedavg", training=QUICK)
    images = striped([4, 4, 0], 0)
    (seen,) = observe(spec, broadcast, images, 0, lambda: None)
    node = Participant(spec, "plant", Images(images, None))
    sent = node.contribute(node.start(broadcast), broadcast, 1)[1].tensors
    assert seen.tensors.keys() == sent.keys()
    assert all(np.array_equal(seen.tensors[name], sent[name]) for name in sent)


def test_what_is_coded_is_seen_as_it_travels() -> None:
    spec, broadcast = drafted("fedavg", training=QUICK, codec="int4")
    images = striped([4, 4, 0], 0)
    (coded,) = observe(spec, broadcast, images, 0, lambda: None)
    (exact,) = observe(
        msgspec.structs.replace(spec, codec="none"), broadcast, images, 0, lambda: None
    )
    name = "classifier.weight"
    assert not np.array_equal(coded.tensors[name], exact.tensors[name])
    assert (
        np.abs(coded.tensors[name] - exact.tensors[name]).max()
        < np.ptp(exact.tensors[name] - broadcast[name]) / 5
    )


@pytest.mark.parametrize("method", ["fedavg", "gaussian"])
def test_behind_masks_it_is_the_mean_of_models_or_the_sum_of_statistics(method: str) -> None:
    changes = {} if method == "gaussian" else {"training": QUICK}
    masked, broadcast = drafted(
        method, secure_aggregation=True, aggregate="mean", nodes=5, **changes
    )
    images = striped([8, 1, 0], 0)
    (seen,) = observe(masked, broadcast, images, 0, lambda: None)
    (alone,) = observe(
        msgspec.structs.replace(masked, mask_threshold=0), broadcast, images, 0, lambda: None
    )
    if method == "gaussian":
        others = seen.tensors["statistics.images"] - alone.tensors["statistics.images"]
        assert (others >= 2 * 4).all(), (
            "all five plants are in it, and each of the four others has every class"
        )
    else:
        name = "classifier.weight"
        assert count_others(masked, 1) == masked.mask_threshold - 1 == 3
        assert not np.allclose(seen.tensors[name], alone.tensors[name], atol=1e-6)
        far = np.abs(alone.tensors[name] - broadcast[name]).mean()
        assert np.abs(seen.tensors[name] - alone.tensors[name]).mean() < 4 * far


def test_training_is_seen_after_the_sums_that_it_begins_with() -> None:
    spec, broadcast = drafted("afedcl_plus", training=QUICK)
    assert audited_rounds(spec) == [1, 2]
    sums, model = observe(spec, broadcast, striped([4, 4, 4], 0), 0, lambda: None)
    assert (sums.is_statistics, model.is_statistics) == (True, False)
    assert not np.array_equal(model.received["classifier.weight"], broadcast["classifier.weight"])


def test_noise_follows_from_the_seed_and_is_another_one_for_each_plant() -> None:
    spec, broadcast = drafted("gaussian", privacy={"epsilon": "3"})

    def noisy(seed: int) -> np.ndarray:
        return observe(spec, broadcast, striped([4, 4, 4], 0), seed, lambda: None)[0].tensors[
            "statistics.images"
        ]

    assert np.array_equal(noisy(0), noisy(0))
    assert not np.array_equal(noisy(0), noisy(1))
