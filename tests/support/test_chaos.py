"""Whatever is killed, whenever: the short version of `make chaos`, and what its instruments see."""

import shutil
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from broker_config.protocol.messages import Codec
from tests.support.chaos import schedule, verification
from tests.support.chaos.run import ChaosRun, Federation, prepare
from tests.support.chaos.schedule import COORDINATOR
from tests.support.chaos.tracing import Moment
from tests.support.mosquitto import BROKER
from tests.support.unreliable_network import STORM
from trainer.federation.server.journal import Journal, newest_run

SMALL = Federation(rounds=4, nodes=3, seed=3)
Known = tuple[dict[str, Path], verification.Tensors]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """The images of three plants, and what a federation of them must end with."""
    plants = prepare(SMALL, tmp_path_factory.mktemp("plants"))
    return plants, verification.simulated(SMALL, plants)


@pytest.mark.parametrize(
    ("seed", "persistence"), [(2900, True), pytest.param(2925, False, marks=pytest.mark.slow)]
)
def test_kills_at_random_moments_and_around_durable_steps_change_no_byte(
    seed: int, persistence: bool, known: Known, tmp_path: Path
) -> None:
    plants, expected = known
    strikes = schedule.draw(seed, 10, SMALL.rounds, SMALL.names)
    outcome = ChaosRun(
        SMALL, plants, tmp_path / "run", strikes=strikes, persistence=persistence
    ).run()
    assert verification.complaints(tmp_path / "run", SMALL, expected) == []
    assert verification.missed(strikes, outcome.kills) == []


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "int4"])
def test_kills_change_no_byte_of_what_is_encrypted(codec: Codec, tmp_path: Path) -> None:
    """Each process of the coordinator has a key of its own, and each of a node is given it anew."""
    federation = SMALL._replace(has_kits=True, codec=codec)
    plants = prepare(federation, tmp_path / "images")
    strikes = schedule.draw(2903, 10, federation.rounds, federation.names)
    outcome = ChaosRun(federation, plants, tmp_path / "run", strikes=strikes).run()
    assert newest_run(tmp_path / "run" / COORDINATOR).spec.encryption == "group"
    expected = verification.simulated(federation, plants)
    assert verification.complaints(tmp_path / "run", federation, expected) == []
    assert verification.missed(strikes, outcome.kills) == []


@pytest.mark.slow
def test_kills_change_no_byte_of_masked_sums(tmp_path: Path) -> None:
    """Nodes and coordinator are killed around each step of the masks, too,
    and say again what they have said.
    """
    federation = SMALL._replace(has_kits=True, is_masked=True)
    plants = prepare(federation, tmp_path / "images")
    strikes = schedule.draw(2905, 24, federation.rounds, federation.names, is_masked=True)
    outcome = ChaosRun(federation, plants, tmp_path / "run", strikes=strikes).run()
    assert newest_run(tmp_path / "run" / COORDINATOR).spec.mask_threshold == 2
    expected = verification.simulated(federation, plants)
    assert expected != verification.simulated(federation._replace(is_masked=False), plants)
    assert verification.complaints(tmp_path / "run", federation, expected) == []
    assert verification.missed(strikes, outcome.kills) == []
    struck = {kill.fault for kill in outcome.kills}
    assert struck & {"before masked", "after masked"}
    assert struck & {"before kept masks", "after kept masks"}


@pytest.mark.slow
def test_kills_change_no_byte_of_statistics_nor_of_the_head_made_of_them(tmp_path: Path) -> None:
    federation = Federation(rounds=3, nodes=3, seed=3, method="fedper", head="statistics")
    plants = prepare(federation, tmp_path / "images")
    strikes = schedule.draw(2901, 10, federation.rounds, federation.names)
    outcome = ChaosRun(federation, plants, tmp_path / "run", strikes=strikes).run()
    expected = verification.simulated(federation, plants)
    assert verification.complaints(tmp_path / "run", federation, expected) == []
    assert verification.missed(strikes, outcome.kills) == []
    assert any(name.startswith("global/statistics.") for name in expected)


@pytest.mark.slow
def test_kills_and_a_restored_coordinator_change_no_byte_of_coded_updates(tmp_path: Path) -> None:
    federation = SMALL._replace(rounds=8, codec="int4")
    plants = prepare(federation, tmp_path / "images")
    kills = schedule.draw(2902, 10, federation.rounds, federation.names)
    backup, *_ = [
        each for each in schedule.draw_copies(5, 1, 8, federation.names) if each.deed == "backup"
    ]
    strikes = sorted([*kills, backup], key=lambda strike: strike.round)
    outcome = ChaosRun(federation, plants, tmp_path / "run", strikes=strikes).run()
    expected = verification.simulated(federation, plants)
    assert expected != verification.simulated(federation._replace(codec="none"), plants)
    assert verification.complaints(tmp_path / "run", federation, expected, outcome.again) == []
    assert outcome.again is not None


@pytest.mark.slow
def test_twins_give_way_and_say_why_and_a_restored_coordinator_changes_no_byte(
    known: Known, tmp_path: Path
) -> None:
    plants, _ = known
    # a twin takes a second until it gives way, a round a third of one
    longer = SMALL._replace(rounds=12)
    strikes = schedule.draw_copies(10, 2, longer.rounds, longer.names)
    outcome = ChaosRun(longer, plants, tmp_path / "run", strikes=strikes).run()
    expected = verification.simulated(longer, plants)
    assert verification.complaints(tmp_path / "run", longer, expected, outcome.again) == []
    assert len(outcome.twins) == 2
    assert verification.unnoticed(outcome) == []
    assert outcome.again is not None


@pytest.mark.slow
def test_a_storm_changes_no_byte(known: Known, tmp_path: Path) -> None:
    plants, expected = known
    outcome = ChaosRun(SMALL, plants, tmp_path / "run", weather=STORM, chunk=32).run()
    assert verification.complaints(tmp_path / "run", SMALL, expected) == []
    assert all(outcome.weather[what] for what in ("drop", "double", "hold", "stall", "cut")), (
        outcome.weather
    )


@pytest.mark.slow
def test_a_hundred_kills_hit_every_victim_and_both_sides_of_every_transition() -> None:
    nodes = tuple(f"plant-{number}" for number in range(5))
    for seed in range(20):
        strikes = schedule.draw(seed, 100, 20, nodes)
        assert len(strikes) == 100
        assert {strike.victim for strike in strikes} == {COORDINATOR, BROKER, *nodes}
        of_coordinator = {strike.fault for strike in strikes if strike.victim == COORDINATOR}
        assert of_coordinator >= {
            (when, kind) for kind in schedule.KINDS for when in ("before", "after")
        }
        assert {strike.round for strike in strikes} == set(range(21))
    assert (
        schedule.draw(1, 100, 20, nodes)
        != schedule.draw(2, 100, 20, nodes)
        == schedule.draw(2, 100, 20, nodes)
    )


@pytest.fixture(scope="module")
def quiet(known: Known, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What processes leave that nobody has disturbed."""
    folder = tmp_path_factory.mktemp("quiet") / "run"
    ChaosRun(SMALL, known[0], folder).run()
    return folder


@pytest.mark.slow
def test_a_byte_that_differs_a_round_that_is_lost_and_one_that_is_trained_twice_are_seen(
    quiet: Path, known: Known, tmp_path: Path
) -> None:
    def complaints(folder: Path) -> list[str]:
        return verification.complaints(folder, SMALL, known[1])

    assert complaints(quiet) == []
    shutil.copytree(quiet, damaged := tmp_path / "run")
    path = damaged / "plant-2" / "model" / "personal.safetensors"
    tensors = load_file(path)
    first = sorted(tensors)[0]
    tensors[first] = np.nextafter(tensors[first], np.float32(9))
    save_file(tensors, path)
    assert complaints(damaged) == [f"1 of {len(known[1])} tensors differ, plant-2/{first} first"]
    shutil.copy(quiet / "plant-2" / "model" / "personal.safetensors", path)
    with closing(Journal(damaged / COORDINATOR)) as journal:
        run = journal.latest()
        assert run is not None
        journal.resume(run.spec.run, 2, {"plant-1"})
    with (damaged / "plant-3.trace").open("ab") as trace:
        trace.write(msgspec.json.encode(Moment(1e9, "before", "training", 3)) + b"\n")
    lost, unknown, again = complaints(damaged)
    assert lost == "round 2 is lost"
    assert unknown.startswith("plant-1 contributed {")
    assert again == "plant-3 trained round 3 again"
