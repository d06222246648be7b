"""A cell's run: the federation is simulated with the cell's images and encoder."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch
from msgspec import UNSET

from research.afedcl.cell import Cell, Embedding, Finished, NodeResult
from research.afedcl.data import Inputs
from research.runner.machine import check_torch, machine
from trainer import progress
from trainer.data.class_folders import Images, LabelledImages, merge
from trainer.data.partition import Scheme
from trainer.data.training_set import TrainingSet
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import Engine, simulate
from trainer.methods.base import Metrics
from trainer.models.network import Network
from trainer.report.model_examination import project
from trainer.training.engine import predict
from trainer.training.evaluation import accuracy, macro_f1
from trainer.training.personal_model import PersonalModel

_ONE_PLACE = "one place"  # the only node of a cell whose images are pooled
_EVALUATIONS = 10  # on the held-out images, in the course of a federation


class Traffic:
    """A report that keeps the bytes of a finished federation: all nodes',
    and a broadcast's, which all receive.
    """

    up = down = 0

    def __call__(self, event: progress.AnyEvent) -> None:
        """Look at what is reported."""
        if isinstance(event, progress.FederationFinished):
            self.up, self.down = event.bytes_up, event.bytes_down


def run_cell(cell: Cell, inputs: Inputs) -> Finished:
    """Simulate the federation.

    Raises:
        EdgeNodeError: the images do not suffice, the training has diverged, or another torch is
            installed here.
    """
    check_torch(cell.torch)
    setting = cell.setting
    catalogue = inputs.catalogues[setting.images]
    scheme = Scheme(
        setting.partition,
        setting.nodes,
        setting.samples,
        cell.seed,
        {"classes_per_node": setting.classes_per_node, "alpha": setting.alpha},
        pool=setting.pool,
    )
    request = Request(
        method=cell.method,
        options=cell.options,
        head=cell.head or "trained",
        model=cell.model,
        weights="none",  # unused: the encoder is at hand
        size=cell.size,
        training=msgspec.to_builtins(cell.training),
        rounds=cell.rounds,
        seed=cell.seed,
        aggregate="mean",  # the papers'
        codec=cell.codec or "none",
        privacy=cell.privacy or {},
    )
    every = max(1, cell.rounds // _EVALUATIONS)
    spec, broadcast = draft(
        request,
        federation="experiment",
        classes=catalogue.classes,
        nodes=1 if cell.pooled else setting.nodes,
        encoder=inputs.encoders[cell.weights],
    )
    labelled = inputs.images[setting.images, cell.size]
    shares = scheme.shares(catalogue)
    images = {
        share.node: Images(labelled.among(share.train), labelled.among(share.test))
        for share in shares
    }
    engine = Engine("batched" if cell.device == "cuda" else "plain", cell.device)
    started, traffic = time.monotonic(), Traffic()
    if cell.pooled:
        sides = (merge([share.train for share in shares]), merge([share.test for share in shares]))
        one_place = {_ONE_PLACE: Images(labelled.among(sides[0]), labelled.among(sides[1]))}
        models = dict.fromkeys(
            images,
            simulate(
                spec, broadcast, one_place, traffic, engine=engine, evaluate_every=every
            ).models[_ONE_PLACE],
        )
    else:
        models = simulate(
            spec, broadcast, images, traffic, engine=engine, evaluate_every=every
        ).models
    return Finished(
        key=cell.key,
        cell=cell,
        nodes=[_result(name, model, images) for name, model in models.items()],
        bytes=(traffic.up // spec.nodes, traffic.down) if cell.codec else UNSET,
        embeddings=[_embedding(model, images[name].test) for name, model in models.items()]
        if cell.embed
        else UNSET,
        seconds=round(time.monotonic() - started, 1),
        machine=machine(cell.device),
    )


def _result(name: str, model: PersonalModel, images: Mapping[str, Images]) -> NodeResult:
    mine = images[name].test
    assert mine is not None
    log_probabilities = _log_probabilities(model, mine)
    predicted = log_probabilities.argmax(1)
    trained = Counter(images[name].train.labels.tolist())
    own = np.array(sorted(trained))
    return NodeResult(
        name=name,
        trained={model.metadata.classes[label]: trained[label] for label in own},
        tested=len(mine.labels),
        accuracy=round(accuracy(predicted, mine.labels), 4),
        f1=round(macro_f1(predicted, mine.labels), 4),
        own=round(accuracy(own[log_probabilities[:, own].argmax(1)], mine.labels), 4),
        everyone=round(
            _accuracy_on_all(
                model, [each.test for each in images.values() if each.test is not None]
            ),
            4,
        ),
        labels=mine.labels.astype(np.uint8).tobytes(),
        log_probabilities=log_probabilities.astype(np.float16).tobytes(),
        history=_columns(model.metadata.history),
    )


def _accuracy_on_all(model: PersonalModel, held_out: Sequence[LabelledImages]) -> float:
    correct = [_log_probabilities(model, each).argmax(1) == each.labels for each in held_out]
    return float(np.concatenate(correct).mean())


def _log_probabilities(model: PersonalModel, images: LabelledImages) -> np.ndarray:
    """[n, classes]."""
    metadata = model.metadata
    network = Network(metadata.model, len(metadata.classes))
    logits = predict(network, model.tensors, TrainingSet.of(images, metadata.preprocessing))
    return logits - np.logaddexp.reduce(logits, 1, keepdims=True)


def _columns(history: Sequence[Metrics]) -> dict[str, list[float | None]]:
    """Of each metric its values, round by round."""
    names = [
        name
        for name in dict.fromkeys(name for metrics in history for name in metrics)
        if name != "round"
    ]
    return {name: [_rounded(metrics.get(name, math.nan)) for metrics in history] for name in names}


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def _embedding(model: PersonalModel, images: LabelledImages | None) -> Embedding:
    assert images is not None
    metadata = model.metadata
    network = Network(metadata.model, len(metadata.classes))
    with torch.no_grad():
        inputs = TrainingSet.of(images, metadata.preprocessing).network_input(slice(None))
        points = project(network.features(model.tensors, inputs).numpy())
    return Embedding(
        node=metadata.node,
        labels=[metadata.classes[label] for label in images.labels[: len(points)]],
        points=[(round(float(x), 2), round(float(y), 2)) for x, y in points],
    )
