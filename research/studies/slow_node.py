"""Cost and worth of a slow plant: rounds that wait for it, that close without it, and that count it late.

    python -m research.studies.slow_node neu=NEU xsdd=XSDD --weights mobilenet_v2.safetensors
    python -m research.studies.slow_node --table

FedAvg of five plants, 15 images of three classes each, MobileNetV2 at 64 pixels, the report pool. One plant needs ten
units of time to train for a round, the others about one (0.9 to 1.2). Training is the real one; the clock is not:
what is transmitted takes no time. The coordinator's own state machine says when rounds open and close. Policies:

- waiting: a round closes when all five have contributed.
- deadline: after 1.5 units a quorum of four closes it, and the slow plant's contribution comes too late.
- asynchronous: the first four contributions close it; one that is up to 20 rounds behind counts in the open one.

At the times of TOLD the newest global model is judged on held-out images, at most 20 of each class: of all classes,
and of the slow plant's classes. A line of the file is one federation.
"""

import argparse
import heapq
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from broker_config.protocol.messages import Spec
from research.runner.store import Records
from trainer.data import class_folders
from trainer.data.class_folders import Catalogue, Images, LabelledImages
from trainer.data.partition import Scheme, select_pool
from trainer.federation.server import round_state as rounds
from trainer.federation.server.robust_rules import InMemory
from trainer.federation.server.round_sums import RoundContributions, collect
from trainer.federation.server.spec import Participation, Request, draft
from trainer.federation.server.staleness import rebase
from trainer.models.named_tensors import Arrays
from trainer.models.network import Network, to_tensors
from trainer.training.engine import predict
from trainer.training.participant import Participant
from trainer.training.training_set import TrainingSet

MODEL, SIZE, SAMPLES, CLASSES, SEEN = "mobilenet_v2", 64, 15, 3, 20
DURATIONS = (0.9, 1.0, 1.1, 1.2, 10.0)  # units of time that the plants train for a round
TOLD = (5, 10, 20, 30, 40, 60)  # units of time
POLICIES = {
    "waiting": Participation(),
    "deadline": Participation(quorum=4, deadline=1.5),
    "asynchronous": Participation(quorum=4, staleness=20),
}


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One federation."""

    dataset: str
    policy: str
    seed: int
    pool: str = "report"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What it reached at the times of TOLD."""

    trial: Trial
    all_classes: list[float]
    slow_classes: list[float]
    rounds: list[int]  # closed so far
    counted: dict[str, int]  # contributions in closed rounds, by node


class Federation:
    """A federation on a clock of its own."""

    def __init__(self, spec: Spec, broadcast: Arrays, images: Mapping[str, Images]):
        self._spec = spec
        self._nodes = {name: Participant(spec, name, share) for name, share in images.items()}
        self._durations = dict(zip(images, DURATIONS, strict=True))
        self._states = {name: node.start(broadcast) for name, node in self._nodes.items()}
        plan = rounds.Plan(spec.nodes, spec.quorum, spec.rounds, waits=False, staleness=spec.staleness)
        self._state = rounds.Federation(plan)
        self._broadcasts = {1: broadcast}  # by round
        self._training = dict[str, int]()  # the round that a node trains for
        self._due = list[tuple[float, str]]()  # when a node, or a round's deadline (""), is due
        self._contributions: RoundContributions
        self.now, self.counted = 0.0, dict.fromkeys(images, 0)
        for name in images:
            self._advance(rounds.Joined(name))

    @property
    def closed(self) -> int:
        """How many rounds are closed."""
        return self._state.round - 1

    @property
    def broadcast(self) -> Arrays:
        """The newest global model."""
        return self._broadcasts[self._state.round]

    def run(self, until: float) -> None:
        """Go on until a time."""
        while self._due[0][0] <= until:
            self.now, name = heapq.heappop(self._due)
            if name:
                self._contribute(name)
                self._begin(name)
            else:
                self._advance(rounds.Expired(self._state.round))
        self.now = until

    def _begin(self, name: str) -> None:
        """A node trains for the open round unless it does so already, or a contribution of it counts there."""
        if name not in self._training and name in self._state.missing:
            self._training[name] = self._state.round
            heapq.heappush(self._due, (self.now + self._durations[name], name))

    def _contribute(self, name: str) -> None:
        origin, open_round = self._training.pop(name), self._state.round
        node, received = self._nodes[name], self._broadcasts[origin]
        admission = self._state.admission(name, origin)
        if not admission.is_due:
            return  # what it would have learnt has no effect: FedAvg begins anew from the next broadcast
        self._states[name], sent, _ = node.contribute(self._states[name], received, origin)
        behind = open_round - origin
        arrays = rebase(sent.tensors, received, self.broadcast, behind) if behind else sent.tensors
        self._contributions.add(name, InMemory(arrays), sent.weight)
        self._advance(rounds.Contributed(name))

    def _advance(self, event: rounds.Event) -> None:
        self._state, effects = rounds.advance(self._state, event)
        for effect in effects:
            match effect:
                case rounds.Close(round_, contributors):
                    self._broadcasts[round_ + 1] = self._contributions.aggregate(self._broadcasts[round_])
                    for name in contributors:
                        self.counted[name] += 1
                case rounds.Open(round_):
                    self._contributions = collect(self._spec, self._nodes["0"].method, round_)
                    oldest = min([*self._training.values(), round_])
                    self._broadcasts = {each: tensors for each, tensors in self._broadcasts.items() if each >= oldest}
                    self._due = [each for each in self._due if each[1]]
                    if self._spec.deadline:
                        self._due.append((self.now + self._spec.deadline, ""))
                    heapq.heapify(self._due)
                    for name in self._nodes:
                        self._begin(name)


class Judged(NamedTuple):
    """Held-out images of all classes."""

    data: TrainingSet
    labels: np.ndarray

    def accuracy(self, spec: Spec, broadcast: Arrays, classes: Sequence[int]) -> float:
        """Of images of these classes, every class being a candidate, in %."""
        logits = predict(Network(spec.model, len(spec.classes)), to_tensors(broadcast), self.data)
        among = np.isin(self.labels, classes)
        return round(100 * float((logits.argmax(1) == self.labels)[among].mean()), 2)


def run(trial: Trial, catalogue: Catalogue, weights: str) -> Outcome:
    """Run a federation until the last time that is told."""
    scheme = Scheme("disjoint", len(DURATIONS), SAMPLES, trial.seed, {"classes_per_node": CLASSES}, pool=trial.pool)
    shares = scheme.shares(catalogue)
    images = {
        str(index): Images(class_folders.load(share.train, catalogue.classes, SIZE), None)
        for index, share in enumerate(shares)
    }
    request = Request(
        "fedavg", model=MODEL, weights=weights, size=SIZE, rounds=10_000, seed=trial.seed, aggregate="mean"
    )
    spec, broadcast = draft(
        request, federation="slow", classes=catalogue.classes, nodes=len(DURATIONS),
        participation=POLICIES[trial.policy],
    )  # fmt: skip
    taught = {entry.digest for share in shares for entry in share.train.entries}
    judged = _hold_out(catalogue, taught, trial, spec)
    slow = sorted(set(images["4"].train.labels.tolist()))
    federation = Federation(spec, broadcast, images)
    reached: dict[str, list[float]] = {"all": [], "slow": []}
    closed = list[int]()
    for time in TOLD:
        federation.run(time)
        reached["all"].append(judged.accuracy(spec, federation.broadcast, range(len(spec.classes))))
        reached["slow"].append(judged.accuracy(spec, federation.broadcast, slow))
        closed.append(federation.closed)
    return Outcome(
        trial=trial, all_classes=reached["all"], slow_classes=reached["slow"], rounds=closed,
        counted=federation.counted,
    )  # fmt: skip


def _hold_out(catalogue: Catalogue, taught: set[str], trial: Trial, spec: Spec) -> Judged:
    pool = select_pool(catalogue, trial.pool)
    kept = dict.fromkeys(catalogue.classes, 0)
    chosen = []
    for entry in sorted(pool.entries, key=lambda entry: entry.digest):  # by chance, and always the same
        if entry.digest not in taught and kept[entry.class_name] < SEEN:
            kept[entry.class_name] += 1
            chosen.append(entry)
    loaded: LabelledImages = class_folders.load(pool._replace(entries=tuple(chosen)), catalogue.classes, SIZE)
    return Judged(TrainingSet.of(loaded, spec.preprocessing), loaded.labels)


def main() -> None:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="*", help="NAME=FOLDER of class folders")
    parser.add_argument("--weights", default="surface", help="of the first encoder: a name or a file")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("research/results/studies/slow_node.jsonl"))
    parser.add_argument("--table", action="store_true", help="print what the file holds, as Markdown")
    asked = parser.parse_args()
    records = Records(asked.out, Outcome)
    if asked.table:
        print(table(list(records)))
        return
    torch.set_num_threads(1)
    folders = dict(each.split("=", 1) for each in asked.data)
    catalogues = {name: class_folders.scan(Path(folder)) for name, folder in folders.items()}
    finished = {outcome.trial for outcome in records}
    for seed, name, policy in product(asked.seeds, catalogues, POLICIES):
        trial = Trial(dataset=name, policy=policy, seed=seed)
        if trial not in finished:
            outcome = run(trial, catalogues[name], asked.weights)
            records.add(outcome)
            print(f"{name}, {policy}, seed {seed}: {outcome.all_classes} {outcome.slow_classes}", flush=True)


def table(outcomes: Sequence[Outcome]) -> str:
    """A Markdown table of accuracies over time, of all classes / of the slow plant's; mean ± sd over seeds."""
    head = ["data set", "policy", *(f"{time} units" for time in TOLD), "rounds", "slow plant counted"]
    rows = [head, ["---"] * len(head)]
    for name, policy in sorted({(each.trial.dataset, each.trial.policy) for each in outcomes}):
        some = [each for each in outcomes if (each.trial.dataset, each.trial.policy) == (name, policy)]
        told = [
            f"{_spread([each.all_classes[at] for each in some])} / {_spread([each.slow_classes[at] for each in some])}"
            for at in range(len(TOLD))
        ]
        closed, counted = (
            f"{np.mean(numbers):.0f}"
            for numbers in ([each.rounds[-1] for each in some], [each.counted["4"] for each in some])
        )
        rows.append([name, policy, *told, closed, counted])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _spread(values: Sequence[float]) -> str:
    spread = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{spread}"


if __name__ == "__main__":
    main()
