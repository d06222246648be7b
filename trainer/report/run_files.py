"""Files that a demo, a simulation, a node or a coordinator leaves, read as one run."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from broker_config.protocol.errors import UsageError
from broker_config.storage import disk
from trainer.federation.run_summary import NodeReport, RunReport
from trainer.federation.server import journal
from trainer.progress import timeline
from trainer.progress.timeline import Span
from trainer.training import personal_model
from trainer.training.personal_model import HeldOutPrediction, ModelMetadata, TrainingImage

Kind = Literal["run", "node", "coordinator"]


class Node(NamedTuple):
    """One node, from its state folder."""

    report: NodeReport
    metadata: ModelMetadata
    model: Path
    predictions: tuple[HeldOutPrediction, ...]
    spans: list[Span]
    classes: tuple[str, ...]  # own ones, each with its folders if these are not called like it


class Run(NamedTuple):
    """A demo's or a simulation's folder (`run`), one node's state folder, or a coordinator's."""

    kind: Kind
    report: RunReport
    classes: tuple[str, ...]
    nodes: list[Node]
    rounds: tuple[journal.ClosedRound, ...] = ()  # of a coordinator
    masked: bool = False  # of a coordinator: it reads sums alone, and no weight
    # later run that the node has taken part in, and that left no model
    unfinished: str | None = None


def load_run(folder: Path) -> Run:
    """Read a run.

    Raises:
        UsageError: `folder` has no run, or something in it is missing or damaged.
    """
    if (folder / "report.json").is_file():
        return _load_demo(folder)
    if (folder / "model").is_dir():
        return _load_node_run(folder)
    if (folder / "journal.sqlite").is_file():
        return _load_coordinator(folder)
    if (folder / "progress.json").is_file():
        raise UsageError(
            f"the node whose state is in {folder} has not come to the federation's end: it has "
            "no personal model yet",
            "run edge-node join again, with the same --state",
        )
    raise UsageError(
        f"there is no run in {folder}",
        "pass the --out folder of edge-node demo or simulate, the state folder that edge-node "
        "join left (edge-node-NAME), or the --state folder of edge-node coordinate",
    )


def _load_demo(folder: Path) -> Run:
    path = folder / "report.json"
    try:
        report = msgspec.json.decode(disk.read_regular(path), type=RunReport)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} is damaged ({error})", "run the demo or the simulation again"
        ) from error
    nodes = [_load_node(folder / node.name, node) for node in report.nodes]
    classes = nodes[0].metadata.classes if nodes else ()
    return Run("run", report, classes, nodes)


def _load_node_run(folder: Path) -> Run:
    if not personal_model.load_metadata(folder / "model").metrics:
        raise UsageError(
            f"there is nothing to report of {folder}: its plant had no labelled image to judge "
            "the model by",
            "label some, and make a report once edge-node join has used them",
        )
    node = _load_node(folder, None)
    metadata = node.metadata
    newest = timeline.newest_run(folder)
    unfinished = newest if newest != metadata.run else None
    return Run(
        "node",
        RunReport.from_spec(metadata, [node.report]),
        metadata.classes,
        [node],
        unfinished=unfinished,
    )


def _load_node(folder: Path, report: NodeReport | None) -> Node:
    metadata = personal_model.load_metadata(folder / "model")
    predictions = personal_model.load_predictions(folder / "model")
    training = personal_model.load_training_images(folder / "model")
    return Node(
        report or NodeReport.from_metadata(metadata),
        metadata,
        folder / "model",
        predictions,
        timeline.read_spans(folder, metadata.run),
        _name_classes(metadata.trained, (*training, *predictions)),
    )


def _name_classes(
    classes: Iterable[str], images: Iterable[TrainingImage | HeldOutPrediction]
) -> tuple[str, ...]:
    """Each class, and in brackets the folders of its images if one is not called like it."""
    folders: dict[str, set[str]] = defaultdict(set)
    for image in images:
        folders[image.label].add(Path(image.path).parent.name)
    names = []
    for name in classes:
        shown_name = (
            name if folders[name] <= {name} else f"{name} ({', '.join(sorted(folders[name]))})"
        )
        names.append(shown_name)
    return tuple(names)


def _load_coordinator(folder: Path) -> Run:
    spec = journal.newest_run(folder).spec
    rounds = journal.history(folder)
    if not rounds:
        raise UsageError(
            f"the coordinator in {folder} has closed no round yet",
            "wait for the first round to end",
        )
    report = RunReport.from_spec(spec, [], bytes_up=sum(line.bytes for line in rounds))
    return Run(
        "coordinator", report, spec.classes, [], tuple(rounds), masked=spec.mask_threshold > 0
    )
