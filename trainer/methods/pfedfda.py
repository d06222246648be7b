"""pFedFDA (McLaughlin and Su, NeurIPS 2024):
an encoder trained against a classifier that is made of Gaussians.

All classes share one covariance of features, so the classifier is linear discriminant analysis.
Nodes train the encoder under the classifier of the global means and covariance. Then each
interpolates between these and what its own images tell, by shares beta that two folds of them
choose; encoders and interpolated statistics are averaged.

The authors' code (github.com/cj-mclaughlin/pFedFDA), but for this: features are those of each image
once, as it is, by the encoder after its training, and so one image of a class is enough for a mean
(there, augmented ones from all epochs, and more than two); beta is the best of a grid, and of
equally good ones the nearest to 1/2 (there, L-BFGS from 1/2; 0 where no class has two images, with
which means that were drawn would stay); priors are uniform in the first round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import numpy as np

from broker_config.protocol.messages import Training
from trainer.methods.base import (
    CLASSIFICATION_LOSS,
    Entry,
    Method,
    Metric,
    Metrics,
    OneStage,
    Phase,
    Step,
    classification_loss,
    send_prefixes,
)
from trainer.models.initial_weights import Shape
from trainer.models.named_tensors import Arrays, select

if TYPE_CHECKING:
    from trainer.models.network import Tensors

BETA_MU = Metric(
    "beta_mu",
    "own share of the means",
    "How much of its class means a node takes from its own images, chosen by cross-validation.",
)
BETA_SIGMA = Metric(
    "beta_Sigma",
    "own share of the covariance",
    "How much of its covariance a node takes from its own images, chosen by cross-validation.",
)
_STEPS = 10
_BETAS = np.arange(_STEPS + 1) / _STEPS  # that are tried
_FLAT = 1e-3  # losses that differ by less decide nothing
_EPSILON = 1e-4  # the authors' own: added to priors, least eigenvalue of a received covariance
_FOLDS = 2


class Options(OneStage, frozen=True):
    """Options of `pfedfda`."""

    # what is added to the diagonal of a node's own covariance
    ridge: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    # the first means are drawn uniformly from 0 to this
    spread: Annotated[float, msgspec.Meta(ge=0)] = 1.0


def pfedfda(training: Training, options: Options) -> Method:
    """Serves the average, adapted to the node's images once more.

    A class of which a node has no image has the global mean there, and next to no prior. Any rule
    may aggregate: a mean of covariances is one, limited or not, and what another rule makes of them
    is mended.
    """
    return Method(
        train=(
            Phase(
                "body",
                (Step(("encoder",), classification_loss),),
                options.epochs or training.local_epochs,
            ),
        ),
        sends=send_prefixes("encoder", "means", "covariance"),
        init_server=lambda encoder, shape, random: _init_server(shape, random, options.spread),
        init_node=lambda broadcast, shape, random: {
            "log_priors": np.zeros(shape.classes, np.float32)
        },
        receive=lambda own, received: _classify({**own, **received}),
        adapt=lambda own, received, features, labels: _adapt(
            own, received, features, labels, options.ridge
        ),
        deploy=lambda own, received: select(_classify(own), ("encoder", "classifier")),
        deploys_final=True,
        metrics=(CLASSIFICATION_LOSS, BETA_MU, BETA_SIGMA),
        inspect=_inspect,
    )


def _init_server(shape: Shape, random: np.random.Generator, spread: float) -> Arrays:
    return {
        "means": random.uniform(0, spread, (shape.classes, shape.features)).astype(np.float32),
        "covariance": np.eye(shape.features, dtype=np.float32)[_upper(shape.features)],
    }


def _upper(features: int) -> np.ndarray:
    """Mask of the upper triangle [d, d]."""
    return ~np.tri(features, k=-1, dtype=bool)


def _inspect(own: Tensors) -> Metrics:
    means, covariance = own["betas"].tolist()
    return {BETA_MU.key: means, BETA_SIGMA.key: covariance}


def _read(tensors: Tensors) -> tuple[np.ndarray, np.ndarray]:
    """Means [C, d] and covariance [d, d] among tensors, float64;
    the latter travels as its upper triangle.
    """
    means = tensors["means"].double().cpu().numpy()
    covariance = np.zeros((means.shape[1],) * 2)
    covariance[_upper(means.shape[1])] = tensors["covariance"].double().cpu().numpy()
    return means, covariance + np.triu(covariance, 1).T


def _classify(tensors: Tensors) -> Tensors:
    """The tensors with the classifier of their means, covariance and priors.

    What all classes' logits have in common is left out: their differences would drown in it in
    float32.
    """
    # For Cholesky's solution, which numpy lacks; the coordinator has no torch
    import torch  # noqa: PLC0415

    means, covariance = _read(tensors)
    centre = means.mean(0)
    factor, failed = torch.linalg.cholesky_ex(torch.from_numpy(covariance))
    if failed:
        factor = torch.linalg.cholesky(torch.from_numpy(_compose(*_decompose(covariance))))
    weight = torch.cholesky_solve(torch.from_numpy(means - centre).T, factor).T.numpy()
    bias = tensors["log_priors"].double().cpu().numpy() - np.einsum(
        "cd,cd->c", weight, (means + centre) / 2
    )
    like = tensors["means"]
    return {
        **tensors,
        "classifier.weight": like.new_tensor(np.ascontiguousarray(weight)),
        "classifier.bias": like.new_tensor(bias),
    }


def _decompose(covariance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues, raised to _EPSILON, and vectors: a rule that is no mean, or a liar,
    can make some negative.
    """
    eigenvalues, vectors = np.linalg.eigh(covariance)
    return np.maximum(eigenvalues, _EPSILON), vectors


def _compose(eigenvalues: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    return np.asarray((vectors * eigenvalues) @ vectors.T)


class Estimate(NamedTuple):
    """Means and scatter of some of a node's images,
    as combinations of the global means' and all its images' rows.
    """

    means: np.ndarray  # [C, C + n]
    centred: np.ndarray  # [images, C + n]
    freedom: int  # what the scatter is divided by

    @staticmethod
    def of(labels: np.ndarray, chosen: np.ndarray, classes: int) -> Estimate:
        """That of the images at these positions; a class that has none of them keeps the global
        mean.
        """
        rows = np.eye(classes + len(labels))
        means = rows[:classes].copy()
        for label in np.unique(labels[chosen]):
            means[label] = rows[classes + chosen[labels[chosen] == label]].mean(0)
        return Estimate(
            means, rows[classes + chosen] - means[labels[chosen]], max(1, len(chosen) - 1)
        )


def _adapt(
    own: Tensors, received: Tensors, features: np.ndarray, labels: np.ndarray, ridge: float
) -> Tensors:
    """The node's tensors with the statistics that it interpolates."""
    means, covariance = _read(received)
    eigenvalues, vectors = _decompose(covariance)
    if eigenvalues[0] == _EPSILON:
        covariance = _compose(eigenvalues, vectors)
    classes = len(means)
    priors = np.bincount(labels, minlength=classes) / len(labels) + _EPSILON
    log_priors = np.log(priors / priors.sum())
    rows = np.vstack([means, features])
    share, spread_share = _choose_betas(rows @ vectors, eigenvalues, labels, log_priors, ridge)
    local = Estimate.of(labels, np.arange(len(labels)), classes)
    centred = local.centred @ rows
    means = share * (local.means @ rows) + (1 - share) * means
    covariance = (
        spread_share * (centred.T @ centred / local.freedom) + (1 - spread_share) * covariance
    )
    covariance[np.diag_indices(len(covariance))] += spread_share * ridge
    adapted = {
        "means": means,
        "covariance": covariance[_upper(len(covariance))],
        "log_priors": log_priors,
        "betas": np.array([share, spread_share]),
    }
    return {**own, **{name: received["means"].new_tensor(value) for name, value in adapted.items()}}


def _choose_betas(
    rows: np.ndarray,
    eigenvalues: np.ndarray,
    labels: np.ndarray,
    log_priors: np.ndarray,
    ridge: float,
) -> tuple[float, float]:
    """The shares of a node's own means and covariance with which half of its images classify the
    other half best.

    Cross-entropy, summed over both halves. Of shares that are as good, those nearest to 1/2 are
    taken: with one image of each class in a half there is no scatter, and nothing tells the
    covariances apart. Classes with one image are left out. The covariances that are compared are
    never made: only inner products of `rows` under their inverses are needed, which follow from one
    eigendecomposition and, for the few own images, Woodbury's identity.

    Args:
        rows: [C + n, d] global means, and features of the node's images, along the global
            covariance's eigenvectors.
        eigenvalues: [d] of that covariance.
        labels: [n].
        log_priors: [C].
        ridge: on the diagonal of the own covariance.
    """
    classes = len(log_priors)
    folds = _split(labels)
    estimates = [
        Estimate.of(labels, np.concatenate([*folds[:k], *folds[k + 1 :]]), classes)
        for k in range(len(folds))
    ]
    losses = np.zeros((len(_BETAS), len(_BETAS)))
    for column, beta in enumerate(_BETAS):
        base = (rows / ((1 - beta) * eigenvalues + beta * ridge)) @ rows.T
        for judged, estimate in zip(folds, estimates, strict=True):
            inner = _add_scatter(base, estimate, beta)
            for row, share in enumerate(_BETAS):
                mixed = share * estimate.means + (1 - share) * np.eye(*estimate.means.shape)
                half = mixed @ inner
                logits = (
                    half[:, classes + judged].T
                    - np.einsum("cm,cm->c", half, mixed) / 2
                    + log_priors
                )
                losses[row, column] += _cross_entropy(logits, labels[judged])
    rows_apart, columns_apart = np.indices(losses.shape) - _STEPS // 2
    apart = np.where(losses <= losses.min() + _FLAT, rows_apart**2 + columns_apart**2, losses.size)
    best, best_column = divmod(int(apart.argmin()), len(_BETAS))
    return float(_BETAS[best]), float(_BETAS[best_column])


def _split(labels: np.ndarray) -> Sequence[np.ndarray]:
    """Positions of the images of each fold: those of a class in turns.

    No folds if no class has enough.
    """
    folds: list[list[int]] = [[] for _ in range(_FOLDS)]
    for label in np.unique(labels):
        positions = np.flatnonzero(labels == label)
        if len(positions) >= _FOLDS:
            for fold, part in enumerate(folds):
                part.extend(positions[fold::_FOLDS])
    return [np.array(sorted(part)) for part in folds] if folds[0] else []


def _add_scatter(base: np.ndarray, estimate: Estimate, beta: float) -> np.ndarray:
    """Inner products of rows after `beta` times the estimate's scatter was added to the
    covariance (Woodbury).
    """
    if beta == 0:
        return base
    across = estimate.centred @ base
    small = across @ estimate.centred.T
    small[np.diag_indices(len(small))] += estimate.freedom / beta
    return np.asarray(base - across.T @ np.linalg.solve(small, across))


def _cross_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    shifted = logits - logits.max(1, keepdims=True)
    return float((np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(labels)), labels]).mean())


ENTRY = Entry(Options, pfedfda)
