"""What a run left on disk, whatever kind of run it was."""

from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from broker_config.protocol.errors import UsageError
from trainer.federation.server import journal
from trainer.progress import timeline
from trainer.progress.timeline import Span
from trainer.report.summary import NodeReport, RunReport
from trainer.training import personal_model
from trainer.training.personal_model import Facts, Verdict

Kind = Literal["run", "node", "coordinator"]


class Node(NamedTuple):
    """One node, as its state folder shows it."""

    figures: NodeReport
    facts: Facts
    model: Path
    verdicts: tuple[Verdict, ...]
    spans: list[Span]


class Run(NamedTuple):
    """A demo's or a simulation's folder (`run`), one node's state folder, or a coordinator's."""

    kind: Kind
    report: RunReport
    classes: tuple[str, ...]
    nodes: list[Node]
    rounds: tuple[journal.ClosedRound, ...] = ()  # of a coordinator
    unfinished: str | None = None  # run that a node has taken part in since, and that left no model


def gather(folder: Path) -> Run:
    """Read a run.

    Raises:
        UsageError: `folder` is no run's, or something in it is missing or damaged.
    """
    if (folder / "report.json").is_file():
        return _whole(folder)
    if (folder / "model").is_dir():
        return _single(folder)
    if (folder / "journal.sqlite").is_file():
        return _coordinator(folder)
    if (folder / "progress.json").is_file():
        raise UsageError(
            f"the node whose state is in {folder} has not come to the federation's end: it has no personal model yet",
            "run edge-node join again, with the same --state",
        )
    raise UsageError(
        f"there is no run in {folder}",
        "pass the --out folder of edge-node demo or simulate, the state folder that edge-node join left "
        "(edge-node-NAME), or the --state folder of edge-node coordinate",
    )


def _whole(folder: Path) -> Run:
    path = folder / "report.json"
    try:
        report = msgspec.json.decode(path.read_bytes(), type=RunReport)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is damaged ({error})", "run the demo or the simulation again") from error
    nodes = [_node(folder / figures.name, figures) for figures in report.nodes]
    return Run("run", report, nodes[0].facts.classes if nodes else (), nodes)


def _single(folder: Path) -> Run:
    node = _node(folder, None)
    facts = node.facts
    newest = timeline.newest_run(folder)
    unfinished = newest if newest != facts.run else None
    return Run("node", RunReport.of(facts, [node.figures]), facts.classes, [node], unfinished=unfinished)


def _node(folder: Path, figures: NodeReport | None) -> Node:
    facts = personal_model.load_facts(folder / "model")
    verdicts = personal_model.load_verdicts(folder / "model")
    return Node(figures or NodeReport.of(facts), facts, folder / "model", verdicts, timeline.read(folder, facts.run))


def _coordinator(folder: Path) -> Run:
    spec, rounds = journal.newest_spec(folder), journal.history(folder)
    if not rounds:
        raise UsageError(f"the coordinator in {folder} has closed no round yet", "wait for the first round to end")
    report = RunReport.of(spec, [], bytes_up=sum(line.bytes for line in rounds))
    return Run("coordinator", report, spec.classes, [], tuple(rounds))
