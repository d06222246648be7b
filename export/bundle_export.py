"""Personal models -> bundles: one traced graph a federation,
each node's values put into it, parity checked first.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

import onnx

from broker_config.protocol.errors import UsageError
from edge.bundle import bundle_format
from edge.inference.class_prior import Prior
from edge.inference.tiling import View
from edge.uncertainty.model_warnings import model_warnings
from edge.uncertainty.performance import held_out_performance
from export import held_out
from export.bundle_signing import Signer
from export.encoder_selection import drop_encoder
from export.graph import (
    ENCODER_NAMES,
    EXTRAS,
    Architecture,
    Encoder,
    build_module,
    fill_values,
    set_temperature,
    trace,
)
from export.model_images import ImageFinder
from export.parity import check_parity, draw_test_images, open_session, output_names
from export.quantisation import MAX_CALIBRATION_IMAGES, TOLERANCE, quantise
from export.replacement_check import Comparison, compare_bundles
from trainer import progress
from trainer.data.class_folders import LabelledImages
from trainer.models.fusion import infer_fusion
from trainer.models.network import Tensors
from trainer.training import personal_model
from trainer.training.personal_model import ModelMetadata


class Exported(NamedTuple):
    """A written bundle, and the largest difference of an output between torch and onnxruntime
    (in fp32).
    """

    folder: Path
    node: str
    difference: float


class Optimisations(NamedTuple):
    """What may make bundles faster, where measurement allows it."""

    int8: bool = False
    data: Path | None = None  # class folders with a model's images, if they are not where it says


PLAIN = Optimisations()
_MOST = 10_000  # training images that a manifest lists


class _Model(NamedTuple):
    """A personal model on its way to a bundle."""

    source: Path
    metadata: ModelMetadata
    tensors: Tensors
    encoders: tuple[Encoder, ...]
    held_out: LabelledImages | str  # or why there are too few


class _Graph(NamedTuple):
    """What will be served."""

    content: bytes
    encoders: tuple[Encoder, ...]
    difference: float
    precision: Literal["fp32", "int8"] = "fp32"


def export(
    models: Sequence[Path],
    folder: Path,
    report: progress.Report,
    signer: Signer | None = None,
    optimisations: Optimisations = PLAIN,
) -> list[Exported]:
    """Write a bundle `folder/NODE` for each model folder in `models`,
    signed if there is a `signer`.

    Raises:
        UsageError: a folder holds no usable personal model, two are of one node, one cannot be
            signed, or the images for an optimisation are not there.
        ParityError: a graph's outputs differ from torch's; that bundle is not written.
    """
    _check_nodes([personal_model.load_metadata(source).node for source in models])
    finder = ImageFinder(optimisations.data)
    tracer = _Tracer(report)
    written = []
    for source in models:
        metadata, tensors, *_ = personal_model.load(source)
        signing = signer.check(metadata, tensors, source) if signer else None
        if metadata.broadcast and not signer:
            text = (
                f"the bundle of {metadata.node} will not be signed, and serve --trust refuses "
                "it: --kit FILE signs"
            )
            report(progress.Note(text=text))
        encoders = tuple(ENCODER_NAMES[prefix] for prefix in infer_fusion(tensors).encoders)
        model = _without_idle_encoder(
            _Model(source, metadata, tensors, encoders, held_out.load(source, metadata, finder)),
            report,
        )
        graph = tracer.graph(model)
        if optimisations.int8:
            graph = _try_int8(model, graph, finder, report)
        target = folder / metadata.node
        if isinstance(reason := model.held_out, str):
            node = metadata.node
            text = (
                f"{node} gets no calibration, and will notice neither novelty nor drift: {reason}"
            )
            if metadata.confidence:
                text = f"{node} will notice neither novelty nor drift: {reason}"
            report(progress.Note(text=text))
        manifest = _write_bundle(target, model, graph, signing)
        if metadata.comparison:
            report(progress.Note(text=f"{metadata.node}: {metadata.comparison.describe()}"))
        if found := held_out_performance(manifest, View(), Prior()):
            report(progress.Note(text=f"{metadata.node}: {found}"))
        for warning in model_warnings(manifest, View(), Prior()):
            report(progress.Note(text=f"warning: {metadata.node}: {warning.text}"))
        written.append(Exported(target, metadata.node, graph.difference))
        report(
            progress.Exported(
                node=metadata.node,
                folder=str(target),
                bytes=len(graph.content),
                difference=graph.difference,
            )
        )
    return written


class _Tracer:
    """Models -> graphs; models of one architecture share one trace."""

    def __init__(self, report: progress.Report):
        self._report = report
        self._traced: dict[Architecture, onnx.ModelProto] = {}

    def graph(self, model: _Model) -> _Graph:
        """The model's graph in fp32, checked against torch."""
        metadata = model.metadata
        tensors = model.tensors
        architecture = Architecture(
            metadata.model, len(metadata.classes), infer_fusion(tensors), metadata.preprocessing
        )
        served = build_module(architecture, tensors, model.source)
        if architecture not in self._traced:
            what = (
                f"tracing {metadata.model} for {len(metadata.classes)} classes, once for all "
                "nodes: 10 to 30 s"
            )
            self._report(progress.Step(what=what))
            self._traced[architecture] = trace(served, metadata.preprocessing.size)
            self._report(
                progress.Step(what="checking models against torch and writing their bundles")
            )
        content = fill_values(self._traced[architecture], served)
        return _Graph(
            content, model.encoders, check_parity(content, architecture, tensors, model.source)
        )


def _without_idle_encoder(model: _Model, report: progress.Report) -> _Model:
    """The model without an encoder that changes no verdict."""
    if isinstance(model.held_out, str):
        return model
    found = drop_encoder(model.metadata, model.tensors, model.held_out)
    if found is None:
        return model
    node = model.metadata.node
    images = len(model.held_out.labels)
    text = (
        f"the bundle of {node} has one encoder: the {found.dropped} one, with {found.share:.1%} "
        f"of the features, changes no verdict on {images} held-out images"
    )
    report(progress.Note(text=text))
    return model._replace(tensors=found.tensors, encoders=(found.kept,))


def _try_int8(model: _Model, graph: _Graph, finder: ImageFinder, report: progress.Report) -> _Graph:
    """The graph in int8, or as it is if that is not as right, or not faster, here."""
    node = model.metadata.node
    images = model.held_out
    if isinstance(images, str):
        report(
            progress.Note(
                text=f"the bundle of {node} stays fp32, int8 cannot be measured: {images}"
            )
        )
        return graph
    training = finder.training(model.source, model.metadata)
    count = min(len(training.labels), MAX_CALIBRATION_IMAGES)
    report(progress.Step(what=f"quantising the model of {node} on {count} training images"))
    quantised = graph._replace(content=quantise(graph.content, training.images), precision="int8")
    found = _compare(model, graph, quantised, images)
    if not found.passed:
        report(progress.Note(text=f"the bundle of {node} stays fp32; in int8: {found}"))
        return graph
    report(progress.Note(text=f"the bundle of {node} is int8: {found}"))
    return quantised


def _compare(model: _Model, exact: _Graph, faster: _Graph, images: LabelledImages) -> Comparison:
    """What the line would gain and lose with another graph of a model."""
    with TemporaryDirectory() as folder:
        before = Path(folder) / "exact"
        after = Path(folder) / "faster"
        _write_bundle(before, model, exact, None)
        _write_bundle(after, model, faster, None)
        return compare_bundles(before, after, images)


def _write_bundle(
    folder: Path, model: _Model, graph: _Graph, signing: bundle_format.Signing | None
) -> bundle_format.Manifest:
    """Write the bundle of a graph."""
    metadata = model.metadata
    content = graph.content
    sure = None
    reference = None
    if isinstance(model.held_out, str):
        sure = metadata.confidence  # the images may be gone, what they told is not
        content = set_temperature(content, sure.temperature) if sure else content
    else:
        sure = held_out.calibrate_confidence(content, model.held_out, metadata)
        content = set_temperature(content, sure.temperature)
        novelty = {
            each.digest: each.novelty
            for each in personal_model.load_predictions(model.source)
            if each.novelty is not None
        }
        reference = held_out.build_reference(
            content, model.held_out, metadata, model.tensors, novelty
        )
    running = open_session(content)
    golden = draw_test_images(metadata.preprocessing.size, 1)
    there = output_names(running)
    description = bundle_format.Description(
        federation=metadata.federation,
        run=metadata.run,
        node=metadata.node,
        method=metadata.method,
        model=metadata.model,
        round=metadata.round,
        refits=metadata.refits,
        classes=metadata.classes,
        trained=metadata.trained,
        trained_on=_list_training_images(model.source),
        input=bundle_format.Input(size=metadata.preprocessing.size),
        extras=tuple(name for name in EXTRAS if name in there),
        encoders=graph.encoders,
        precision=graph.precision,
        confidence=sure,
        metrics=metadata.metrics,
        comparison=metadata.comparison,
        provenance=_provenance(metadata, model.source),
    )
    [probabilities] = running.run(["probabilities"], {"image": golden})[0].tolist()
    tolerance = TOLERANCE if graph.precision == "int8" else bundle_format.TOLERANCE
    return bundle_format.write_bundle(
        folder, description, content, golden[0], probabilities, signing, reference, tolerance
    )


def _provenance(metadata: ModelMetadata, source: Path) -> bundle_format.Provenance:
    tested: dict[str, tuple[int, int]] = {}
    with suppress(UsageError):  # a card is of use without
        for each in personal_model.load_predictions(source):
            right, images = tested.get(each.label, (0, 0))
            tested[each.label] = right + (each.verdict == each.label), images + 1
    record = metadata.broadcast.record if metadata.broadcast else None
    return bundle_format.Provenance(
        rounds=metadata.rounds,
        options=metadata.options,
        training=metadata.training,
        preprocessing=metadata.preprocessing,
        head=metadata.head,
        seed=metadata.seed,
        nodes=metadata.nodes,
        quorum=metadata.quorum,
        aggregation=metadata.aggregation,
        tested=dict(sorted(tested.items())),
        software=metadata.software,
        record=record,
        privacy=metadata.privacy,
    )


def _list_training_images(source: Path) -> tuple[str, ...]:
    """For the manifest: so that nobody takes verdicts on these images for the model's accuracy."""
    with suppress(UsageError):  # a bundle is of use without
        images = personal_model.load_training_images(source)[:_MOST]
        return tuple(bundle_format.short_digest(each.digest) for each in images)
    return ()


def _check_nodes(names: Sequence[str]) -> None:
    """Raise UsageError if two models would be written to one folder."""
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"{names.count(name)} of the models are of node {name}",
                "export them to different folders",
            )
