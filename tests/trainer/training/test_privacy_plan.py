"""What makes a federation private, and what it costs: by method."""

from collections.abc import Mapping
from math import sqrt
from typing import Any

import pytest

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import ImagePrivacy, Spec
from tests.support.method_cases import CLASSES, ON_ANY_MODEL
from trainer.federation.server.spec import Request, draft
from trainer.methods import make
from trainer.privacy.epsilon import spent_epsilon
from trainer.training.privacy_plan import (
    describe,
    planned_epsilon,
    squared_distance,
)


def drafted(method: str, privacy: Mapping[str, str], **changes: Any) -> Spec:
    training = {"batch_norm": "eval", "local_epochs": 2}
    asked = Request(
        method, model="small", weights="none", size=16, training=training, privacy=privacy
    )
    return draft(asked._replace(**changes), federation="steel", classes=CLASSES, nodes=3)[0]


PRIVATE = ("afedcl_plus", "fedavg", "fedbn", "fedper", "fedprox", "fedrep", "fenda", "gaussian")


@pytest.mark.parametrize("method", PRIVATE)
@pytest.mark.parametrize("epsilon", ["0.5", "8"])
def test_noise_follows_from_an_epsilon_and_spends_no_more(method: str, epsilon: str) -> None:
    spec = drafted(method, {"epsilon": epsilon}, **({} if method == "gaussian" else {"rounds": 4}))
    assert float(epsilon) * 0.998 < planned_epsilon(spec) <= float(epsilon)
    assert f"spends epsilon {epsilon} of each of its training images, at delta 1e-05" in describe(
        spec
    )


def test_a_round_of_training_is_as_many_releases_as_steps_and_sums_are_one() -> None:
    spec = drafted("afedcl_plus", {"noise": "8", "sums": "5", "clip": "0.5"}, rounds=3)
    assert (spec.rounds, spec.privacy) == (5, ImagePrivacy(clip=0.5, noise=8.0, sums=5.0))
    method = make(spec.method, spec.training, spec.options, spec.head, spec.privacy)
    sums, training = (2 / 5) ** 2, 4 * (2 / 8) ** 2
    assert [squared_distance(spec, method, round_) for round_ in range(1, 6)] == pytest.approx(
        [sums, training, training, training, sums]
    )
    assert planned_epsilon(spec) == pytest.approx(spent_epsilon(sqrt(2 * sums + 3 * training)))


def test_a_head_of_statistics_costs_one_message_more() -> None:
    without = drafted("fedavg", {"noise": "8"}, rounds=3)
    beside = drafted("fedavg", {"noise": "8", "sums": "4"}, rounds=3, head="statistics")
    assert planned_epsilon(without) == pytest.approx(spent_epsilon(sqrt(6 / 16)))
    assert planned_epsilon(beside) == pytest.approx(spent_epsilon(sqrt(6 / 16 + 1 / 4)))


REFUSED = ("afedcl", "ditto", "fedala", "fednova", "local", "pfedfda", "scaffold")


def test_of_every_method_it_is_known_whether_it_can_be_private() -> None:
    assert sorted([*PRIVATE, *REFUSED]) == sorted(ON_ANY_MODEL)


@pytest.mark.parametrize("method", REFUSED)
def test_a_method_in_which_noise_could_hide_no_image_is_refused_with_the_reason(
    method: str,
) -> None:
    with pytest.raises(UsageError, match=f"--privacy.*{method}") as caught:
        drafted(method, {"epsilon": "3"})
    assert "another --method" in caught.value.remedy


@pytest.mark.parametrize("options", [{"dimensions": 8}, {"others": "efficientnet_lite0"}])
def test_sums_of_several_encoders_or_of_projected_features_have_no_private_form(
    options: dict[str, Any],
) -> None:
    with pytest.raises(UsageError, match="private form"):
        drafted("gaussian", {"epsilon": "3"}, options=options)


@pytest.mark.parametrize(
    ("method", "privacy", "why"),
    [
        ("fedavg", {"epsilons": "3"}, "privacy has no setting 'epsilons'"),
        ("fedavg", {"epsilon": "much"}, "cannot be had with this value"),
        ("fedavg", {"epsilon": "3", "clip": "-1"}, "cannot be had with this value"),
        ("fedavg", {"epsilon": "-3"}, "needs either an epsilon, or the noise"),
        ("fedavg", {"clip": "1"}, "needs either an epsilon, or the noise"),
        ("fedavg", {"epsilon": "3", "noise": "10"}, "needs either an epsilon, or the noise"),
        ("fedavg", {"sums": "10"}, "needs either an epsilon, or the noise"),
        ("gaussian", {"noise": "10"}, "needs either an epsilon, or the noise"),
        ("afedcl_plus", {"noise": "10"}, "needs either an epsilon, or the noise"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    method: str, privacy: dict[str, str], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        drafted(method, privacy)
