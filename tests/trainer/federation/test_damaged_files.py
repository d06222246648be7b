"""Every file of coordinator and nodes, damaged: the same bytes all the same,
or a message with file and remedy.
"""

import multiprocessing
import shutil
import threading
from collections.abc import Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from broker_config.broker.embedded import start_broker
from broker_config.mqtt.endpoint import Endpoint
from broker_config.security.kit import Kit
from broker_config.security.message_signing import MessageSigner
from tests.support.authority import Authority
from tests.support.damaged_files import (
    FAULTS,
    LOSS_TOLD,
    RECOVERED,
    Case,
    Outcome,
    Snapshot,
    try_all,
    unknown,
)
from tests.support.plants import draw
from tests.support.threaded_federation import PLANTS, Federation, Session, end_all, same
from trainer import progress
from trainer.federation.client import checkpoint, training_thread
from trainer.federation.server.ledger import Ledger
from trainer.federation.server.operator_actions import Kind, act, make_action
from trainer.federation.server.spec import Participation
from trainer.federation.simulation import simulate
from trainer.models.network import to_arrays
from trainer.training.alone import trains_alone
from trainer.training.participant import Participant

NAME = "damaged"
ROUNDS = 3
BLOB = "[0-9a-f]" * 64
KNOWN = (
    "coordinator/journal.sqlite",
    "coordinator/actions.jsonl*",
    "coordinator/events.jsonl",
    "coordinator/lock",
    "coordinator/global.safetensors",
    f"coordinator/blobs/{BLOB}",
    *(
        f"plant-?/{each}"
        for each in (
            "lock",
            "identity*.json",
            "runs*.json",
            "spec.json",
            "progress.json",
            "progress-?.json",
            "state-?-?.safetensors",
            "alone.json",
            "alone-*.safetensors",
            "aliases.json",
            f"blobs/{BLOB}",
            "timeline.jsonl",
            "masks.json",
            "masks-copy.json",
            "model/*",
        )
    ),
)
# so that the node does not know which model is better
NOT_COMPARED = "no comparison with training alone"
TOLD = (  # other losses
    # what a node had yet to learn of a round, with the broadcast that this began with
    "is not trained to its end",
    # likewise, with the record of its progress, where the others have left the round behind
    "it is an older copy",
    "with the result of the last round in its place",  # the received half of a model
)
# a node, what it does (`alone`: train without the others), in which round
Hold = tuple[str, str, int]

EARLIER: set[Hold] = {
    (name, what, 2 if what == "contribute" else 1)
    for name in PLANTS
    for what in ("contribute", "alone")
}
BEHIND_MASKS = "in a masked round"
MOMENTS: dict[str, set[Hold]] = {
    # plant-b is behind: round 3 is open, and it has yet to train what of round 2 is not sent;
    # plant-c, of round 3.
    "in a round": {
        ("plant-a", "alone", 3),
        ("plant-b", "refine", 2),
        ("plant-b", "alone", 1),
        ("plant-c", "refine", 3),
        ("plant-c", "alone", 1),
    },
    "after the last": {(name, "conclude", 3) for name in PLANTS},
    # two contributions have left behind the masks of round 3
    BEHIND_MASKS: {
        ("plant-a", "refine", 3),
        ("plant-b", "refine", 3),
        ("plant-c", "contribute", 3),
        *((name, "alone", 1) for name in PLANTS),
    },
}


class Settings(NamedTuple):
    """What founds the same federation in any process."""

    broker: Endpoint
    plants: dict[str, Path]
    kits: Mapping[str, Kit] | None  # where contributions are masked

    def found(self, folder: Path, name: str) -> Federation:
        arguments = (self.broker, self.plants, folder, name, ROUNDS, Participation())
        if self.kits is None:
            return Federation(*arguments)
        signers = {member: MessageSigner(kit) for member, kit in self.kits.items()}
        return Federation(
            *arguments, "fedavg", signers=signers, encryption="group", secure_aggregation=True
        )


def _live(
    settings: Settings, folder: Path, spec: Any, first: Any, held: set[Hold], reached: Any
) -> None:
    """All in one process, which is killed once every node is held."""

    def hold(owner: Any, step: str) -> None:
        compute = getattr(owner, step)

        @wraps(compute)
        def held_or_computed(
            self: Participant, state: Any, *arguments: Any, **keywords: Any
        ) -> Any:
            round_ = arguments[0] if step == "conclude" else arguments[1]
            if (self.node, "alone" if trains_alone(self.spec) else step, round_) in held:
                reached.release()
                threading.Event().wait()
            return compute(self, state, *arguments, **keywords)

        setattr(owner, step, held_or_computed)

    for step in ("contribute", "refine"):
        hold(Participant, step)
    hold(training_thread, "conclude")
    parties = settings.found(folder, NAME)
    parties.spec, parties.first = spec, first
    coordinator = parties.coordinator()
    nodes = [parties.node(name) for name in PLANTS]
    if ("plant-b", "refine", 2) in held:
        for node, event in ((coordinator, progress.Contribution), (nodes[0], progress.Measured)):
            _wait_for_last_round(node, event, 2 if node is coordinator else 1)
        reached.release()
    if ("plant-c", "contribute", 3) in held:
        _wait_for_last_round(coordinator, progress.Contribution, 2)
        reached.release()
    threading.Event().wait()


def _wait_for_last_round(session: Session, wanted: type, count: int) -> None:
    while count:
        event: Any = session.wait_for(wanted)
        count -= event.round == ROUNDS


def _make_kits(federation: str) -> dict[str, Kit]:
    authority = Authority(federation)
    return {name: authority.kit(name) for name in authority.keys}


class Killed:
    """A federation that was killed at a moment, with an older copy of its folders."""

    def __init__(self, folder: Path, broker: Endpoint, moment: str):
        plants = {name: draw(folder / "plants" / name, 6, seed) for seed, name in enumerate(PLANTS)}
        self.snapshot, self._scratch = (
            Snapshot(folder / "newer", folder / "older"),
            folder / "scratch",
        )
        self._kind = f"coordinator and nodes, {moment}"
        self._is_masked = moment == BEHIND_MASKS
        kits = _make_kits(NAME) if self._is_masked else None
        self._settings = Settings(broker, plants, kits)
        self._federation = self._settings.found(self.snapshot.newer, NAME)
        self._run_until(EARLIER, len(EARLIER))
        self._act("pause")
        checkpoint.confirm_alias(self.snapshot.newer / "plant-a", "Kratzer", "scratches")
        shutil.copytree(self.snapshot.newer, self.snapshot.older)
        self._act("resume")
        checkpoint.confirm_alias(self.snapshot.newer / "plant-a", "Riss", "patches")
        self._run_until(MOMENTS[moment], len(MOMENTS[moment]) + (moment != "after the last"))
        if moment == "after the last":
            with Ledger(self.snapshot.newer / "coordinator") as ledger:
                ledger.resume()
                ledger.save_result()
        images = {name: self._federation.images(name) for name in PLANTS}
        spec, first = self._federation.spec, self._federation.first
        self._expected = [simulate(spec, first, images, compare=each) for each in (True, False)]

    def _act(self, what: Kind) -> None:
        run = self._federation.spec.run
        act(self.snapshot.newer / "coordinator", make_action(run, what, "anna"))

    def _run_until(self, held: set[Hold], count: int) -> None:
        context = multiprocessing.get_context("forkserver")
        reached = context.Semaphore(0)
        spec, first = self._federation.spec, self._federation.first
        arguments = (self._settings, self.snapshot.newer, spec, first, held, reached)
        process = context.Process(target=_live, args=arguments)
        process.start()
        for _ in range(count):
            assert reached.acquire(timeout=60)
        process.kill()
        process.join()

    def start(self, folder: Path, commands: str) -> Outcome:
        """With a broker of its own, since this one would tell nodes later what another case has
        aborted.
        """
        aliases = checkpoint.load_aliases(folder / "plant-a")
        assert aliases.items() <= {"Kratzer": "scratches", "Riss": "patches"}.items()
        new = "--new" in commands
        with start_broker(self._scratch.with_name("broker"), kind="mosquitto") as running:
            settings = self._settings._replace(broker=Endpoint.parse(running.url))
            if new and self._is_masked:
                settings = settings._replace(kits=_make_kits("anew"))
            federation = settings.found(folder, "anew" if new else NAME)
            if not new:
                federation.spec = self._federation.spec
            if "abort" in commands:
                federation.abort()
            coordinator = federation.coordinator(linger=60, new=new)
            nodes = {name: federation.node(name) for name in PLANTS}
            end_all([coordinator, *nodes.values()])
        lost = [self._has_lost(federation, *node) for node in nodes.items()]
        return LOSS_TOLD if any(lost) else RECOVERED

    def _has_lost(self, federation: Federation, name: str, node: Session) -> bool:
        """Whether a node's model is another one than without the fault;
        then the node must have said why.
        """
        personal, told = federation.personal(name), node.notes()
        compared, alike = (
            same(personal, to_arrays(each.models[name].tensors)) for each in self._expected
        )
        if not compared:
            assert any(words in told for words in ((NOT_COMPARED,) if alike else TOLD)), (
                f"{name}: {told}"
            )
        return not compared

    def try_all(self, cases: list[Case]) -> None:
        try_all(self._kind, self.snapshot, cases, self.start, self._scratch, most=1)


@pytest.fixture(scope="module", params=MOMENTS)
def killed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Killed]:
    with start_broker(tmp_path_factory.mktemp("broker"), kind="mosquitto") as running:
        yield Killed(
            tmp_path_factory.mktemp("federation"), Endpoint.parse(running.url), request.param
        )


@pytest.mark.slow
def test_every_file_is_of_a_known_kind(killed: Killed) -> None:
    assert unknown(killed.snapshot.files(), KNOWN) == []


@pytest.mark.slow
def test_without_a_fault_the_run_goes_on_to_the_same_bytes(killed: Killed, tmp_path: Path) -> None:
    assert killed.start(killed.snapshot.copy([], tmp_path / "all"), "") == RECOVERED


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_each_file_ends_well(fault: str, killed: Killed) -> None:
    killed.try_all([case for case in killed.snapshot.cases() if case.fault == fault])
