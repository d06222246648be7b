"""pFedFDA against values computed by hand and against a slow reference,
and what its statistics go through.
"""

from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.method_cases import CLASSES, drafted, images, shares, slow_except
from tests.support.toy_federation import agree, federate
from trainer.data.class_folders import Images
from trainer.data.training_set import encode_all
from trainer.federation.server.robust_rules import RULES
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate
from trainer.methods import complete_options, make
from trainer.methods.pfedfda import BETA_MU, BETA_SIGMA
from trainer.models.initial_weights import Shape
from trainer.models.named_tensors import Arrays
from trainer.models.network import Network, Tensors, to_arrays, to_tensors
from trainer.training.conclusion import conclude
from trainer.training.participant import Participant

METHOD = make(
    "pfedfda", drafted("pfedfda")[0].training, complete_options("pfedfda", {"ridge": 0.5})
)
# of five classes; one has one image, one has none
LABELS = np.array([0, 0, 0, 1, 1, 3, 3, 3, 3, 2])
SHAPE = Shape(12, 5)
UPPER = np.triu_indices(SHAPE.features)


def received(spread: float = 0.5) -> Tensors:
    """Statistics of a federation, the covariance as its upper triangle."""
    random = np.random.default_rng(3)
    root = random.normal(size=(SHAPE.features, SHAPE.features))
    arrays = {
        "means": random.normal(0, spread, (SHAPE.classes, SHAPE.features)),
        "covariance": (np.eye(SHAPE.features) + root @ root.T / 9)[UPPER],
    }
    return to_tensors({name: value.astype(np.float32) for name, value in arrays.items()})


def features(noise: float = 1.0) -> np.ndarray:
    """Features of images whose classes' means differ from the federation's."""
    random = np.random.default_rng(4)
    means = received()["means"].numpy() + random.normal(0, 0.3, (SHAPE.classes, SHAPE.features))
    return (means[LABELS] + noise * random.normal(size=(len(LABELS), SHAPE.features))).astype(
        np.float32
    )


def symmetric(triangle: np.ndarray) -> np.ndarray:
    full = np.zeros((SHAPE.features,) * 2)
    full[UPPER] = triangle
    return full + np.triu(full, 1).T


# Reference: every covariance is made, every logit is a difference of squared distances


def local(
    found: np.ndarray, labels: np.ndarray, others: np.ndarray, ridge: float
) -> tuple[np.ndarray, np.ndarray]:
    means, centred = others.copy(), []
    for label in range(SHAPE.classes):
        if (labels == label).any():
            means[label] = found[labels == label].mean(0)
    centred = [each - means[label] for each, label in zip(found, labels, strict=True)]
    scatter = sum(np.outer(each, each) for each in centred)
    return means, scatter / (len(labels) - 1) + ridge * np.eye(SHAPE.features)


def logits(
    found: np.ndarray, means: np.ndarray, covariance: np.ndarray, priors: np.ndarray
) -> np.ndarray:
    """Log densities of Gaussians, up to what all classes have in common."""
    inverse = np.linalg.inv(covariance)
    apart = found[:, None] - means
    return -np.einsum("ncd,de,nce->nc", apart, inverse, apart) / 2 + np.log(priors)


def adapt_slowly(
    given: Tensors, found: np.ndarray, labels: np.ndarray, ridge: float
) -> dict[str, Any]:
    found = found.astype(float)
    general, covariance = (
        given["means"].double().numpy(),
        symmetric(given["covariance"].double().numpy()),
    )
    priors = np.bincount(labels, minlength=SHAPE.classes) / len(labels) + 1e-4
    priors /= priors.sum()
    fold = np.full(len(labels), -1)
    for label in range(SHAPE.classes):
        if (count := (labels == label).sum()) > 1:
            fold[labels == label] = np.arange(count) % 2

    def mix(
        beta: tuple[float, float], means: np.ndarray, scatter: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        return beta[0] * means + (1 - beta[0]) * general, beta[1] * scatter + (
            1 - beta[1]
        ) * covariance

    losses = {}
    for beta in product(np.arange(11) / 10, repeat=2):
        losses[beta] = 0.0
        for judged in (0, 1):
            kept = fold == 1 - judged
            means, mixed = mix(beta, *local(found[kept], labels[kept], general, ridge))
            scores = logits(found[fold == judged], means, mixed, priors)
            right = scores[np.arange(len(scores)), labels[fold == judged]]
            losses[beta] += float((np.logaddexp.reduce(scores, 1) - right).mean())
    least = min(losses.values())
    good = [beta for beta in losses if losses[beta] <= least + 1e-3]
    best = min(good, key=lambda beta: round((beta[0] - 0.5) ** 2 + (beta[1] - 0.5) ** 2, 9))
    means, mixed = mix(best, *local(found, labels, general, ridge))
    return {"betas": best, "means": means, "covariance": mixed, "log_priors": np.log(priors)}


@pytest.mark.parametrize("noise", [0.3, 0.7, 1.0, 1.5, 2.0, 3.0])
def test_a_node_interpolates_as_the_slow_reference_does(noise: float) -> None:
    assert METHOD.adapt is not None
    given, found = received(), features(noise)
    adapted = METHOD.adapt({}, given, found, LABELS)
    slow = adapt_slowly(given, found, LABELS, 0.5)
    np.testing.assert_allclose(adapted["betas"].numpy(), slow["betas"], rtol=1e-6)
    for name in ("means", "log_priors"):
        np.testing.assert_allclose(adapted[name].numpy(), slow[name], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        symmetric(adapted["covariance"].numpy()), slow["covariance"], rtol=1e-5, atol=1e-5
    )


def test_the_shares_depend_on_the_images() -> None:
    """Otherwise the test above would compare a constant."""
    assert METHOD.adapt is not None
    found = [
        METHOD.adapt({}, received(), features(noise), LABELS)["betas"]
        for noise in (0.3, 0.7, 1.5, 3.0)
    ]
    assert len({tuple(each.tolist()) for each in found}) > 1
    assert any(0 < float(beta) < 1 for each in found for beta in each)


def test_the_served_classifier_is_that_of_the_interpolated_gaussians() -> None:
    """Its logits differ from the log densities by what all classes of an image have in common."""
    assert METHOD.adapt is not None
    found = features()
    own = METHOD.adapt({}, received(), found, LABELS)
    served = to_arrays(METHOD.deploy(own, received()))
    scores = found @ served["classifier.weight"].T + served["classifier.bias"]
    by_density = logits(
        found.astype(float),
        own["means"].double().numpy(),
        symmetric(own["covariance"].double().numpy()),
        np.exp(own["log_priors"].double().numpy()),
    )
    apart = scores - by_density
    np.testing.assert_allclose(apart, np.repeat(apart[:, :1], SHAPE.classes, 1), atol=1e-3)


def test_a_class_that_a_node_lacks_has_the_global_mean_there() -> None:
    assert METHOD.adapt is not None
    adapted = METHOD.adapt({}, received(), features(), LABELS)
    np.testing.assert_array_equal(adapted["means"][4].numpy(), received()["means"][4].numpy())
    assert not np.allclose(adapted["means"][0].numpy(), received()["means"][0].numpy())


def test_where_nothing_decides_both_sides_count_alike() -> None:
    """One image of each class; or two, so that those of a fold do not scatter,
    and do not tell covariances apart.
    """
    assert METHOD.adapt is not None
    adapted = METHOD.adapt({}, received(), features()[[0, 3, 5]], LABELS[[0, 3, 5]])
    assert adapted["betas"].tolist() == [0.5, 0.5]
    np.testing.assert_allclose(
        adapted["means"][0], (received()["means"][0].numpy() + features()[0]) / 2, rtol=1e-5
    )
    even = {
        **received(),
        "covariance": received()["covariance"].new_tensor(0.5 * np.eye(SHAPE.features)[UPPER]),
    }
    pairs = METHOD.adapt({}, even, features(2.0)[[0, 1, 3, 4]], LABELS[[0, 1, 3, 4]])["betas"]
    assert pairs[0] != 0.5
    assert pairs[1] == 0.5


# A round


def test_a_round_by_hand() -> None:
    """Means (1, 0), covariance 1, even priors: at f = 2 the logits differ by 2 (1 - 0) - (1 - 0)
    / 2 = 1.5, and p0 = 0.817574. The classifier's weights, less their mean, are (1/2, -1/2). Plant
    a: de = -0.182426, e = 2.018243; b: de = 0.817574, e = 1.918243. Then both take half of their
    means, (1.509121, 0) and (1, 0.959121): nothing decides at a, which has one image, nor at b, all
    of one class, whose prior is enough. Images of a class are alike, so the own covariance is the
    ridge, 1, as the received one is. Weighted 1:3.
    """
    begin = {"means": [[1], [0]], "covariance": [1]}
    done = federate("pfedfda", begin=begin)
    agree(done.states["a"].tensors, {"encoder.weight": [[2.0182426]], "means": [[1.5091213], [0]]})
    agree(done.states["b"].tensors, {"encoder.weight": [[1.9182426]], "means": [[1], [0.9591213]]})
    agree(
        done.broadcast,
        {"encoder.weight": [[1.9432426]], "means": [[1.1272803], [0.7193410]], "covariance": [1]},
    )


def test_the_average_is_adapted_before_it_is_served() -> None:
    """The encoder is the last average; the means are of its features,
    not of the encoder's that the node trained.
    """
    spec, broadcast = drafted("pfedfda")
    outcome = simulate(spec, broadcast, shares())
    model, final = outcome.models["plant-1"], to_tensors(outcome.broadcast)
    node = Participant(spec, "plant-1", shares()["plant-1"])
    found = encode_all(Network(spec.model, len(CLASSES)), final, node.data)
    assert node.method.adapt is not None
    by_hand = node.method.deploy(
        node.method.adapt(final, final, found, node.data.labels.numpy()), final
    )
    for name, value in by_hand.items():
        np.testing.assert_array_equal(model.tensors[name].numpy(), value.numpy())


def test_means_that_begin_at_zero_leave_the_encoder_alone_for_a_round() -> None:
    """All classes are then alike. The nodes' own means make the next round's classifier."""
    request = Request("pfedfda", {"spread": 0.0}, model="small", weights="none", size=16, rounds=1)
    spec, broadcast = draft(request, federation="test", classes=CLASSES, nodes=3)
    assert not broadcast["means"].any()
    after = simulate(spec, broadcast, shares()).broadcast
    np.testing.assert_allclose(
        after["encoder.features.0.weight"], broadcast["encoder.features.0.weight"], atol=1e-6
    )
    assert after["means"].any(axis=1).all()


def test_folds_are_judged_without_what_the_federations_means_know_of_them() -> None:
    """Global statistics hold every image of the node;
    a fold's own classifier is trained without them.
    """
    spec, broadcast = drafted("pfedfda", local_epochs=1)
    spec = msgspec.structs.replace(spec, rounds=1)
    node = Participant(spec, "plant-1", Images(images(1), None))
    state, _, metrics = node.contribute(node.start(broadcast), broadcast, 1)

    def judged(final: Arrays) -> list[float]:
        model = conclude(node, state, 1, broadcast, final, (metrics,), None)
        return [each.confidence for each in model.predictions]

    assert judged(broadcast) == judged({**broadcast, "means": broadcast["means"][::-1].copy()})


def test_a_node_tells_the_shares_that_it_has_chosen() -> None:
    for model in simulate(*drafted("pfedfda"), shares()).models.values():
        for line in model.metadata.history:
            for share in (line[BETA_MU.key], line[BETA_SIGMA.key]):
                assert 0 <= share <= 1
                assert 10 * share == pytest.approx(round(10 * share), abs=1e-5)


# Aggregation


def test_a_covariance_with_negative_directions_is_made_positive() -> None:
    """A liar under the plain mean, or a rule that takes each coordinate from another node,
    can send such a one.
    """
    assert METHOD.adapt is not None
    given = received()
    broken = symmetric(given["covariance"].numpy())
    broken[0, 0] = -5
    given["covariance"] = given["covariance"].new_tensor(broken[UPPER])
    own = METHOD.receive({"log_priors": given["means"].new_zeros(SHAPE.classes)}, given)
    adapted = METHOD.adapt(own, given, features(), LABELS)
    for tensors in (own, adapted):
        assert all(bool(value.isfinite().all()) for value in tensors.values())
    assert np.linalg.eigvalsh(symmetric(adapted["covariance"].numpy())).min() > 0
    scores = features() @ to_arrays(METHOD.deploy(adapted, given))["classifier.weight"].T
    assert np.abs(scores).max() < 1e6


@pytest.mark.parametrize(
    "rule", slow_except(("mean", "clipped_mean"), ("mean", "clipped_mean", *RULES))
)
def test_every_rule_leaves_a_model(rule: str) -> None:
    request = Request("pfedfda", model="small", weights="none", size=16, rounds=2, aggregate=rule)
    spec, broadcast = draft(request, federation="test", classes=CLASSES, nodes=5)
    outcome = simulate(spec, broadcast, shares(5))
    assert all(np.isfinite(value).all() for value in outcome.broadcast.values())
    assert len(outcome.models) == 5
    assert outcome.broadcast["means"].tobytes() != broadcast["means"].tobytes()
