"""Many nodes in one process: the same methods,
sums and random numbers as behind the broker, without it.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from broker_config.protocol.codec import encode_tensors
from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Spec
from broker_config.protocol.round_contents import is_statistics_round
from trainer import progress
from trainer.data import class_folders, partition
from trainer.data.class_folders import Images, LabelledImages
from trainer.data.image_groups import group_entries, read_keys
from trainer.federation import run_summary
from trainer.federation.masking.grid import contribution_words
from trainer.federation.server.aggregation import after_training
from trainer.federation.server.choosing_runs import wanted_sizes
from trainer.federation.server.coordinator.round_machine import sample_participants
from trainer.federation.server.masked_sums import check_holders
from trainer.federation.server.robust_rules import InMemory
from trainer.federation.server.round_sums import collect
from trainer.federation.server.spec import Request, draft, flat_settings
from trainer.federation.update_codec import (
    decode_contribution,
    encode_broadcast,
    encode_contribution,
    encode_start,
    is_coded,
)
from trainer.methods import make
from trainer.methods.base import WHOLE, Method, Metrics
from trainer.models.catalogue import CANDIDATES
from trainer.models.initial_weights import choose_weights
from trainer.models.named_tensors import Arrays, select
from trainer.progress.long_work import steps, watched
from trainer.seeding import key_to_seed
from trainer.statistics.encoder_choice import AUTO, Cost, choose, describe
from trainer.training import batched_engine, personal_model
from trainer.training.alone import TrainedAlone, trains_alone
from trainer.training.conclusion import conclude
from trainer.training.engine import DivergedError
from trainer.training.first_sums import take_first
from trainer.training.method_notice import MethodNotice
from trainer.training.participant import EVALUATE_EVERY, Contributed, Participant
from trainer.training.personal_model import PersonalModel
from trainer.training.preview import compute_loss
from trainer.training.privacy_plan import describe as describe_privacy

Device = Literal["cpu", "cuda"]


class Engine(NamedTuple):
    """What trains the nodes: one after the other (`plain`),
    or as many at once as can be (`batched`).
    """

    kind: Literal["plain", "batched"] = "plain"
    device: Device = "cpu"


PLAIN = Engine()
_MAX_EVERYONE = 500  # held-out images of all nodes on which each one's model is evaluated


Tamper = Callable[[str, int, Contributed, Arrays], Contributed]
"""(node, round, its contribution, the round's broadcast) -> what it sends instead."""


def send_unchanged(
    node: str,  # noqa: ARG001
    round_: int,  # noqa: ARG001
    contributed: Contributed,
    broadcast: Arrays,  # noqa: ARG001
) -> Contributed:
    """Nodes that send what they have."""
    return contributed


RoundCallback = Callable[[int, Arrays], None]
"""(round, the broadcast that it has led to) -> nothing; called when a round is over."""


def ignore_round(round_: int, broadcast: Arrays) -> None:
    """Nobody looks."""


class SimulationResult(NamedTuple):
    """Result of a simulated federation."""

    broadcast: Arrays  # after the last round
    models: dict[str, PersonalModel]  # by node; one that was never drawn has none


def check_device(device: Device) -> None:
    """Raise UsageError unless torch can use it."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "there is no GPU here that torch can use",
            "leave out --device, or install a torch with CUDA",
        )


def simulate(
    spec: Spec,
    broadcast: Arrays,
    images: Mapping[str, Images],
    report: progress.Report = progress.ignore,
    engine: Engine = PLAIN,
    tamper: Tamper = send_unchanged,
    closed: RoundCallback = ignore_round,
    *,
    compare: bool = False,
    secrets: Mapping[str, str] = {},
    evaluate_every: int = EVALUATE_EVERY,
) -> SimulationResult:
    """Run a federation of the nodes in `images`; `tamper` stands between each node and the server.

    With `compare` each node also trains alone, and its model is the best, as `edge-node join`
    leaves it. After every `evaluate_every` rounds, and the last, each judges its model on its
    held-out images.

    With the same spec, first broadcast and images, and in a private federation the same `secrets`
    by node, the tensors of the plain engine on the CPU equal those of processes over a broker bit
    for bit (same machine, same torch). A node without a secret draws the noise of a private
    federation from the seed: here all images are in one place.

    Raises:
        UsageError: the engine's device is not there.
        EdgeNodeError: contributions are masked, and too few nodes have a class for its statistics
            to be summed.
    """
    check_device(engine.device)
    method = make(spec.method, spec.training, spec.options, spec.head, spec.privacy)
    participants = {
        name: Participant(
            spec,
            name,
            share,
            engine.device,
            secrets.get(name) or _public_secret(spec, name),
            evaluate_every=evaluate_every,
        )
        for name, share in images.items()
    }
    if spec.mask_threshold and spec.statistics:
        check_holders(spec, [each.own for each in participants.values()])
    most = _group_size(engine)
    everyone = batched_engine.group_nodes([*participants.values()], most)
    states = {name: participant.start(broadcast) for name, participant in participants.items()}
    trained_on: dict[str, tuple[int, Arrays]] = {}  # each node's newest round and its broadcast
    first_received: dict[str, Arrays] = {}  # each node's first broadcast
    first_sums: dict[str, Arrays] = {}
    histories: dict[str, tuple[Metrics, ...]] = dict.fromkeys(participants, ())
    started = time.monotonic()
    report(
        progress.Gathering(
            federation=spec.federation,
            run=spec.run,
            nodes=len(participants),
            rounds=spec.rounds,
            settings=flat_settings(spec),
        )
    )
    first = broadcast
    up = 0
    down = len(encode_start(spec, broadcast))
    rounds = progress.RoundReporter(report, lambda: (up, down))
    notice = MethodNotice(method, report)
    for round_ in range(1, spec.rounds + 1):
        received = select(broadcast, spec.tensors)
        sample = 0 if is_statistics_round(spec, round_) else spec.sample
        drawn = sample_participants(participants, sample, spec.seed, round_)
        groups = (
            batched_engine.group_nodes([participants[name] for name in sorted(drawn)], most)
            if drawn
            else everyone
        )
        rounds.open(round_, sums=is_statistics_round(spec, round_))
        contributions = collect(spec, method, round_)
        for group in groups:
            for name in group.nodes:
                report(progress.Activity(node=name, round=round_, what="training"))
            stage_1 = group.contribute([states[name] for name in group.nodes], received, round_)
            for name, (_, contributed, _) in zip(group.nodes, stage_1, strict=True):
                sent = tamper(name, round_, contributed, received)
                arrived, size = _send(spec, method, round_, sent, received)
                contributions.add(name, InMemory(arrived.tensors), arrived.weight)
                up += size
            stage_2 = group.refine([state for state, _, _ in stage_1], received, round_)
            for name, (_, _, metrics), (states[name], refined) in zip(
                group.nodes, stage_1, stage_2, strict=True
            ):
                histories[name] += ({"round": float(round_), **metrics, **refined},)
                trained_on[name] = round_, received
                first_received.setdefault(name, received)
                if measured := {**metrics, **refined}:
                    report(progress.Measured(node=name, round=round_, metrics=measured))
                report(progress.Activity(node=name, round=round_, what="waiting"))
        following = after_training(
            spec, method.settle, round_, lambda: first, contributions.aggregate(broadcast)
        )
        broadcast, blob = encode_broadcast(spec, round_, following, broadcast)
        if compare and spec.first_totals and round_ == 1:
            for name, each in participants.items():
                first_sums[name] = take_first(each, states[name], broadcast, counted=True)
        closed(round_, broadcast)
        took_part = sorted(drawn or participants)
        rounds.close(took_part, limited=contributions.limited)
        down += len(blob)
        notice.check(round_, {name: histories[name][-1] for name in took_part})
    models: dict[str, PersonalModel] = {}
    alone = (
        _train_alone(spec, first_received, images, engine, report)
        if compare and not trains_alone(spec) and method.train
        else {}
    )
    held_out = _held_out_of_all(images.values()) if compare else None
    for name, (last, received) in trained_on.items():
        report(progress.Activity(node=name, round=spec.rounds, what="judging"))
        concluded = conclude(
            participants[name],
            states[name],
            last,
            received,
            broadcast,
            histories[name],
            alone.get(name),
            held_out,
            first=first_sums.get(name),
        )
        models[name] = concluded.on_cpu()
        report(progress.Activity(node=name, round=spec.rounds, what="waiting"))
    report(
        progress.FederationFinished(
            rounds=spec.rounds, bytes_up=up, bytes_down=down, seconds=time.monotonic() - started
        )
    )
    return SimulationResult(broadcast, models)


def _public_secret(spec: Spec, node: str) -> str:
    """What noise of a private federation is drawn by here; elsewhere, it is a secret."""
    return f"{key_to_seed(spec.seed, node, 'noise'):064x}" if spec.privacy else ""


def _send(
    spec: Spec, method: Method, round_: int, sent: Contributed, received: Arrays
) -> tuple[Contributed, int]:
    """What arrives of a contribution, and the bytes that it takes."""
    if spec.mask_threshold:  # nobody looks at a single one here, and masks are not in the sum
        words = contribution_words(spec, method, round_, sent.tensors, received, sent.weight)
        return Contributed(words, 1.0), len(encode_tensors(words))
    blob = encode_contribution(spec, sent.tensors, received)
    tensors = decode_contribution(spec, round_, blob, received) if is_coded(blob) else sent.tensors
    return sent._replace(tensors=tensors), len(blob)


def _train_alone(
    spec: Spec,
    received: Mapping[str, Arrays],
    images: Mapping[str, Images],
    engine: Engine,
    report: progress.Report,
) -> dict[str, TrainedAlone]:
    """What each node learns without the others,
    from the encoder of the first broadcast that it has received.
    """
    report(progress.Step(what="training alone, for comparison"))
    trained = {}
    for first in {id(broadcast): broadcast for broadcast in received.values()}.values():
        initial = select(first, ("encoder",))
        participants = [
            Participant.alone(spec, name, images[name], engine.device)
            for name, broadcast in received.items()
            if broadcast is first
        ]
        for group in batched_engine.group_nodes(participants, _group_size(engine)):
            states = group.start(initial)
            try:
                for round_ in steps(
                    "training alone, for comparison", range(1, participants[0].spec.rounds + 1)
                ):
                    states = [state for state, _, _ in group.contribute(states, initial, round_)]
                    states = [state for state, _ in group.refine(states, initial, round_)]
            except DivergedError as error:
                report(
                    progress.Note(
                        text=f"{', '.join(group.nodes)}: no comparison with training alone: {error}"
                    )
                )
                continue
            for name, state in zip(group.nodes, states, strict=True):
                trained[name] = TrainedAlone(initial, select(state.tensors, WHOLE))
    return trained


def _held_out_of_all(images: Iterable[Images]) -> LabelledImages | None:
    """Held-out images of all nodes, each once, at most _MAX_EVERYONE; None if there are none."""
    tests = [each.test for each in images if each.test is not None]
    if not tests:
        return None
    digests = list(chain.from_iterable(test.digests for test in tests))
    first = {digest: position for position, digest in reversed(list(enumerate(digests)))}
    chosen = np.array([first[digest] for digest in sorted(first)[:_MAX_EVERYONE]])
    return LabelledImages(
        np.concatenate([test.images for test in tests])[chosen],
        np.concatenate([test.labels for test in tests])[chosen],
        tuple(digests[position] for position in chosen),
        tuple(np.array(list(chain.from_iterable(test.paths for test in tests)))[chosen]),
    )


def _group_size(engine: Engine) -> int:
    return batched_engine.MAX_GROUP_NODES if engine.kind == "batched" else 1


def simulate_folder(
    request: Request,
    folders: Sequence[Path],
    aliases: Mapping[str, str],
    scheme: partition.Scheme,
    out: Path | None,
    report: progress.Report,
    engine: Engine = PLAIN,
    group: str | None = None,
) -> run_summary.RunReport:
    """Share a data set of one or several sources among simulated nodes, run a federation,
    and report what they reach.

    Args:
        request: the federation.
        folders: a folder of class folders for each source.
        aliases: from a source's name of a class to the federation's.
        scheme: how the images are shared.
        out: folder for `NODE/model` and report.json, or None.
        report: receives the progress.
        engine: trains the nodes.
        group: which images belong to one node's one side beside look-alikes, as `read_keys` takes
            it.

    Raises:
        UsageError: what cannot be, and what to do instead.
    """
    scheme.rule()  # before images are read, which may take a while
    named = ", ".join(map(str, folders))
    report(progress.Step(what=f"reading the images in {named}"))
    sources = class_folders.scan_sources(folders, aliases)
    whole = class_folders.merge(sources)
    requests = _resolve_weights(request)
    drafts = [
        draft(each, federation="simulation", classes=whole.classes, nodes=scheme.nodes)
        for each in requests
    ]
    entries = whole.entries
    report(progress.Step(what=f"looking for look-alikes among {len(entries)} images"))
    keys = read_keys(group, entries) if group else {}
    groups = group_entries(entries, keys)
    shares = scheme.shares(*sources, groups=groups)
    images: dict[int, dict[str, Images]] = {}
    for size in sorted({spec.preprocessing.size for spec, _ in drafts}):
        images[size] = {}
        for share in shares:
            loaded = class_folders.load_both(share.train, share.test, whole.classes, size)
            images[size][share.node] = loaded
    started = time.monotonic()
    number = 0
    if len(drafts) > 1:
        with watched(report):
            number = _choose_encoder(requests, drafts, images, report)
    spec, broadcast = drafts[number]
    if spec.privacy:
        report(progress.Note(text=describe_privacy(spec)))
    with watched(report):
        outcome = simulate(
            spec, broadcast, images[spec.preprocessing.size], report, engine, compare=True
        )
    result = run_summary.RunReport.from_spec(
        spec,
        [
            run_summary.NodeReport.from_metadata(outcome.models[share.node].metadata)
            for share in shares
        ],
        weights=requests[number].weights,
        data=named,
        seconds=time.monotonic() - started,
        engine=engine.kind,
        device=engine.device,
    )
    if out is not None:
        for name, model in outcome.models.items():
            personal_model.save(model, out / name / "model")
        (out / "report.json").write_bytes(result.encode())
    return result


def _resolve_weights(request: Request) -> list[Request]:
    """The request, or one for each encoder and size among which the images are to choose."""
    if request.weights != AUTO:
        return [request]
    return [
        request._replace(model=model, weights=choose_weights(model), size=size)
        for size, model in product(wanted_sizes(request.size), CANDIDATES)
    ]


def _choose_encoder(
    requests: Sequence[Request],
    drafts: Sequence[tuple[Spec, Arrays]],
    images: Mapping[int, Mapping[str, Images]],
    report: progress.Report,
) -> int:
    """The number of the draft whose first encoder costs the nodes least on their training images,
    each left out in turn.
    """
    report(
        progress.Step(
            what=f"comparing {len(drafts)} encoders on the training images, each left out in turn"
        )
    )
    costs: list[Cost] = []
    for request, (spec, broadcast) in zip(requests, drafts, strict=True):
        of_size = images[request.size]
        shares = {name: each.train for name, each in of_size.items()}
        loss = compute_loss(spec, broadcast, shares)
        costs.append(Cost(request.model, request.weights, request.size, loss))
    chosen = choose(costs)
    for line in describe(costs, chosen):
        report(progress.Note(text=line))
    return costs.index(chosen)
