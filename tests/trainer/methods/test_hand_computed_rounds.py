"""One round of every method against values computed by hand, on the network of
tests/support/toy_federation.py.
"""

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.toy_federation import (
    MEAN,
    NORM,
    RATE,
    START,
    A,
    B,
    Model,
    Toy,
    agree,
    descend,
    federate,
    images,
    values,
)
from trainer.methods.base import Sgd
from trainer.methods.fednova import effective_steps
from trainer.models.named_tensors import add_prefix


def test_the_steps_above_are_those_that_the_other_tests_take() -> None:
    agree(values(descend(START, 0)), values(A))
    agree(values(descend(START, 1)), values(B))


def test_local_trains_and_sends_nothing() -> None:
    done = federate("local")
    agree(done.broadcast, {"encoder.weight": [[2]]})
    agree(done.deployed("a"), values(A))
    agree(federate("local", rounds=2).deployed("a"), values(descend(A, 0)))


def test_fedavg_averages_by_images_and_deploys_the_average() -> None:
    done = federate("fedavg")
    agree(done.broadcast, values(MEAN))
    agree(done.deployed("a"), values(MEAN))
    agree(done.states["a"].tensors, values(A))


def test_fedprox_draws_every_step_towards_the_received_model() -> None:
    """The first step starts there, so it is FedAvg's.

    The second, at a: logits (0.305, -0.255), p0 = 0.636453, de = (1.1 + 0.1) * -0.363547 =
    -0.436256; mu (e - e_G) = 0.05; e = 2.05 + 0.1 * (0.436256 - 0.05) = 2.088626.
    """
    agree(federate("fedprox", mu=1.0).broadcast, values(MEAN))
    done = federate("fedprox", mu=1.0, epochs=2)
    agree(
        done.states["a"].tensors, {"encoder.weight": [[2.0886256]], **values(descend(A, 0, pull=1))}
    )


def test_fedper_averages_the_encoder_and_deploys_what_the_node_has_trained() -> None:
    done = federate("fedper")
    agree(done.broadcast, {"encoder.weight": [[1.975]]})
    assert set(done.broadcast) == {"encoder.weight"}
    agree(done.deployed("a"), values(A))
    after = federate("fedper", rounds=2).states["a"].tensors
    agree(after, values(descend((1.975, *A[1:]), 0)))


def test_fedrep_trains_the_head_first_then_the_body_on_it() -> None:
    """a: head (1.1, -0.1), (-1.95, -0.05); then logits (0.25, -0.25), p0 = 0.622459, de = 1.2 *
    -0.377541 = -0.453049. b: head (0.9, 0.1), (-2.05, 0.05); logits (-0.25, 0.25), p0 = 0.377541,
    de = 0.8 * 0.377541 = 0.302033. Mean 1:3 of 2.045305 and 1.969797: 1.988674.
    """
    done = federate("fedrep")
    agree(done.deployed("a"), {**values(A), "encoder.weight": [[2.0453049]]})
    agree(done.deployed("b"), {**values(B), "encoder.weight": [[1.9697967]]})
    agree(done.broadcast, {"encoder.weight": [[1.9886738]]})


def test_ditto_trains_a_personal_model_towards_the_received_one_beside_fedavgs() -> None:
    """Personal, at a: 2.05 after round 1.

    Round 2: de = -0.436256 as in FedProx's test, and lambda (v - w_G) with the average that the
    round started from: 2.05 - 1.975 = 0.075; v = 2.05 + 0.1 * (0.436256 - 0.075) = 2.086126.
    """
    agree(federate("ditto").broadcast, values(MEAN))
    done = federate("ditto", rounds=2, lam=1.0)
    agree(done.broadcast, federate("fedavg", rounds=2).broadcast)
    agree(
        done.deployed("a"),
        {"encoder.weight": [[2.0861256]], **values(descend(A, 0, pull=1, to=MEAN))},
    )


def test_fedala_mixes_its_own_head_with_the_received_one() -> None:
    """Round 2 at a, on the received e = 1.975 and with W = 1, hence the received head: logits
    (-0.14875, 0.12375), p0 = 0.432294, head's gradient -+1.121219 (weights) and -+0.567706
    (biases). Times received - own, -+0.15 and -+0.075, that is W's: 0.168183 and 0.042578. W = 1 -
    eta of it, within 0 and 1.
    """
    one_step = {"most_epochs": 1, "rounds": 2}
    agree(federate("fedala").deployed("a"), values(A))
    agree(federate("fedala").broadcast, values(MEAN))
    agree(
        federate("fedala").states["a"].tensors,
        {"mix.classifier.weight": [[1], [1]], "mix.classifier.bias": [1, 1]},
    )
    for eta, weight, bias in ((1.0, 0.831817, 0.957422), (10.0, 0.0, 0.574220)):
        tensors = federate("fedala", eta=eta, **one_step).states["a"].tensors
        agree(tensors, {"mix.classifier.weight": [[weight]] * 2, "mix.classifier.bias": [bias] * 2})
        c = (1.1 - 0.15 * weight, -0.1 + 0.15 * weight)
        b = (-1.95 - 0.075 * bias, -0.05 + 0.075 * bias)
        agree(tensors, values(descend((1.975, c, b), 0)))


@pytest.mark.parametrize(
    ("options", "first"),
    [({"rest": 1.0}, 10), ({"rest": 1e-9, "most_epochs": 13}, 13), ({"most_epochs": 4}, 4)],
    ids=["ten losses at rest", "capped", "capped before ten"],
)
def test_fedalas_first_adaptation_ends_and_later_ones_are_one_epoch(
    options: dict[str, Any], first: int
) -> None:
    """One batch an epoch. Round 1 has nothing to adapt: it looks once, and trains."""
    asked = [0]

    def stop() -> bool:
        asked[0] += 1
        return False

    counts = []
    for rounds in (1, 2, 3):
        asked[0] = 0
        federate(
            "fedala",
            rounds=rounds,
            plants={"a": images(1, 0), "b": images(1, 1)},
            stop=stop,
            **options,
        )
        counts.append(asked[0] / 2)  # plants
    assert [counts[0], counts[1] - counts[0], counts[2] - counts[1]] == [1 + 1, first + 1, 1 + 1]


def test_fedbn_averages_all_but_the_normalisation_layers() -> None:
    """The feature is scaled by n = 1: dn = e df = -1 at a, n = 1.1; at b n = 0.9.

    Neither leaves its plant.
    """
    done = federate("fedbn", begin={NORM: [1]})
    agree(done.broadcast, {**values(MEAN), NORM: [1]})
    agree(done.deployed("a"), {**values(MEAN), NORM: [1.1]})
    agree(done.deployed("b"), {**values(MEAN), NORM: [0.9]})
    # Round 2 starts from the average with the scale as it was left: f = 1.1 e, de = 1.1 df.
    f, c, b = descend((1.1 * MEAN[0], *MEAN[1:]), 0)
    e = MEAN[0] - 1.1 * (1.1 * MEAN[0] - f)
    agree(federate("fedbn", rounds=2, begin={NORM: [1]}).states["a"].tensors, values((e, c, b)))


def test_scaffold_corrects_every_step_by_the_control_variates() -> None:
    """Plant b's image is x = 0 of class 1: logits (-2, 0), p = (0.119203, 0.880797),
    de = dc = 0, db = +-0.119203.

    Round 1, all controls 0: a moves to A; b to b = (-2.011920, 0.011920). Plants count alike: e =
    2.025, c = (1.05, -0.05), b = (-1.980960, -0.019040). Each c_i is its gradient; c is their mean.
    Round 2 at a: y = x - 0.1 (g(x) - c_a + c), of e: -c_a + c = 0.5 - 0.25. At b: 0 - 0.25, y =
    2.025 + 0.025 = 2.05. One step makes c_i the gradient at x, and c their mean again.
    """
    plants = {"a": images(1, 0), "b": images(3, 1, x=0)}
    first = federate("scaffold", plants=plants, rate=RATE)
    middle: Model = (2.025, (1.05, -0.05), (-1.9809601, -0.0190399))
    agree(first.broadcast, values(middle))
    of_a = {
        "encoder.weight": [[-0.5]],
        "classifier.weight": [[-1], [1]],
        "classifier.bias": [-0.5, 0.5],
    }
    of_b = {
        "encoder.weight": [[0]],
        "classifier.weight": [[0], [0]],
        "classifier.bias": [0.119203, -0.119203],
    }
    c = {name: (np.array(of_a[name]) + np.array(of_b[name])) / 2 for name in of_a}
    agree(first.states["a"].tensors, add_prefix("control", of_a))
    agree(first.states["b"].tensors, add_prefix("control", of_b))
    agree(first.broadcast, add_prefix("control", c))

    second = federate("scaffold", rounds=2, plants=plants, rate=RATE)
    plain = values(descend(middle, 0))
    agree(second.states["a"].tensors, {n: plain[n] - RATE * (c[n] - np.array(of_a[n])) for n in c})
    agree(second.states["b"].tensors, {"encoder.weight": [[2.05]]})
    gradient = {n: (values(middle)[n] - plain[n]) / RATE for n in plain}
    np.testing.assert_allclose(
        second.states["a"].tensors["control.encoder.weight"], gradient["encoder.weight"], atol=1e-5
    )
    half = second.states["a"].tensors["control.encoder.weight"] / 2  # b's is 0
    np.testing.assert_allclose(second.broadcast["control.encoder.weight"], half, atol=1e-5)


def test_scaffolds_control_is_the_mean_of_the_gradients_of_several_steps() -> None:
    """(x - y) / (steps * rate) after two steps at a: (2 - 2.0936256) / 0.2."""
    done = federate("scaffold", rate=RATE, epochs=2)
    agree(done.states["a"].tensors, {"control.encoder.weight": [[-0.468128]]})


def test_scaffolds_control_moves_by_the_share_of_the_plants_that_contributed() -> None:
    """One of two: the model is the contributor's, c moves by half of its change."""
    done = federate("scaffold", plants={"a": images(1, 0)}, rate=RATE)
    agree(
        done.broadcast,
        {
            **values(A),
            "control.encoder.weight": [[-0.25]],
            "control.classifier.bias": [-0.25, 0.25],
        },
    )


def test_fednova_weighs_gradients_instead_of_steps() -> None:
    """Batches of two: one step at a, two at b.

    With momentum 0.5, a_a = 1 and a_b = (2 - 0.5 * 0.75 / 0.5) / 0.5 = 2.5.

    b: 1.95, (0.9, 0.1), (-2.05, 0.05); logits (-0.295, 0.245), p0 = 0.368187, de = 0.8 * 0.368187 =
        0.294550;
    with momentum 0.25 + 0.294550, e = 1.95 - 0.0544550 = 1.895545. Of e, (w - w_i) / a_i: -0.05 and
    0.041782. sum p_i a_i = (1 + 3 * 2.5) / 4 = 2.125; e = 2 - 2.125 * (-0.05 + 3 * 0.041782) / 4 =
    1.959972. FedAvg of the same would be (2.05 + 3 * 1.895545) / 4 = 1.934159.
    """
    done = federate("fednova", training={"batch_size": 2}, rate=RATE, momentum=0.5)
    agree(done.states["b"].tensors, {"encoder.weight": [[1.895545]], "steps": 2.5})
    agree(done.broadcast, {"encoder.weight": [[1.959972]]})
    assert (effective_steps(1, 0.9), effective_steps(7, 0.0)) == (pytest.approx(1), 7)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_is_fedavg_where_all_take_as_many_steps(momentum: float) -> None:
    alike = {
        "plants": {"a": images(3, 0), "b": images(3, 1)},
        "rounds": 2,
        "training": {"local_epochs": 2},
    }
    nova = federate("fednova", rate=RATE, momentum=momentum, **alike).broadcast
    average = federate("fedavg", sgd=Sgd(RATE, momentum), **alike).broadcast
    agree(nova, average)
    assert abs(float(average["classifier.bias"][0]) + 2) > 5e-4


def test_fenda_joins_an_exchanged_encoder_with_a_private_one() -> None:
    """Features (2, 2), logits (0.5 * 2 + 0.25 * 2 - 1.5, 0) = (0, 0): at a the exchanged one's
    de = 0.5 * -1/2, the private one's 0.25 * -1/2; at b the other sign. Mean 1:3 of 2.025 and
    1.975: 1.9875.
    """
    head = {"classifier.weight": [[0.5, 0.25], [0, 0]], "classifier.bias": [-1.5, 0]}
    done = federate("fenda", begin=head)
    agree(done.broadcast, {"encoder.weight": [[1.9875]]})
    of_a = {"encoder.weight": [[2.0125]], "received.weight": [[2.025]]}
    of_a |= {"classifier.weight": [[0.6, 0.35], [-0.1, -0.1]], "classifier.bias": [-1.45, -0.05]}
    agree(done.deployed("a"), of_a)
    logits = Toy().predict(done.deployed("a"), torch.ones(1, 3, 1, 1))
    agree(
        {"logits": logits},
        {"logits": [[0.6 * 2.025 + 0.35 * 2.0125 - 1.45, -0.1 * (2.025 + 2.0125) - 0.05]]},
    )


# AFedCL and its ablations. The discriminator's hidden value is f, its logits (f - 2, 0): at chance
# while f = 2.

DISCRIMINATOR = {
    "discriminator.0.weight": [[1]],
    "discriminator.0.bias": [0],
    "discriminator.1.weight": [[1], [0]],
    "discriminator.1.bias": [-2, 0],
}


@pytest.mark.parametrize(("lam", "a", "b"), [(0.0, 2.05, 1.95), (1.0, 2.025, 1.925)])
def test_afedcls_encoder_ascends_lambda_times_the_discriminators_loss(
    lam: float, a: float, b: float
) -> None:
    """dL_D/df = 1/2 * -1/2 at both: e descends -+1/2 + lambda / 4.

    L_D is ln 2 at both, so they count alike.
    """
    done = federate("afedcl", begin=DISCRIMINATOR, lam=lam, fusion="none")
    agree(done.broadcast, {"encoder.weight": [[(a + b) / 2]]})


@pytest.mark.parametrize(
    ("weights", "e"), [("discrimination", 1.988084), ("images", 1.975), ("equal", 2.0)]
)
def test_afedcl_weighs_by_the_discriminators_loss_by_images_or_equally(
    weights: str, e: float
) -> None:
    """b's discriminator calls everything local, logits (2, 0): L_D = (0.126928 + 2.126928) / 2 =
    1.126928; a's ln 2. e = (0.693147 * 2.05 + 1.126928 * 1.95) / 1.820075.
    """
    done = federate(
        "afedcl", begin={**DISCRIMINATOR, "b/discriminator.1.bias": [0, 0]}, lam=0, weights=weights
    )
    agree(done.broadcast, {"encoder.weight": [[e]]})


@pytest.mark.parametrize(
    ("fusion", "e", "a_k"),
    [("adaptive", 2.0722310, 0.4977769), ("fixed", 2.0722310, 0.5), ("none", 2.0936256, None)],
)
def test_afedcls_second_stage_learns_to_fuse_or_does_not(
    fusion: str, e: float, a_k: float | None
) -> None:
    """Stage 2 at a: f = (2 + 2.05) / 2, logits (0.2775, -0.2525), p0 = 0.629483, df = 1.2 *
    -0.370517 = -0.444620; de = df / 2, dA = (2 - 2.05) df. Without fusion: de = -0.436256 as in
    FedProx's test, without its pull. What was sent does not change: 1.975, by images.
    """
    done = federate("afedcl", begin=DISCRIMINATOR, lam=0, weights="images", fusion=fusion)
    agree(done.broadcast, {"encoder.weight": [[1.975]]})
    deployed = done.deployed("a")
    agree(deployed, {"encoder.weight": [[e]]})
    assert ("received.weight" in deployed) == (a_k is not None)
    if a_k is not None:
        agree(deployed, {"fusion": a_k, "received.weight": [[2]]})
