"""A cell's run: the federation is simulated, and its shared model evaluated after every round."""

import hashlib
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import UNSET
from scipy.special import softmax
from sklearn.metrics import confusion_matrix

from broker_config.protocol.messages import Spec
from research.fedtfi.cell import Cell, Embedding, Finished, Node, Point
from research.fedtfi.data import DATASETS, Inputs
from research.runner.machine import check_torch, machine
from trainer.data.class_folders import Catalogue, Images, LabelledImages, merge
from trainer.data.partition import Scheme, Share
from trainer.data.training_set import TrainingSet
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import Device, Engine, simulate
from trainer.models.named_tensors import Arrays, is_frozen
from trainer.models.network import Network, to_tensors
from trainer.report.model_examination import project
from trainer.training.engine import predict
from trainer.training.evaluation import accuracy, macro_auc, macro_f1
from trainer.training.personal_model import PersonalModel


def run_cell(cell: Cell, inputs: Inputs) -> Finished:
    """Simulate the federation, evaluating the shared model after every round.

    Raises:
        EdgeNodeError: the images do not suffice, the training has diverged, or another torch is
            installed here.
    """
    check_torch(cell.torch)
    started = time.monotonic()
    sources = inputs.sources[cell.setting.images]
    shares = take_shares(cell, sources)
    request = Request(
        method=cell.method,
        options=cell.options,
        head=cell.head or "trained",
        model=cell.model,
        weights=inputs.weights[cell.weights],
        size=cell.size,
        training=msgspec.to_builtins(cell.training),
        rounds=cell.rounds,
        seed=cell.seed,
        aggregate="mean",  # the papers'
    )
    spec, broadcast = draft(
        request, federation="experiment", classes=merge(sources).classes, nodes=cell.setting.nodes
    )
    pictures = _with_stem_output(cell, inputs, spec, broadcast)
    images = {
        share.node: Images(pictures.among(share.train), pictures.among(share.test))
        for share in shares
    }
    evaluator = Evaluator(
        spec, pictures.among(merge([share.test for share in shares])), broadcast, cell.device
    )
    outcome = simulate(
        spec,
        broadcast,
        images,
        engine=Engine(device=cell.device),
        closed=evaluator,
        evaluate_every=cell.rounds,
    )
    return Finished(
        key=cell.key,
        cell=cell,
        classes=list(spec.classes),
        curve=_curve(evaluator.evaluations, _losses(outcome.models)),
        confusion=evaluator.evaluations[-1].confusion if evaluator.evaluations else [],
        nodes=[_node(name, model) for name, model in outcome.models.items()],
        embedding=_embedding(evaluator, outcome.broadcast, sources, cell) if cell.embed else None,
        heads=[evaluator.accuracy_of(model) for model in outcome.models.values()]
        if cell.head
        else UNSET,
        seconds=round(time.monotonic() - started, 1),
        machine=machine(cell.device),
    )


def take_shares(cell: Cell, sources: Sequence[Catalogue]) -> list[Share]:
    """The nodes' images; where whole sources are held out,
    what a node holds out is of the one beside its own.
    """
    scheme, count = _scheme(cell), DATASETS[cell.setting.data].held_out
    if not count:
        return scheme.shares(*sources)
    trained, held_out = scheme.shares(*sources[:-count]), scheme.shares(*sources[-count:])
    return [own._replace(test=other.test) for own, other in zip(trained, held_out, strict=True)]


_stem_outputs: dict[tuple[str, int, str], LabelledImages] = {}


def _with_stem_output(cell: Cell, inputs: Inputs, spec: Spec, broadcast: Arrays) -> LabelledImages:
    """All images of the data set, with what the network's frozen stem makes of them, if it has one.

    Computed once in a process for all cells with this stem: it is a third of a small cell's work.
    """
    pictures = inputs.images[cell.setting.images, cell.size]
    stem = hashlib.sha256()
    for name in sorted(filter(is_frozen, broadcast)):
        stem.update(broadcast[name].tobytes())
    key = (cell.setting.images, cell.size, stem.hexdigest())
    if key not in _stem_outputs:
        torch.set_num_threads(spec.threads)
        with torch.no_grad():
            data = TrainingSet.of(pictures, spec.preprocessing, cell.device)
            tensors = to_tensors(broadcast, cell.device)
            output = data.with_stem_output(
                Network(spec.model, len(spec.classes)), tensors
            ).stem_output
        _stem_outputs.clear()  # the next cells have the same images, mostly
        _stem_outputs[key] = pictures._replace(
            stem_output=None if output is None else output.cpu().numpy()
        )
    return _stem_outputs[key]


class Evaluation(NamedTuple):
    """A shared model on the held-out images."""

    accuracy: float
    f1: float
    auc: float
    confusion: list[list[int]]


class Evaluator:
    """Evaluates each round's shared model on the same images, where there is a classifier in it."""

    def __init__(self, spec: Spec, images: LabelledImages, broadcast: Arrays, device: Device):
        """What nothing of a network's training changes is computed once,
        with the first broadcast.
        """
        self.images, self.evaluations, self._device = images, list[Evaluation](), device
        self._network, tensors = (
            Network(spec.model, len(spec.classes)),
            to_tensors(broadcast, device),
        )
        torch.set_num_threads(spec.threads)
        with torch.no_grad():
            self._data = TrainingSet.of(images, spec.preprocessing, device).with_stem_output(
                self._network, tensors
            )

    def __call__(self, round_: int, broadcast: Arrays) -> None:  # noqa: ARG002
        """A round has closed with this."""
        if "classifier.weight" not in broadcast:
            return
        labels = self.images.labels
        shares = softmax(
            predict(self._network, to_tensors(broadcast, self._device), self._data), axis=1
        )
        predicted = shares.argmax(1)
        self.evaluations.append(
            Evaluation(
                accuracy(predicted, labels),
                macro_f1(predicted, labels),
                macro_auc(shares, labels),
                confusion_matrix(labels, predicted, labels=range(shares.shape[1])).tolist(),
            )
        )

    def accuracy_of(self, model: PersonalModel) -> float:
        """Of a node's model."""
        tensors = {name: value.to(self._device) for name, value in model.tensors.items()}
        return round(
            accuracy(predict(self._network, tensors, self._data).argmax(1), self.images.labels), 4
        )

    def features(self, broadcast: Arrays) -> np.ndarray:
        """Of the images by this shared model, [n, features]."""
        tensors = to_tensors(broadcast, self._device)
        with torch.no_grad():
            return (
                self._network.encode(
                    tensors, self._data.encoder_input(self._network, tensors, slice(None))
                )
                .cpu()
                .numpy()
            )


def _scheme(cell: Cell) -> Scheme:
    setting = cell.setting
    return Scheme(
        setting.partition,
        setting.nodes,
        setting.samples,
        cell.seed,
        {"classes_per_node": setting.classes_per_node},
        pool=setting.pool,
        test_samples=setting.test_samples,
        shared=setting.shared,
    )


def _losses(models: dict[str, PersonalModel]) -> list[float]:
    """Of every round in which nodes train, mean over nodes;
    after these comes that of a consensus head's sums.
    """
    rounds = zip(*(model.metadata.history for model in models.values()), strict=True)
    return [
        float(np.mean([metrics["L_C"] for metrics in nodes]))
        for nodes in rounds
        if "L_C" in nodes[0]
    ]


def _curve(seen: list[Evaluation], losses: list[float]) -> list[Point]:
    return [
        Point(
            round=round_,
            accuracy=round(each.accuracy, 4),
            f1=round(each.f1, 4),
            auc=round(each.auc, 4),
            loss=round(loss, 4),
        )
        for round_, (each, loss) in enumerate(zip(seen, losses, strict=False), 1)
    ]


def _node(name: str, model: PersonalModel) -> Node:
    metrics = model.metadata.metrics
    return Node(
        name=name,
        trained=model.metadata.trained,
        tested=int(metrics["images"]),
        accuracy=round(metrics["accuracy_own"], 4),
        f1=round(metrics["f1"], 4),
    )


def _embedding(
    evaluator: Evaluator, broadcast: Arrays, sources: Sequence[Catalogue], cell: Cell
) -> Embedding:
    names = {
        entry.digest: name
        for name, source in zip(DATASETS[cell.setting.data].sources, sources, strict=True)
        for entry in source.entries
    }
    classes = merge(sources).classes
    return Embedding(
        sources=[names[digest] for digest in evaluator.images.digests],
        labels=[classes[label] for label in evaluator.images.labels],
        points=[
            (round(float(x), 2), round(float(y), 2))
            for x, y in project(evaluator.features(broadcast))
        ],
    )
