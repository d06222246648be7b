"""Many nodes in one process: the same methods, sums and random numbers as behind the broker, without it."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from broker_config.messages import Spec
from trainer import data, partition, personal, progress, report
from trainer.data import Images
from trainer.federation.aggregate import FixedPointSum
from trainer.federation.spec import Request, draft
from trainer.methods import make
from trainer.methods.base import Metrics
from trainer.participant import Participant
from trainer.personal import Personal
from trainer.tree import Arrays, pick


class Simulated(NamedTuple):
    """What a simulated federation leaves."""

    broadcast: Arrays  # after the last round
    models: dict[str, Personal]  # by node


def simulate(
    spec: Spec, broadcast: Arrays, images: Mapping[str, Images], show: progress.Report = progress.ignore
) -> Simulated:
    """Run a federation of the nodes in `images`.

    With the same spec, first broadcast and images, the tensors equal those of processes over a broker bit for bit
    (same machine, same torch).
    """
    method = make(spec.method, spec.training, spec.options)
    sent = pick(spec.tensors, spec.sends)
    participants = {name: Participant(spec, name, share) for name, share in images.items()}
    states = {name: participant.start(broadcast) for name, participant in participants.items()}
    histories: dict[str, tuple[Metrics, ...]] = dict.fromkeys(participants, ())
    started = time.monotonic()
    show(progress.Gathering(federation=spec.federation, run=spec.run, nodes=len(participants), rounds=spec.rounds))
    rounds = progress.Rounds(show, lambda: (0, 0))
    received = broadcast
    for round_ in range(1, spec.rounds + 1):
        received = broadcast
        rounds.open(round_)
        sums = FixedPointSum(sent, spec.nodes, method.weight_cap)
        for name, participant in participants.items():
            show(progress.Activity(node=name, round=round_, what="training"))
            state, contributed, metrics = participant.contribute(states[name], received, round_)
            sums.add(contributed.tensors.items(), method.weigh(contributed.weight))
            states[name], refined = participant.refine(state, received, round_)
            histories[name] += ({"round": float(round_), **metrics, **refined},)
            show(progress.Measured(node=name, round=round_, metrics={**metrics, **refined}))
            show(progress.Activity(node=name, round=round_, what="waiting"))
        broadcast = method.finish(broadcast, sums.mean(), sums.count / spec.nodes)
        rounds.close(sorted(participants))
    models = {}
    for name, participant in participants.items():
        show(progress.Activity(node=name, round=spec.rounds, what="judging"))
        models[name] = participant.conclude(states[name], spec.rounds, received, broadcast, histories[name])
        show(progress.Activity(node=name, round=spec.rounds, what="waiting"))
    show(progress.FederationFinished(rounds=spec.rounds, bytes_up=0, bytes_down=0, seconds=time.monotonic() - started))
    return Simulated(broadcast, models)


def simulate_folder(
    request: Request,
    folders: Sequence[Path],
    rename: Mapping[str, str],
    scheme: partition.Scheme,
    out: Path | None,
    show: progress.Report,
) -> report.RunReport:
    """Share a data set of one or several sources among simulated nodes, run a federation, and report what they reach.

    Args:
        request: the federation.
        folders: a folder of class folders for each source.
        rename: from a source's name of a class to the federation's.
        scheme: how the images are shared.
        out: folder for `NODE/model` and report.json, or None.
        show: shows progress.

    Raises:
        UsageError: what cannot be, and what to do instead.
    """
    named = ", ".join(map(str, folders))
    show(progress.Step(what=f"reading the images in {named}"))
    sources = data.scan_sources(folders, rename)
    spec, broadcast = draft(request, federation="simulation", classes=data.union(sources).classes, nodes=scheme.nodes)
    shares = scheme.shares(*sources)
    images = {
        share.node: Images(
            *(data.load(part, spec.classes, spec.preprocessing.size) for part in (share.train, share.test))
        )
        for share in shares
    }
    started = time.monotonic()
    outcome = simulate(spec, broadcast, images, show)
    result = report.RunReport.of(
        spec,
        [report.NodeReport.of(outcome.models[share.node].facts) for share in shares],
        weights=request.weights,
        data=named,
        seconds=time.monotonic() - started,
    )
    if out is not None:
        for name, model in outcome.models.items():
            personal.save(model, out / name / "model")
        (out / "report.json").write_bytes(result.encode())
    return result
