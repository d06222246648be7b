"""Personal models -> bundles: one traced graph a federation, each node's values put into it, parity checked first."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import onnx

from broker_config.errors import UsageError
from edge import bundle
from export import held_out
from export.graph import EXTRAS, Architecture, encoders, module, trace, with_values
from export.parity import check_parity, pictures, session
from export.signing import Signer
from trainer import personal, progress


class Exported(NamedTuple):
    """A written bundle, and the largest difference of an output between torch and onnxruntime."""

    folder: Path
    node: str
    difference: float


def export(
    models: Sequence[Path], folder: Path, report: progress.Report, signer: Signer | None = None
) -> list[Exported]:
    """Write a bundle `folder/NODE` for each model folder in `models`, signed if there is a `signer`.

    Raises:
        UsageError: a folder holds no usable personal model, two are of one node, or one cannot be signed.
        ParityError: a graph's outputs differ from torch's; that bundle is not written.
    """
    _check_nodes([personal.load_facts(source).node for source in models])
    graphs: dict[Architecture, onnx.ModelProto] = {}
    written = []
    for source in models:
        facts, tree, *_ = personal.load(source)
        signing = signer.check(facts, tree, source) if signer else None
        if facts.broadcast and not signer:
            text = f"the bundle of {facts.node} will not be signed, and serve --trust refuses it: --kit FILE signs"
            report(progress.Note(text=text))
        architecture = Architecture(facts.model, len(facts.classes), encoders(tree), facts.preprocessing)
        served = module(architecture, tree, source)
        if architecture not in graphs:
            what = f"tracing {facts.model} for {len(facts.classes)} classes, once for all nodes: 10 to 30 s"
            report(progress.Step(what=what))
            graphs[architecture] = trace(served, facts.preprocessing.size)
            report(progress.Step(what="checking models against torch and writing their bundles"))
        content = with_values(graphs[architecture], served)
        found, sure = held_out.find(source, facts), None
        if isinstance(found, str):
            report(progress.Note(text=f"{facts.node} gets no calibration, so it sees no novelty or drift: {found}"))
        else:
            sure = held_out.confidence(content, found, facts)
            served.get_buffer("temperature").fill_(sure.temperature)
            content = with_values(graphs[architecture], served)
        difference = check_parity(content, architecture, tree, sure.temperature if sure else 1.0, source)
        golden = pictures(facts.preprocessing.size, 1)
        [probabilities] = session(content).run(["probabilities"], {"image": golden})[0].tolist()
        description = bundle.Description(
            federation=facts.federation,
            run=facts.run,
            node=facts.node,
            method=facts.method,
            model=facts.model,
            round=facts.round,
            classes=facts.classes,
            input=bundle.Input(size=facts.preprocessing.size),
            extras=EXTRAS,
            encoders=("own",) if architecture.encoders == "one" else ("received", "own"),
            confidence=sure,
            metrics=facts.metrics,
        )
        target = folder / facts.node
        reference = None if isinstance(found, str) else held_out.reference(content, found)
        bundle.write(target, description, content, golden[0], probabilities, signing, reference)
        written.append(Exported(target, facts.node, difference))
        size = len(content)
        report(progress.Exported(node=facts.node, folder=str(target), bytes=size, difference=difference))
    return written


def _check_nodes(names: Sequence[str]) -> None:
    """Raise UsageError if two models would be written to one folder."""
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"{names.count(name)} of the models are of node {name}", "export them to different folders"
            )
