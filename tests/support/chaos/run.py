"""Run of one federation under kills: starts all, kills by schedule, starts the dead again,
until all have ended.
"""

import random
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import connection
from pathlib import Path
from typing import NamedTuple

from broker_config.protocol.messages import Codec, Head
from tests.support.chaos import tracing
from tests.support.chaos.processes import EdgeNode
from tests.support.chaos.schedule import COORDINATOR, Strike
from tests.support.mosquitto import Mosquitto
from tests.support.plants import CLASSES, draw
from tests.support.provisioned_federation import make
from tests.support.unreliable_network import FaultRates, UnreliableProxy
from trainer.federation.server.spec import suited_model
from trainer.methods.base import MODEL
from trainer.models.catalogue import ONLY_SIZE

_PATIENCE = 240.0  # seconds without any durable step after which the federation counts as stuck
_AGAIN = 0.5  # seconds until a process that gave up is started again
_IMAGES = 10  # of each class
_AGAIN_AT_EVERY_START = ("resumed", "training")  # steps that are no progress by themselves
_LOOK = 0.02  # seconds between two looks at clock and traces
_GOES_BACK = 2  # rounds by which nodes go back with their coordinator, at most
# the step after which a backup takes its folder's place
_RESTORES: tuple[tracing.When, str] = ("after", "opened")
# What admits members alone, over TLS, of the configuration that `provision` writes.
_TLS = """
cafile {folder}/ca.pem
certfile {folder}/broker.pem
keyfile {folder}/broker.key
require_certificate true
use_identity_as_username true
"""
_TWIN = 60.0  # seconds in which a process on a copied state folder must have given way


class Federation(NamedTuple):
    """What is learnt; the tensors depend on nothing else."""

    rounds: int  # that for statistics included
    nodes: int
    seed: int
    method: str = "afedcl"
    head: Head = "trained"
    codec: Codec = "none"
    has_kits: bool = False  # then messages are signed and encrypted, over TLS
    is_masked: bool = False  # what nodes contribute; they have kits then

    @property
    def options(self) -> dict[str, str]:
        """Of the method."""
        return {"weights": "images"} if self.is_masked and self.method == "afedcl" else {}

    @property
    def rounds_of_training(self) -> int:
        """As they are asked for."""
        return self.rounds - (self.head == "statistics")

    @property
    def model(self) -> str:
        """That the method trains here."""
        own = suited_model(self.method, {})
        return "small" if own == MODEL else own

    @property
    def size(self) -> int:
        """Of its images, pixels."""
        return ONLY_SIZE.get(self.model, 32)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the nodes."""
        return tuple(f"plant-{number + 1}" for number in range(self.nodes))


class Kill(NamedTuple):
    """One that has happened."""

    victim: str
    fault: str  # "" at a random moment, else right before or after which of the victim's steps
    round: int
    time: float  # monotonic
    midway: bool  # while a blob was under way


class Exit(NamedTuple):
    """A process ended by itself, and not well."""

    name: str
    code: int
    said: str


class Outcome(NamedTuple):
    """What happened on the way. All processes have ended with exit code 0."""

    kills: list[Kill]
    exits: list[Exit]
    twins: list[Exit]  # processes on copied state folders
    again: int | None  # the earliest round to which a restored coordinator went back
    seconds: float
    weather: dict[str, int]  # packets that met with it


class StuckError(Exception):
    """Nothing moves any more."""


def prepare(federation: Federation, folder: Path) -> dict[str, Path]:
    """Draw each node's images, of all or of all but one class."""
    return {
        name: draw(
            folder / name,
            _IMAGES,
            number,
            CLASSES if number % 2 else CLASSES[number // 2 % 2 :][:2],
        )
        for number, name in enumerate(federation.names)
    }


def _copy(source: str, target: str) -> None:
    with suppress(FileNotFoundError):
        shutil.copy2(source, target)


class ChaosRun:
    """Runs `federation` in `folder` on the `plants`' images; `persistence` is the broker's.

    Without `strikes` and in fair `weather` it is the undisturbed run.
    """

    def __init__(
        self,
        federation: Federation,
        plants: dict[str, Path],
        folder: Path,
        *,
        strikes: Sequence[Strike] = (),
        weather: FaultRates | None = None,
        persistence: bool = True,
        chunk: int = 16,
        say: Callable[[str], None] = lambda _: None,
    ):
        folder.mkdir(parents=True)
        self._federation, self._folder, self._say = federation, folder, say
        self._strikes, self._planned = list(strikes), len(strikes)
        self._chance = random.Random(federation.seed)
        keys = folder / "keys"
        tls = _TLS.format(folder=keys / "broker") if federation.has_kits else ""
        self._broker = Mosquitto(folder / "broker", persistence=persistence, more=tls)
        self._storm = (
            UnreliableProxy(self._broker.port, weather, federation.seed) if weather else None
        )
        reached: dict[str, list[object]]
        if federation.has_kits:
            members = make(keys, "default", federation.names, port=self._broker.port)
            reached = {
                name: ["--kit", keys / "kits" / f"{name}.kit"] for name in (COORDINATOR, *plants)
            }
            passphrases = {name: members.passphrase(name) for name in reached}
        else:
            url = (self._storm or self._broker).url
            reached, passphrases = {name: [url] for name in (COORDINATOR, *plants)}, {}
        self._processes = {
            COORDINATOR: EdgeNode(
                folder,
                COORDINATOR,
                [
                    "coordinate",
                    *reached[COORDINATOR],
                    "--classes",
                    ",".join(CLASSES),
                    "--nodes",
                    federation.nodes,
                    "--model",
                    federation.model,
                    "--weights",
                    "none",
                    "--size",
                    federation.size,
                    "--rounds",
                    federation.rounds_of_training,
                    "--head",
                    federation.head,
                    "--codec",
                    federation.codec,
                    "--seed",
                    federation.seed,
                    "--method",
                    federation.method,
                    "--training",
                    "local_epochs=1",
                    "--state",
                    folder / COORDINATOR,
                    *(f"--option={name}={value}" for name, value in federation.options.items()),
                    *(["--secure-aggregation"] if federation.is_masked else []),
                ],
                passphrases.get(COORDINATOR, ""),
                chunk,
            )
        }
        for name, images in plants.items():
            self._processes[name] = EdgeNode(
                folder,
                name,
                [
                    "join",
                    *reached[name],
                    "--name",
                    name,
                    "--data",
                    images,
                    "--state",
                    folder / name,
                ],
                passphrases.get(name, ""),
            )
        self._down: dict[str, float] = {}  # when those that are dead are to be started
        self._finished: set[str] = set()
        self._kills: list[Kill] = []
        self._exits: list[Exit] = []
        self._twins: list[Exit] = []
        self._twin: EdgeNode | None = None  # that runs now
        self._twin_until = 0.0
        self._backup = folder / "backup-of-coordinator"  # waits to be restored
        # rounds: of the backup; that are opened again, all together
        self._backup_round = self._gone_back = 0
        self._again: int | None = None
        self._moved = self._struck = time.monotonic()
        self._bytes = self._durable = 0  # of all traces: bytes, and durable steps in them
        # faults that wait for their victim's step
        self._armed: defaultdict[str, set[Path]] = defaultdict(set)
        self._round = 0  # that is open; 0 while gathering, one more than there are after the last

    def run(self) -> Outcome:
        """Run to the end. StuckError if there is none."""
        started = time.monotonic()
        for strike in [strike for strike in self._strikes if not strike.round and strike.fault]:
            if not self._is_armed(strike):  # one that is drawn twice waits for the first to strike
                self._strikes.remove(strike)
                self._arm(strike.victim, strike.fault)
        with ExitStack() as stack:
            self._broker.start()
            stack.callback(self._broker.kill)
            if self._storm:
                stack.enter_context(self._storm)
            stack.callback(self._kill_all)
            for process in self._processes.values():
                process.start()
            while len(self._finished) < len(self._processes):
                connection.wait([process.sentinel for process in self._running()], _LOOK)
                self._bury()
                self._revive()
                self._strike()
                self._watch()
        weather = dict(self._storm.counts) if self._storm else {}
        return Outcome(
            self._kills, self._exits, self._twins, self._again, time.monotonic() - started, weather
        )

    def _kill_all(self) -> None:
        for process in (*self._running(), *([self._twin] if self._twin else [])):
            process.kill()

    def _running(self) -> list[EdgeNode]:
        idle = self._finished | self._down.keys()
        return [process for name, process in self._processes.items() if name not in idle]

    def _bury(self) -> None:
        """Note who has ended: well, by a fault, or by giving up."""
        if self._twin and (self._twin.ended is not None or time.monotonic() > self._twin_until):
            code, name = self._twin.ended, self._twin.name
            self._twin.kill()
            self._twins.append(Exit(name, 0 if code is None else code, self._last_words(name)))
            self._say(f"{name} ended with exit code {code}")
            self._twin = None
        for process in self._running():
            if process.ended is None:
                continue
            if process.ended == 0:
                self._finished.add(process.name)
            elif process.ended == -signal.SIGKILL:
                self._armed[process.name] = {
                    fault for fault in self._armed[process.name] if fault.exists()
                }
                last = tracing.read(self._folder, process.name)[-1]
                self._killed(
                    process.name, self._chance.expovariate(4), f"{last.when} {last.kind}", last.time
                )
                if process.name == COORDINATOR and self._backup.exists():
                    self._restore()
            else:
                self._exits.append(
                    Exit(process.name, process.ended, self._last_words(process.name))
                )
                self._down[process.name] = time.monotonic() + _AGAIN

    def _last_words(self, name: str) -> str:
        return "\n".join(
            (self._folder / f"{name}.log").read_text(errors="replace").splitlines()[-3:]
        )

    def _revive(self) -> None:
        for name, when in list(self._down.items()):
            if time.monotonic() >= when:
                (self._broker if name == self._broker.name else self._processes[name]).start()
                del self._down[name]

    def _strike(self) -> None:
        """Do what is due.

        Whoever is dead already is waited for; in place of one who has finished another is taken.
        """
        while self._strikes and not self._twin and not self._backup.exists():
            strike, now = self._strikes[0], time.monotonic()
            early = strike.round == self._round and (
                now < self._struck + strike.wait or (strike.midway and not self._midway())
            )
            early = early or (strike.deed == "twin" and not self._originals())
            early = early or (
                strike.deed == "backup" and any(each.exists() for each in self._armed[COORDINATOR])
            )
            early = early or any(self._is_dying(each.name) for each in self._running())
            if (
                early
                or strike.round > self._round
                or strike.victim in self._down
                or self._is_armed(strike)
            ):
                return
            self._strikes.pop(0)
            self._struck = now
            if strike.fault:
                self._arm(strike.victim, strike.fault)
            elif strike.deed == "twin":
                self._start_twin(strike.victim)
            elif strike.victim == self._broker.name:
                self._broker.kill()
                self._killed(strike.victim, strike.down)
            elif (
                victims := [each for each in self._running() if each.name == strike.victim]
                or self._running()
            ):
                victims[0].kill()
                self._killed(victims[0].name, strike.down)
                if strike.deed == "backup":
                    self._back_up()

    def _start_twin(self, name: str) -> None:
        """Start a process on a copy of the state folder of one that runs,
        of `name` if that can be.
        """
        originals = self._originals()
        original = next((each for each in originals if each.name == name), originals[0])
        twin = f"twin-{len(self._twins)}-of-{original.name}"
        # What is written meanwhile is not copied, a rollback journal, what arrives of a blob; nor
        # what is removed.
        passing = shutil.ignore_patterns("*-journal", "incoming")
        shutil.copytree(
            self._folder / original.name, self._folder / twin, ignore=passing, copy_function=_copy
        )
        self._twin, self._twin_until = original.twin(twin), time.monotonic() + _TWIN
        self._twin.start()
        self._say(twin)

    def _originals(self) -> list[EdgeNode]:
        """Who takes part and is not about to die: a twin would take the place of another,
        and rightly.
        """
        return [
            each
            for each in self._running()
            if not any(self._folder.glob(f"{each.name}.*.fault"))
            and any(
                step.time > each.started and step.kind != "resumed"
                for step in tracing.read(self._folder, each.name)
            )
        ]

    def _back_up(self) -> None:
        """Copy the state folder of the coordinator, which is dead;
        it is restored before anything else happens.

        What kills it then waits for a round to open, and not for a time: nodes do not keep what
        they knew long ago.
        """
        self._watch()
        self._backup_round = self._round
        if (left := self._federation.rounds - self._round) > 0:
            shutil.copytree(self._folder / COORDINATOR, self._backup)
            self._arm(COORDINATOR, _RESTORES, spared=self._chance.randrange(min(left, _GOES_BACK)))
            self._planned += 1

    def _restore(self) -> None:
        self._watch()
        shutil.rmtree(self._folder / COORDINATOR)
        self._backup.rename(self._folder / COORDINATOR)
        self._say(
            f"the coordinator is of round {self._backup_round} again, instead of {self._round}"
        )
        self._gone_back += self._round - self._backup_round
        self._again = min(self._again or self._backup_round, self._backup_round)
        self._round = self._backup_round

    def _arm(self, victim: str, step: tuple[tracing.When, str], spared: int = 0) -> None:
        fault = tracing.fault(self._folder, victim, *step)
        fault.write_text(str(spared))
        self._armed[victim].add(fault)

    def _is_armed(self, strike: Strike) -> bool:
        return (
            strike.fault is not None
            and tracing.fault(self._folder, strike.victim, *strike.fault).exists()
        )

    def _is_dying(self, name: str) -> bool:
        """Whether a fault has struck it just now: a kill as well would pass for the fault's."""
        return not all(fault.exists() for fault in self._armed[name])

    def _killed(self, victim: str, down: float, fault: str = "", at: float | None = None) -> None:
        now = time.monotonic()
        self._down[victim] = now + down
        kill = Kill(victim, fault, self._round, at or now, self._midway())
        self._kills.append(kill)
        how = f"right {fault}" if fault else "at a random moment"
        self._say(f"kill {len(self._kills)} of {self._planned}: {victim} {how}, round {kill.round}")

    def _midway(self) -> bool:
        """Whether a blob is under way."""
        return any(
            not path.name.startswith("put-") for path in self._folder.glob("*/blobs/incoming/*")
        )

    def _watch(self) -> None:
        """Note which round is open, and whether anything moves."""
        bytes_ = sum((self._folder / f"{name}.trace").stat().st_size for name in self._traced())
        if bytes_ > self._bytes:
            self._bytes = bytes_
            kinds = [
                each.kind
                for name in self._traced()
                for each in tracing.read(self._folder, name, "after")
            ]
            own = [each.kind for each in tracing.read(self._folder, COORDINATOR, "after")]
            self._round = own.count("opened") + own.count("concluded") - self._gone_back
            durable = len(kinds) - sum(kinds.count(kind) for kind in _AGAIN_AT_EVERY_START)
            if durable > self._durable:
                self._durable, self._moved = durable, time.monotonic()
        if time.monotonic() > self._moved + _PATIENCE:
            logs = [
                (self._folder / f"{name}.log").read_text(errors="replace")[-600:]
                for name in self._traced()
            ]
            raise StuckError(
                "\n".join((f"nothing has moved for {_PATIENCE:.0f} s in {self._folder}", *logs))
            )

    def _traced(self) -> list[str]:
        return [name for name in self._processes if (self._folder / f"{name}.trace").exists()]
