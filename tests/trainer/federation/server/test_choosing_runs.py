"""A choice of encoder and size: a chain of runs that goes on wherever it was killed."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from broker_config.broker.embedded import EmbeddedBroker, start_broker
from tests.support.choosing_coordinator import CANDIDATES, CODE, SIZES, compare_small_ones
from tests.support.forked_process import Forked
from tests.support.plants import CLASSES, Process, draw, start
from tests.support.waiting import PATIENCE
from trainer.federation.server import choosing_runs
from trainer.federation.server.choosing_runs import (
    Federation,
    NextRun,
    default_candidate,
    find_next,
    make_request,
)
from trainer.federation.server.journal import Blob, Outcome, Run, RunRecord, runs
from trainer.federation.server.spec import Participation, Request
from trainer.statistics.encoder_choice import EncoderLosses, RunLosses, choose

FEDERATION = Federation("steel", CLASSES, 2, Participation())
SMALL = Request(model="small", weights="none", size=32)


def newest(
    number: int, size: int, outcome: Outcome | None, round_: int = 1, *, chooses: bool = True
) -> Run:
    """The newest run of a journal."""
    request = Request("gaussian", model="small", weights="none", size=size)
    spec, _ = FEDERATION.draft(request, chooses=chooses)
    spec = msgspec.structs.replace(spec, run=f"{number}" * 16)
    return Run(spec, outcome, round_, Blob("0" * 64, 1), (), (), {}, frozenset(), Blob("0" * 64, 1))


def told(folder: Path, *ended: tuple[int, int, bool]) -> None:
    """Write down choosing runs: number, size, whether it has ended."""
    known = [
        RunLosses(run=f"{number}" * 16, size=size, weights={"small": "none"}, ended=is_ended)
        for number, size, is_ended in ended
    ]
    EncoderLosses(runs=known).save(folder)


def test_a_choice_begins_with_the_first_size_and_forgets_an_earlier_one(tmp_path: Path) -> None:
    told(tmp_path, (1, 32, True), (2, 48, True))
    assert find_next(None, tmp_path, SIZES, new=False) == NextRun(32, new=False)
    assert EncoderLosses.load(tmp_path).runs == []
    told(tmp_path, (1, 32, True), (2, 48, True))
    finished = newest(3, 48, "finished", chooses=False)
    assert find_next(finished, tmp_path, SIZES, new=True) == NextRun(32, new=True)
    assert EncoderLosses.load(tmp_path).runs == []


def test_a_new_choice_that_will_be_refused_forgets_nothing(tmp_path: Path) -> None:
    told(tmp_path, (1, 32, True))
    assert find_next(newest(2, 48, None), tmp_path, SIZES, new=True) == NextRun(32, new=True)
    assert len(EncoderLosses.load(tmp_path).runs) == 1


@pytest.mark.parametrize("outcome", [None, "finished", "aborted"])
def test_a_choosing_run_goes_on_until_it_is_marked_as_ended(
    outcome: Outcome | None, tmp_path: Path
) -> None:
    """An aborted one, too: the ledger refuses that."""
    told(tmp_path, (1, 32, True), (2, 48, False))
    run = newest(2, 48, outcome)
    assert find_next(run, tmp_path, SIZES, new=False) == NextRun(48, new=False)


def test_what_has_ended_is_not_run_again(tmp_path: Path) -> None:
    told(tmp_path, (1, 32, True))
    ended = newest(1, 32, "finished")
    assert find_next(ended, tmp_path, SIZES, new=False) == NextRun(48, new=True)
    assert find_next(ended, tmp_path, [32], new=False) is None
    told(tmp_path, (1, 32, True), (2, 48, True))
    assert find_next(newest(2, 48, "finished"), tmp_path, SIZES, new=False) is None


def test_where_the_file_was_lost_the_choice_begins_anew(tmp_path: Path) -> None:
    assert find_next(newest(2, 48, "finished"), tmp_path, SIZES, new=False) == NextRun(32, new=True)


def test_a_run_that_is_wanted_is_not_chosen_again(tmp_path: Path) -> None:
    assert find_next(newest(3, 32, None, chooses=False), tmp_path, SIZES, new=False) is None


def test_a_choosing_run_is_one_message_of_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing_runs, "CANDIDATES", CANDIDATES)
    wanted = Request("fedavg", seed=5, threads=2, codec="none")
    sampled = FEDERATION._replace(participation=Participation(sample=1, deadline=9.0))
    spec, broadcast = sampled.draft(make_request(wanted, 48), chooses=True)
    assert spec.chooses
    assert (spec.rounds, spec.sample, spec.quorum, spec.deadline) == (1, 0, 1, 9.0)
    assert (spec.model, spec.preprocessing.size, spec.seed, spec.threads) == ("small", 48, 5, 2)
    assert any(name.startswith("candidate.efficientnet_lite0.") for name in broadcast)
    assert not sampled.draft(SMALL)[0].chooses


def test_where_nothing_was_compared_the_default_is_taken_at_a_size_that_is_wanted() -> None:
    assert default_candidate((128, 224))[:3] == ("efficientnet_lite0_mid", "imagenet", 224)
    assert default_candidate((96,)).size == 96


# In real processes


class Chain(NamedTuple):
    """A choice that has come to its end."""

    folder: Path

    @property
    def runs(self) -> list[RunRecord]:
        return runs(self.folder / "coordinator")

    @property
    def losses(self) -> dict[int, dict[str, object]]:
        """What each node has told, by size."""
        known = EncoderLosses.load(self.folder / "coordinator")
        return {each.size: dict(each.nodes) for each in known.runs}


class Plants:
    """A coordinator and two nodes."""

    def __init__(self, folder: Path, url: str):
        self._folder = folder
        self._url = url
        self._started: list[Process] = []
        self._images = {
            name: draw(folder / f"images-{name}", 4, number + 1, CLASSES[number : number + 2])
            for number, name in enumerate(("a", "b"))
        }

    def coordinate(self, **environment: str) -> Process:
        words = (
            "coordinate", self._url, "--classes", ",".join(CLASSES), "--nodes", "2",
            "--weights", "auto", "--method", "fedavg", "--rounds", "1",
            "--training", "local_epochs=1", "--state", str(self._folder / "coordinator"),
        )  # fmt: skip
        log = self._folder / f"coordinator-{len(self._started)}.log"
        process = Forked(words, log, environment, prepare=compare_small_ones)
        self._started.append(process)
        return process

    def join(self, name: str) -> Process:
        process = start(
            "join", self._url, "--name", name, "--data", self._images[name],
            "--state", self._folder / name, log=self._folder / f"{name}-{len(self._started)}.log",
        )  # fmt: skip
        self._started.append(process)
        return process

    def kill(self) -> None:
        for process in self._started:
            process.kill()

    def logs(self) -> str:
        return "\n".join(f"{log.name}\n{log.read_text()}" for log in self._folder.glob("*.log"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with start_broker(folder / "broker", port=0, kind="mosquitto") as broker:
        plants = Plants(folder, broker.url)
        try:
            processes = [plants.coordinate(), plants.join("a"), plants.join("b")]
            codes = [process.wait(PATIENCE) for process in processes]
        finally:
            plants.kill()
        assert codes == [0, 0, 0], plants.logs()
        yield Chain(folder)


@pytest.mark.slow
def test_one_command_chooses_encoder_and_size_and_trains_with_them(undisturbed: Chain) -> None:
    specs = [each.spec for each in undisturbed.runs]
    assert [each.outcome for each in undisturbed.runs] == ["finished"] * 3
    assert [(each.chooses, each.preprocessing.size) for each in specs[:2]] == [
        (True, size) for size in SIZES
    ]
    assert {size: set(nodes) for size, nodes in undisturbed.losses.items()} == {
        size: {"a", "b"} for size in SIZES
    }
    chosen = choose(EncoderLosses.load(undisturbed.folder / "coordinator").costs(SIZES))
    wanted = specs[2]
    assert (wanted.method, wanted.chooses) == ("fedavg", False)
    assert (wanted.model, wanted.preprocessing.size) == (chosen.model, chosen.size)
    log = next(undisturbed.folder.glob("coordinator-*.log")).read_text()
    for size in SIZES:
        for model in CANDIDATES:
            assert f"{model} at {size} px: " in log
    assert f"{chosen.model} at {chosen.size} px: " in log.split(" <- ")[0].splitlines()[-1]
    for name in ("a", "b"):
        assert (undisturbed.folder / name / "model" / "personal.json").exists()


DEATHS = (
    ("AFTER", "forgotten"),
    ("AFTER", "begun"),
    ("AFTER", "told by 0"),
    ("BEFORE", "concluded"),
    ("AFTER", "concluded"),
    ("BEFORE", "told by 1"),
    ("AFTER", "told by 1"),
    ("AFTER", "finished"),
    ("BEFORE", "told by 2"),
    ("AFTER", "told by 2"),
    ("BEFORE", "ended"),
    ("AFTER", "ended"),
    ("AFTER", "begun"),
    ("AFTER", "concluded"),
    ("AFTER", "ended"),
    ("AFTER", "begun"),
)


@pytest.mark.slow
def test_a_coordinator_that_is_killed_at_each_write_comes_to_the_same_choice(
    undisturbed: Chain, mosquitto: EmbeddedBroker, tmp_path: Path
) -> None:
    """A node is killed as well: once before it has told its losses, and once between the runs."""
    plants = Plants(tmp_path, mosquitto.url)
    try:
        nodes = {name: plants.join(name) for name in ("a", "b")}
        for number, (side, kind) in enumerate(DEATHS):
            coordinator = plants.coordinate(**{f"DIE_{side}": kind})
            assert coordinator.wait(PATIENCE) == CODE, f"{number}: {side} {kind}\n{plants.logs()}"
            if number in (DEATHS.index(("AFTER", "concluded")), DEATHS.index(("AFTER", "ended"))):
                nodes["a"].kill()
                nodes["a"].wait(PATIENCE)
                nodes["a"] = plants.join("a")
        assert plants.coordinate().wait(PATIENCE) == 0, plants.logs()
        assert [node.wait(PATIENCE) for node in nodes.values()] == [0, 0], plants.logs()
    finally:
        plants.kill()
    chain = Chain(tmp_path)
    assert [each.spec.chooses for each in chain.runs] == [True, True, False]
    assert chain.losses == undisturbed.losses
    first, second = chain.runs[-1].spec, undisturbed.runs[-1].spec
    assert (first.model, first.preprocessing) == (second.model, second.preprocessing)
