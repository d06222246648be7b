"""Head and sensors before the first round and after the last: discovery, reports,
settings that can be changed.
"""

import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from broker_config.broker.embedded import start_broker
from broker_config.mqtt.client import read_retained
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.errors import BrokerError, EdgeNodeError, UsageError
from edge_node.extensions.vfl.client.discovery import find_spec
from edge_node.extensions.vfl.client.join import join
from edge_node.extensions.vfl.client.session import take_part
from edge_node.extensions.vfl.line.sensor_rows import RowFile
from edge_node.extensions.vfl.server.head_state import Timing
from edge_node.extensions.vfl.server.journal import Journal
from edge_node.extensions.vfl.server.labels import Labels
from edge_node.extensions.vfl.server.retained_cleanup import remove_retained
from tests.support.provisioned_federation import guarded
from tests.support.vfl_runs import Threads, draw, in_threads, source, vfl_spec
from trainer import progress


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_broker(tmp_path_factory.mktemp("broker"), kind="mosquitto") as running:
        yield running.url


def test_a_federation_says_that_it_is_finished_and_when_it_is_started_again_that_all_is_played(
    broker: str, tmp_path: Path
) -> None:
    spec = vfl_spec()
    draw(tmp_path / "data", 60, 1)
    parties = in_threads(spec, broker, tmp_path / "data", tmp_path, 4)
    assert "finished: 4 rounds, loss " in parties.said("head")
    assert "gone" not in parties.said()
    for name in spec.sensors:
        assert "finished: 4 rounds" in parties.said(name)
    with Threads(spec, broker, tmp_path / "data", tmp_path, 4) as again:
        again.start("head")
        again.end()
        assert "all 4 rounds are played" in again.said("head")
    press = source(tmp_path / "data", "press")
    ended = take_part(
        spec,
        "press",
        press,
        Endpoint.parse(broker),
        tmp_path / "press",
        report=progress.ignore,
        head_wait=0.5,
    )
    assert ended == (4, True)


def test_a_head_that_was_killed_after_the_last_round_ends_though_its_sensors_have_gone(
    broker: str, tmp_path: Path
) -> None:
    spec = vfl_spec()
    draw(tmp_path / "data", 60, 6)
    in_threads(spec, broker, tmp_path / "data", tmp_path, 4)
    with closing(Journal(tmp_path / "head")) as journal:
        journal.end(spec.run, 0)  # it is written when all have told that they are done
    with Threads(spec, broker, tmp_path / "data", tmp_path, 4, timing=Timing(linger=1.0)) as again:
        again.start("head")
        again.end()
        assert "finished: 4 rounds" in again.said("head")
    with closing(Journal(tmp_path / "head")) as journal:
        assert journal.ended(spec.run) == 4


def test_settings_can_be_changed_until_something_was_learnt_and_no_federation_is_left_behind(
    broker: str, tmp_path: Path
) -> None:
    spec = vfl_spec()
    draw(tmp_path / "data", 60, 2)
    for seed in (1, 2):
        with Threads(
            msgspec.structs.replace(spec, run=f"{seed:016}", seed=seed),
            broker,
            tmp_path / "data",
            tmp_path,
            4,
        ) as parties:
            parties.start("head")
            parties.until(lambda parties=parties: bool(parties.said()))
            parties.stop("head")
    assert not read_retained(Endpoint.parse(broker), [topics.spec(spec.federation)], 1.0)


def test_a_sensor_that_has_learnt_nothing_takes_up_a_new_run_by_itself(
    broker: str, tmp_path: Path
) -> None:
    spec, data = vfl_spec(), tmp_path / "data"
    draw(data, 60, 3)
    events: list[progress.AnyEvent] = []
    stop = threading.Event()
    with ThreadPoolExecutor() as pool, Threads(spec, broker, data, tmp_path, 4) as parties:
        parties.start("head")
        press = pool.submit(
            join,
            Endpoint.parse(broker),
            "press",
            source(data, "press"),
            tmp_path / "press",
            federation=spec.federation,
            wait=10,
            report=events.append,
            stop=stop.is_set,
        )
        parties.until(lambda: progress.NodeJoined(node="press") in parties.events["head"])
        parties.stop("head")
        parties.spec = msgspec.structs.replace(spec, run="0" * 16, seed=9)
        parties.start("head", "oven")
        parties.end()
        assert press.result(60) == (4, True)
        stop.set()


def test_only_federations_with_a_head_count_and_others_are_named(
    broker: str, tmp_path: Path
) -> None:
    spec = vfl_spec()
    draw(tmp_path / "data", 60, 4)
    with Threads(spec, broker, tmp_path / "data", tmp_path, 1000) as parties:
        parties.start("head", *spec.sensors)
        parties.until(
            lambda: any(
                int(each.name[:12])
                for each in (tmp_path / "head").glob(f"{spec.run}/*.safetensors")
            )
        )
    told: list[progress.AnyEvent] = []
    with pytest.raises(BrokerError, match="no head"):
        find_spec(Endpoint.parse(broker), None, 0, report=told.append)
    assert spec.federation in progress.format_event(told[0])
    assert find_spec(Endpoint.parse(broker), None, 0, state=tmp_path / "press") == spec


def test_a_sensor_without_a_part_in_a_run_that_is_over_is_told_so(
    broker: str, tmp_path: Path
) -> None:
    spec = vfl_spec()
    draw(tmp_path / "data", 60, 8)
    in_threads(spec, broker, tmp_path / "data", tmp_path, 2)
    with pytest.raises(EdgeNodeError, match="all its rounds") as told:
        find_spec(Endpoint.parse(broker), spec.federation, 0, state=tmp_path / "new")
    assert "coordinate --new" in str(told.value.remedy)
    assert find_spec(Endpoint.parse(broker), spec.federation, 0, state=tmp_path / "press") == spec


def test_a_file_that_cannot_be_used_is_found_before_anybody_is_waited_for(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("Product ID,force\np1,2\n")
    with pytest.raises(UsageError) as caught:
        join(
            Endpoint.parse("mqtt://127.0.0.1:1"),
            "press",
            RowFile(rows, ("force",)),
            tmp_path,
            federation=None,
            wait=0,
            report=progress.ignore,
        )
    assert caught.value.remedy == "if it is 'Product ID', write --product 'Product ID'"
    with pytest.raises(UsageError, match="'product'"):
        Labels(rows, ("good", "bad")).refresh()


def test_what_a_sensor_lacks_is_said_by_the_head_too(broker: str, tmp_path: Path) -> None:
    spec, data = vfl_spec(cycles=3, patience=0.2), tmp_path / "data"
    draw(data, 60, 5)
    with Threads(spec, broker, data, tmp_path, 4) as parties:
        parties.start("head", *spec.sensors)
        parties.until(lambda: "which lacks" in parties.said("head"))
        assert "lacks rows before product p0" in parties.said("head")


def test_a_broker_forgets_a_federation_that_nobody_runs_any_more_and_no_other(
    broker: str, tmp_path: Path
) -> None:
    spec, endpoint = vfl_spec(), Endpoint.parse(broker)
    draw(tmp_path / "data", 60, 7)
    kept = read_retained(endpoint, ["#"], 1.0)
    with Threads(spec, broker, tmp_path / "data", tmp_path, 2) as parties:
        parties.start("head")
        parties.until(lambda: bool(parties.said()))
        with pytest.raises(UsageError, match="already has"):
            remove_retained(endpoint, spec.federation)
        parties.start(*spec.sensors)
        parties.end()
    assert remove_retained(endpoint, spec.federation) == 6, (
        "settings, state, overview, and who was there"
    )
    assert read_retained(endpoint, ["#"], 1.0) == kept
    with pytest.raises(UsageError, match="nothing"):
        remove_retained(endpoint, spec.federation)


def test_with_kits_the_head_forgets_all_but_how_its_sensors_said_they_are(tmp_path: Path) -> None:
    """Nobody but they may write there."""
    spec = vfl_spec()
    draw(tmp_path / "data", 60, 8)
    with (
        # pytest's folders are closed to the user mosquitto
        tempfile.TemporaryDirectory() as passable,
        guarded(Path(passable), federation=spec.federation, nodes=spec.sensors) as broker,
    ):
        ends = {name: Endpoint.from_kit(kit) for name, kit in broker.kits.items()}
        with Threads(
            spec, {**ends, "head": ends["coordinator"]}, tmp_path / "data", tmp_path, 2
        ) as parties:
            parties.start("head", *spec.sensors)
            parties.end()
        assert remove_retained(ends["coordinator"], spec.federation) == 4, (
            "settings, state, overview, its own presence"
        )
        there = read_retained(
            ends["coordinator"],
            [each(spec.federation) for each in (topics.spec, topics.status)],
            1.0,
        )
        there |= read_retained(ends["coordinator"], [topics.presence(spec.federation, "+")], 1.0)
        assert there.keys() == {topics.presence(spec.federation, name) for name in spec.sensors}
        with pytest.raises(UsageError, match="nothing"):
            remove_retained(ends["coordinator"], spec.federation)
