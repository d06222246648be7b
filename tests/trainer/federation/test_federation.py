"""A federation of real processes over real brokers."""

import json
import os
import queue
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.numpy import load_file

from broker_config.broker.embedded import start_broker
from broker_config.mqtt.client import MqttClient, read_retained
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import encode
from broker_config.protocol.messages import Aggregation, Head, RoundState, Spec
from tests.support.method_cases import slow_except
from tests.support.paths import REPOSITORY
from tests.support.plants import (
    CLASSES,
    FEDERATION,
    Process,
    draw,
    drawn_weights,
    federate,
    federation_of,
    here,
    load_images,
    start,
    wait_for,
)
from tests.support.secured_mosquitto import Secured
from tests.support.waiting import PATIENCE, wait_until
from trainer import progress
from trainer.federation.client.session import take_part
from trainer.federation.server.coordinator import process as coordinator
from trainer.federation.server.coordinator.process import coordinate
from trainer.federation.server.ledger import Ledger
from trainer.federation.server.spec import Request, draft, trains
from trainer.federation.simulation import simulate
from trainer.models.named_tensors import Arrays
from trainer.models.network import to_arrays
from trainer.progress import timeline
from trainer.training.personal_model import load_metadata

PLANTS = ("plant-a", "plant-b", "plant-c")


@pytest.fixture(scope="module")
def plants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three plants with 30 images each; two know two of the three classes."""
    folder = tmp_path_factory.mktemp("plants")
    known = (CLASSES, CLASSES[:2], CLASSES[1:])
    return {name: draw(folder / name, 10, seed, known[seed]) for seed, name in enumerate(PLANTS)}


def request(method: str, rule: Any, weights: str = "", head: Any = "trained") -> Request:
    asked = Request(
        method,
        model="small",
        weights=weights,
        size=32,
        seed=7,
        aggregate=rule,
        head=head,
        codec=None,
    )
    return (
        asked._replace(rounds=2) if trains(asked) else asked._replace(training={"local_epochs": 1})
    )


def drafted(asked: Request, name: str, nodes: int) -> tuple[Spec, Arrays]:
    """A robust rule leaves out nobody here: three nodes stand no liar."""
    if asked.aggregate != "multi_krum":
        return draft(asked, federation=name, classes=CLASSES, nodes=nodes)
    spec, broadcast = draft(
        asked._replace(aggregate="mean"), federation=name, classes=CLASSES, nodes=nodes
    )
    return msgspec.structs.replace(spec, aggregation=Aggregation("multi_krum")), broadcast


def simulated(
    plants: dict[str, Path],
    method: str,
    *,
    rule: str | None = None,
    weights: str = "",
    head: str = "trained",
) -> dict[str, bytes]:
    """The same federation in this process, without a broker: tensors by `who/name`."""
    asked = request(method, rule, weights, head)
    spec, broadcast = drafted(asked, "default", len(plants))
    images = {name: load_images(spec, folder) for name, folder in plants.items()}
    outcome = simulate(spec, broadcast, images, compare=True)
    found = {f"global/{name}": value.tobytes() for name, value in outcome.broadcast.items()}
    for node, model in outcome.models.items():
        found |= {
            f"{node}/{name}": value.tobytes() for name, value in to_arrays(model.tensors).items()
        }
    return found


def on_disk(folder: Path) -> dict[str, bytes]:
    """What the processes left, likewise."""
    found = {
        f"global/{n}": v.tobytes()
        for n, v in load_file(folder / "coordinator/global.safetensors").items()
    }
    for path in sorted(folder.glob("*/model/personal.safetensors")):
        node, tensors = path.parent.parent.name, load_file(path)
        found |= {f"{node}/{name}": value.tobytes() for name, value in tensors.items()}
    return found


def agree(left: dict[str, bytes], simulated: dict[str, bytes]) -> None:
    assert left.keys() == simulated.keys()
    assert [name for name in simulated if left[name] != simulated[name]] == []


@pytest.fixture(scope="module")
def processes(plants: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a federation of processes has left: one told its rounds as JSON."""
    folder = tmp_path_factory.mktemp("processes")
    with start_broker(folder / "broker", kind="mosquitto") as broker:
        federate(broker.url, plants, folder / "run", **{"plant-a": ("--json",)})
    return folder / "run"


def test_processes_over_a_broker_end_with_the_same_bytes_as_the_simulation(
    processes: Path, plants: dict[str, Path]
) -> None:
    agree(on_disk(processes), simulated(plants, "afedcl", weights=str(drawn_weights())))


def test_a_node_tells_its_rounds_as_events_and_its_model_as_the_last(processes: Path) -> None:
    events = [json.loads(line) for line in (processes / "plant-a.log").read_text().splitlines()]
    assert events[-1] == {"event": "Result", "result": {"model": str(processes / "plant-a/model")}}
    story = [
        (each["event"], each.get("round"))
        for each in events
        if each["event"] not in ("Step", "Note", "Activity")
    ]
    rounds = [
        (event, number)
        for number in (1, 2)
        for event in ("RoundOpened", "Received", "Contribution", "Measured", "RoundClosed")
    ]
    start, middle, finish = story[0], story[1:-2], story[-2]
    assert (start, finish) == (("Gathering", None), ("FederationFinished", None))
    assert sorted(middle) == sorted(rounds)
    assert [each for each in middle if each[0].startswith("Round")] == [
        (event, number) for number in (1, 2) for event in ("RoundOpened", "RoundClosed")
    ]
    doing = [each["what"] for each in events if each["event"] == "Activity"]
    assert {"waiting", "receiving", "training", "judging"} <= set(doing)
    finished = events[-2]
    closed = [each for each in events if each["event"] == "RoundClosed"]
    assert finished["bytes_up"] == sum(each["bytes_up"] for each in closed) > 0
    assert finished["bytes_down"] == sum(each["bytes_down"] for each in closed) > 0


@pytest.fixture(scope="module")
def exchange(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A mosquitto for federations one after the other."""
    with start_broker(tmp_path_factory.mktemp("exchange"), kind="mosquitto") as broker:
        yield broker.url


def in_threads(
    endpoint: Endpoint,
    method: str,
    plants: dict[str, Path],
    folder: Path,
    rule: str | None = None,
    head: str = "trained",
) -> None:
    """The sessions of nodes and coordinator, here in threads:
    processes would above all import torch.
    """
    asked = request(method, rule, head=head)
    spec, broadcast = drafted(asked, folder.name, len(plants))
    deadline, gathering = time.monotonic() + PATIENCE, threading.Event()

    def late() -> bool:
        return time.monotonic() > deadline

    def coordinating() -> None:
        with Ledger(folder / "coordinator") as ledger:
            ended = coordinate(
                ledger, spec, broadcast, endpoint, lambda event: gathering.set(), stop=late
            )
            assert ended is not None
            ledger.save_result()

    def join(name: str) -> Path | None:
        images = load_images(spec, plants[name])
        gathering.wait(60)
        return take_part(
            spec,
            name,
            images,
            endpoint,
            folder / name,
            telemetry=False,
            report=progress.ignore,
            stop=late,
        )

    with ThreadPoolExecutor(1 + len(plants)) as pool:
        jobs = [pool.submit(coordinating), *(pool.submit(join, name) for name in plants)]
    assert all(job.exception() is None for job in jobs), [job.exception() for job in jobs]


@pytest.fixture(scope="module")
def two(plants: dict[str, Path]) -> dict[str, Path]:
    return {name: plants[name] for name in PLANTS[:2]}


@pytest.mark.parametrize("method", slow_except(("afedcl", "afedcl_plus")))
def test_every_method_exchanges_the_same_bytes_over_a_broker_as_in_the_simulation(
    method: str, exchange: str, two: dict[str, Path], tmp_path: Path
) -> None:
    in_threads(Endpoint.parse(exchange), method, two, tmp_path)
    agree(on_disk(tmp_path), simulated(two, method))


@pytest.mark.slow
def test_so_does_a_head_of_statistics_on_a_trained_encoder(
    exchange: str, plants: dict[str, Path], tmp_path: Path
) -> None:
    in_threads(Endpoint.parse(exchange), "afedcl", plants, tmp_path, head="statistics")
    agree(on_disk(tmp_path), simulated(plants, "afedcl", head="statistics"))


@pytest.mark.parametrize(
    "rule", slow_except(("clipped_mean",), ("clipped_mean", "mean", "multi_krum"))
)
def test_so_does_every_kind_of_rule(
    rule: str, exchange: str, plants: dict[str, Path], tmp_path: Path
) -> None:
    """By default weights and updates are limited;
    with three nodes the median is another than the largest.
    """
    in_threads(Endpoint.parse(exchange), "afedcl", plants, tmp_path, rule=rule)
    found = simulated(plants, "afedcl", rule=rule)
    agree(on_disk(tmp_path), found)
    assert (found == simulated(plants, "afedcl")) == (rule == "clipped_mean")


@pytest.fixture(scope="module")
def averaged(two: dict[str, Path]) -> dict[str, bytes]:
    return simulated(two, "fedavg")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["128 KB packets", "amqtt"])
def test_other_brokers_make_no_difference(
    kind: str, two: dict[str, Path], averaged: dict[str, bytes], tmp_path: Path
) -> None:
    """A blob of 240 kB passes a broker that allows 128 KB a packet,
    and one that speaks MQTT 3.1.1 only.
    """
    broker = (
        start_broker(tmp_path / "broker", kind="amqtt")
        if kind == "amqtt"
        else start_broker(tmp_path / "broker", kind="mosquitto", max_packet=128 * 1024)
    )
    with broker:
        in_threads(Endpoint.parse(broker.url), "fedavg", two, tmp_path)
    agree(on_disk(tmp_path), averaged)


@pytest.mark.parametrize("scheme", ["mqtts", pytest.param("wss", marks=pytest.mark.slow)])
def test_a_federation_over_encrypted_connections(
    scheme: str,
    secured: Secured,
    two: dict[str, Path],
    averaged: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks are small: mosquitto 2.0.11 takes tenths of a second for a longer message over a
    websocket.
    """
    url = f"{scheme}://127.0.0.1:{secured.tls if scheme == 'mqtts' else secured.wss}"
    monkeypatch.setattr(coordinator, "CHUNK", 3 * 1024)
    in_threads(Endpoint.parse(url, ca=secured.authority.ca), "fedavg", two, tmp_path)
    agree(on_disk(tmp_path), averaged)


# Statistics


SUMS = (
    "--model",
    "small",
    "--size",
    "32",
    "--seed",
    "7",
    "--method",
    "gaussian",
    "--training",
    "local_epochs=1",
)


@pytest.mark.slow
def test_sums_over_a_broker_end_with_the_same_bytes_though_a_node_is_killed(
    plants: dict[str, Path], tmp_path: Path
) -> None:
    """The coordinator has no torch.

    A node is killed after the round for sums has opened, before it can close.
    """
    (tmp_path / "torch.py").write_text("raise ImportError('this machine has none')")
    without_torch = os.pathsep.join([str(tmp_path), str(REPOSITORY)])

    def join(name: str, log: str) -> Process:
        return start(
            "join",
            broker.url,
            "--name",
            name,
            "--data",
            plants[name],
            "--state",
            tmp_path / name,
            log=tmp_path / log,
        )

    with start_broker(tmp_path / "broker", kind="mosquitto") as broker:
        processes = [
            start(
                "coordinate",
                broker.url,
                "--classes",
                ",".join(CLASSES),
                "--nodes",
                3,
                *SUMS,
                "--weights",
                drawn_weights(),
                "--state",
                tmp_path / "coordinator",
                log=tmp_path / "coordinator.log",
                PYTHONPATH=without_torch,
            )
        ]
        try:
            stopped = join("plant-c", "plant-c.log")
            processes.append(stopped)
            wait_for(tmp_path / "coordinator.log", "plant-c joined")
            stopped.send_signal(signal.SIGSTOP)
            killed = join("plant-b", "killed.log")
            processes += [killed, join("plant-a", "plant-a.log")]
            wait_for(tmp_path / "plant-b" / timeline.FILE, '"activity":"training"')
            killed.kill()
            assert killed.wait(60) == -signal.SIGKILL
            stopped.send_signal(signal.SIGCONT)
            processes.append(join("plant-b", "plant-b.log"))
            assert [each.wait(60) for each in processes if each is not killed] == [0] * 4
        finally:
            for process in processes:
                process.kill()
    agree(on_disk(tmp_path), simulated(plants, "gaussian", weights=str(drawn_weights())))
    assert "sums of 3 nodes, no training" in (tmp_path / "coordinator.log").read_text()


@pytest.mark.parametrize(("method", "head"), [("afedcl_plus", "trained"), ("fedavg", "statistics")])
@pytest.mark.slow
def test_a_head_of_statistics_is_made_after_training_by_processes_as_in_the_simulation(
    method: str, head: Head, two: dict[str, Path], tmp_path: Path
) -> None:
    """With `afedcl_plus` one is made before training too."""
    with start_broker(tmp_path / "broker", kind="mosquitto") as broker:
        federate(broker.url, two, tmp_path / "run", "--method", method, "--head", head)
    agree(
        on_disk(tmp_path / "run"), simulated(two, method, weights=str(drawn_weights()), head=head)
    )


def test_a_model_can_be_exported_while_others_are_still_to_train(
    two: dict[str, Path], tmp_path: Path
) -> None:
    """And the node that is killed then has the same one."""
    with start_broker(tmp_path / "broker", kind="mosquitto") as broker:
        run = tmp_path / "run"
        processes = federation_of(broker.url, two, run, "--method", "afedcl_plus", "--rounds", "50")
        try:
            for name in two:
                wait_for(run / f"{name}.log", "a model is ready")
            processes["plant-b"].kill()
            models = [run / name / "model" for name in two]
            done = here("export", *models, "--out", tmp_path / "bundles")
            assert done.returncode == 0, done.stderr
            running = [processes[name].poll() for name in ("coordinator", "plant-a")]
            assert running == [None, None]
        finally:
            for process in processes.values():
                process.kill()
    bundles = sorted(path.name for path in (tmp_path / "bundles").iterdir())
    assert len(bundles) == 2
    for path in models:
        assert load_metadata(path).metrics["images"] == load_metadata(path).metrics["groups"] > 0


@pytest.mark.slow
def test_a_killed_node_is_named_and_the_federation_goes_on_when_it_is_back(
    two: dict[str, Path], tmp_path: Path
) -> None:
    with start_broker(tmp_path / "broker") as broker:
        coordinator = start(
            "coordinate",
            broker.url,
            "--classes",
            ",".join(CLASSES),
            "--nodes",
            2,
            "--state",
            tmp_path / "coordinator",
            *FEDERATION,
            "--rounds",
            6,
            log=tmp_path / "coordinator.log",
        )
        nodes = {
            name: start(
                "join",
                broker.url,
                "--name",
                name,
                "--data",
                folder,
                "--state",
                tmp_path / name,
                log=tmp_path / f"{name}.log",
            )
            for name, folder in two.items()
        }
        try:
            wait_for(tmp_path / "coordinator.log", "round 1 closed")
            # which may take longer
            wait_for(tmp_path / "plant-b" / timeline.FILE, '"activity":"refining"')
            nodes["plant-b"].send_signal(signal.SIGKILL)
            killed = time.time()
            wait_for(tmp_path / "coordinator.log", "plant-b is gone")
            assert "waits for plant-b" in wait_for(tmp_path / "coordinator.log", "waits for")
            assert coordinator.poll() is None
            nodes["plant-b"] = start(
                "join",
                broker.url,
                "--name",
                "plant-b",
                "--data",
                two["plant-b"],
                "--state",
                tmp_path / "plant-b",
                log=tmp_path / "again.log",
            )
            assert [process.wait(60) for process in (coordinator, *nodes.values())] == [0, 0, 0]
            run_ = load_metadata(tmp_path / "plant-b" / "model").run
            spans = timeline.read_spans(tmp_path / "plant-b", run_)
            assert {span.round for span in spans if span.activity == "refining"} >= {1, 6}
            assert not [span for span in spans if span.begin < killed < span.end]
        finally:
            for process in (coordinator, *nodes.values()):
                process.kill()


def test_a_plant_that_owns_ten_images_is_cross_validated(tmp_path: Path) -> None:
    request = Request("fedavg", model="small", size=32, rounds=1)
    spec, broadcast = draft(request, federation="few", classes=CLASSES[:2], nodes=1)
    images = load_images(spec, draw(tmp_path / "images", 5, 0, CLASSES[:2]))
    metrics = simulate(spec, broadcast, {"plant-a": images}).models["plant-a"].metadata.metrics
    assert metrics["cross_validated"] == 1
    assert metrics["images"] == 10
    assert metrics["accuracy_low"] <= metrics["accuracy"] <= metrics["accuracy_high"]


@pytest.mark.slow
def test_stage_2_runs_while_the_upload_is_under_way_and_the_journal_tells_who_contributed(
    two: dict[str, Path], tmp_path: Path
) -> None:
    """The contribution of each node is summed before the node has finished its (long) stage 2."""
    told = dict.fromkeys(two, ("--telemetry",))
    with start_broker(tmp_path / "broker") as broker:
        federate(
            broker.url, two, tmp_path / "run", "--option", "refine_epochs=40", "--json", **told
        )
    lines = (tmp_path / "run/coordinator.log").read_text().splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    of_nodes = [event for event in events if event["event"] in ("Contribution", "Measured")]
    for plant in two:
        in_round = [
            event["event"] for event in of_nodes if (event["round"], event["node"]) == (1, plant)
        ]
        assert in_round == ["Contribution", "Measured"]
    history = [
        json.loads(line)
        for line in here("rounds", tmp_path / "run/coordinator", "--json").stdout.splitlines()
    ]
    assert [line["round"] for line in history] == [1, 2]
    weights = {
        event["node"]: event["weight"]
        for event in events
        if event["event"] == "Contribution" and event["round"] == 1
    }
    assert history[0]["weights"] == weights
    assert "no journal" in refused("rounds", tmp_path)


@pytest.mark.slow
def test_nodes_of_an_earlier_run_take_part_in_the_next(
    two: dict[str, Path], tmp_path: Path
) -> None:
    """The broker has kept messages of the first run, and of one that was stopped in between,
    for the nodes.
    """
    with start_broker(tmp_path / "broker", kind="mosquitto") as broker:
        federate(broker.url, two, tmp_path / "run", "--rounds", "1")
        stopped = start(
            "coordinate",
            broker.url,
            "--classes",
            ",".join(CLASSES),
            "--nodes",
            2,
            "--state",
            tmp_path / "stopped",
            *FEDERATION,
            log=tmp_path / "stopped.log",
        )
        wait_for(tmp_path / "stopped.log", "waiting for 2 nodes")
        stopped.terminate()
        assert stopped.wait(60) == 130
        ended = here("abort", broker.url, "--state", tmp_path / "stopped", "--reason", "a trial")
        assert "aborted" in ended.stdout, ended.stderr
        (tmp_path / "run" / "coordinator").rename(tmp_path / "first")
        federate(broker.url, two, tmp_path / "run", "--rounds", "1")
    said = (tmp_path / "run" / "plant-a.log").read_text()
    assert "not connected" not in said
    assert "ignored" not in said
    assert re.search(
        r"accuracy \d+\.\d% \(\d+% to \d+%, 95 % interval\) on 6 held-out images",
        said,
    )


def test_a_coordinator_that_is_started_again_goes_on_with_what_was_left_open(
    tmp_path: Path,
) -> None:
    """As a run that began with the defaults of an earlier version;
    but not against what it is told.
    """
    log, earlier = (
        tmp_path / "log",
        (
            "--method",
            "fedavg",
            "--model",
            "small",
            "--aggregate",
            "mean",
            "--codec",
            "none",
            "--privacy",
            "epsilon=3",
        ),
    )
    with start_broker(tmp_path / "broker") as broker:
        command = (
            "coordinate",
            broker.url,
            "--classes",
            ",".join(CLASSES),
            "--nodes",
            2,
            "--size",
            32,
            "--weights",
            drawn_weights(),
            "--state",
            tmp_path / "state",
        )
        for more in (earlier, ()):
            coordinator = start(*command, *more, log=log)
            wait_for(log, "waiting for 2 nodes")
            coordinator.terminate()
            assert coordinator.wait(60) == 130
        refused = here(*command, "--codec", "int4")
    assert "other settings: codec" in refused.stderr


@pytest.mark.slow
def test_what_others_retain_and_nobody_can_read_stops_neither_coordinator_nor_nodes(
    plants: dict[str, Path], tmp_path: Path
) -> None:
    """Garbage as the presence of both before they start,
    as the round of a federation to join, as the spec later on.
    """
    round_, spec, garbage = topics.round_state("default"), topics.spec("default"), b"\xff\x00{"
    with start_broker(tmp_path / "broker", kind="mosquitto") as broker:
        endpoint = Endpoint.parse(broker.url)

        def join(name: str, *more: object) -> Process:
            return start(
                "join",
                broker.url,
                "--name",
                name,
                "--data",
                plants[name],
                "--state",
                tmp_path / name,
                *more,
                log=tmp_path / f"{name}.log",
            )

        def retain(payloads: dict[str, bytes]) -> None:
            for topic, payload in payloads.items():
                mqtt.publish(topic, payload, retain=True)
            mqtt.flush(60)

        processes = []
        with MqttClient(endpoint, "third-party", inbox=queue.Queue(), persistent=False) as mqtt:
            retain(
                dict.fromkeys(
                    (topics.presence("default", name) for name in ("coordinator", "plant-a")),
                    garbage,
                )
            )
            try:
                processes = [
                    start(
                        "coordinate",
                        broker.url,
                        "--classes",
                        ",".join(CLASSES),
                        "--nodes",
                        2,
                        *FEDERATION,
                        "--state",
                        tmp_path / "coordinator",
                        log=tmp_path / "coordinator.log",
                    )
                ]
                wait_for(tmp_path / "coordinator.log", "waiting for 2 nodes")
                told = read_retained(endpoint, [round_, spec], wait=1.0)
                retain({round_: garbage})
                assert join("plant-a", "--wait", 0).wait(60) == 2
                said = (tmp_path / "plant-a.log").read_text()
                assert f"ignored an unreadable message on {round_}" in said
                assert "no coordinator appeared" in said
                retain({round_: told[round_]})
                processes.append(join("plant-a"))
                wait_for(tmp_path / "coordinator.log", "plant-a joined")
                retain({spec: garbage})
                mqtt.publish(round_, encode(RoundState(run="0" * 16, round=0, status="gathering")))
                wait_for(tmp_path / "plant-a.log", f"ignored an unreadable message on {spec}")
                retain({spec: told[spec]})
                processes.append(join("plant-b"))
                assert [process.wait(60) for process in processes] == [0, 0, 0]
            finally:
                for process in processes:
                    process.kill()


def test_ctrl_c_while_waiting_for_a_coordinator_ends_quietly(
    plants: dict[str, Path], tmp_path: Path
) -> None:
    with start_broker(tmp_path / "broker") as broker:
        node = start(
            "join", broker.url, "--name", "a", "--data", plants["plant-a"], log=tmp_path / "log"
        )
        wait_for(tmp_path / "log", "waiting for its coordinator")
        node.terminate()
        assert node.wait(60) == 130
    assert "What to do" not in (tmp_path / "log").read_text()


# What a node is told when it cannot take part


@pytest.fixture(scope="module")
def gathering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker with a coordinator that waits for two nodes."""
    folder = tmp_path_factory.mktemp("gathering")
    with start_broker(folder / "broker") as broker:
        coordinator = start(
            "coordinate",
            broker.url,
            "--classes",
            ",".join(CLASSES),
            "--nodes",
            2,
            "--state",
            folder / "coordinator",
            *FEDERATION,
            log=folder / "coordinator.log",
        )
        try:
            wait_for(folder / "coordinator.log", "waiting for 2 nodes")
            yield broker.url
        finally:
            coordinator.terminate()
            assert coordinator.wait(60) == 130
            retained = read_retained(
                Endpoint.parse(broker.url), [topics.round_state("default")], wait=1.0
            )
            # suspended: nodes may wait for it
            assert b"gathering" in retained[topics.round_state("default")]


def refused(*arguments: object) -> str:
    """The message of a command that must fail without a traceback."""
    result = here(*arguments)
    assert result.returncode not in (0, 130), result.stdout
    assert "Traceback" not in result.stderr
    assert "What to do:" in result.stderr
    return result.stderr


@pytest.mark.slow
def test_an_unreachable_broker(plants: dict[str, Path], tmp_path: Path) -> None:
    said = refused(
        "join",
        "mqtt://127.0.0.1:9",
        "--name",
        "a",
        "--data",
        plants["plant-a"],
        "--state",
        tmp_path / "s",
    )
    assert "127.0.0.1:9" in said


def test_a_url_that_is_none(plants: dict[str, Path]) -> None:
    assert "mqtt" in refused("join", "http://localhost", "--name", "a", "--data", plants["plant-a"])


def test_a_broker_without_a_coordinator(plants: dict[str, Path], tmp_path: Path) -> None:
    with start_broker(tmp_path / "broker") as broker:
        said = refused(
            "join",
            broker.url,
            "--name",
            "a",
            "--data",
            plants["plant-a"],
            "--wait",
            "0",
            "--state",
            tmp_path / "s",
        )
    assert "edge-node coordinate" in said


@pytest.mark.parametrize("name", ["plant/a", "", "coordinator", "#"])
def test_a_name_that_cannot_be_used(
    name: str, gathering: str, plants: dict[str, Path], tmp_path: Path
) -> None:
    assert "name" in refused(
        "join", gathering, "--name", name, "--data", plants["plant-a"], "--state", tmp_path / "s"
    )


def test_a_name_that_is_taken(gathering: str, plants: dict[str, Path], tmp_path: Path) -> None:
    first = start(
        "join",
        gathering,
        "--name",
        "a",
        "--data",
        plants["plant-a"],
        "--state",
        tmp_path / "1",
        log=tmp_path / "1.log",
    )
    try:
        presence = topics.presence("default", "a")
        here = Endpoint.parse(gathering)
        wait_until(
            lambda: b'"online":true' in read_retained(here, [presence], wait=0.5).get(presence, b"")
        )
        for state, reason in (("1", f"is used by process {first.pid}"), ("2", "taken")):
            said = refused(
                "join",
                gathering,
                "--name",
                "a",
                "--data",
                plants["plant-b"],
                "--state",
                tmp_path / state,
            )
            assert reason in said
        assert first.poll() is None
        assert not (tmp_path / "2").exists()
    finally:
        first.terminate()
        assert first.wait(60) == 130


def test_a_second_coordinator_of_the_same_federation(gathering: str, tmp_path: Path) -> None:
    said = refused(
        "coordinate",
        gathering,
        "--classes",
        "a,b",
        "--nodes",
        2,
        "--model",
        "small",
        "--state",
        tmp_path / "s",
    )
    assert "already has a coordinator" in said


def test_folders_that_cannot_train(gathering: str, plants: dict[str, Path], tmp_path: Path) -> None:
    def said(folder: Path, *more: object) -> str:
        return refused(
            "join", gathering, "--name", "x", "--data", folder, "--state", tmp_path / "state", *more
        )

    assert "does not exist" in said(tmp_path / "nowhere")
    assert "--alias scratch=scratches" in said(
        draw(tmp_path / "misnamed", 3, 0, ("patches", "scratch"))
    )
    broken = draw(tmp_path / "broken", 3, 0)
    (broken / "patches" / "0-1.png").write_bytes(b"no image")
    assert "0-1.png" in said(broken)
    twins = draw(tmp_path / "twins", 3, 0)
    (twins / "patches" / "twin.png").write_bytes((twins / "scratches" / "0-0.png").read_bytes())
    assert "two classes" in said(twins)
    assert "both the training and the held-out" in said(
        plants["plant-a"], "--test", plants["plant-a"]
    )


def test_a_spec_that_the_node_cannot_meet_and_a_version_that_it_does_not_speak(
    plants: dict[str, Path], tmp_path: Path
) -> None:
    spec, _ = draft(Request(model="small"), federation="default", classes=CLASSES, nodes=2)
    state = encode(RoundState(run=spec.run, round=0, status="gathering"))
    with start_broker(tmp_path / "broker") as broker:
        mqtt = MqttClient(
            Endpoint.parse(broker.url), "foreign", inbox=queue.Queue(), persistent=False
        )
        with mqtt:
            mqtt.publish("edge-node/v9/default/spec", b"{}", retain=True)
            mqtt.flush(60)
            join = (
                "join",
                broker.url,
                "--name",
                "a",
                "--data",
                plants["plant-a"],
                "--state",
                tmp_path / "s",
                "--wait",
                0,
            )
            assert "edge-node/v9" in refused(*join)
            mqtt.publish(topics.round_state("default"), state, retain=True)
            for field, value in (("method", "fedfuture"), ("model", "vit_9000")):
                mqtt.publish(
                    topics.spec("default"),
                    encode(msgspec.structs.replace(spec, **{field: value})),
                    retain=True,
                )
                mqtt.flush(60)
                assert value in refused(*join)
            mqtt.publish(topics.spec("default"), b'{"type":"Spec","rounds":"many"}', retain=True)
            mqtt.flush(60)
            assert "cannot be read" in refused(*join)


@pytest.mark.slow
def test_a_node_that_the_coordinator_refuses_leaves_no_state_folder(
    plants: dict[str, Path], tmp_path: Path
) -> None:
    with start_broker(tmp_path / "broker") as broker:
        coordinator = start(
            "coordinate",
            broker.url,
            "--classes",
            ",".join(CLASSES),
            "--nodes",
            1,
            "--state",
            tmp_path / "coordinator",
            *FEDERATION,
            "--rounds",
            1000,
            log=tmp_path / "coordinator.log",
        )
        first = start(
            "join",
            broker.url,
            "--name",
            "a",
            "--data",
            plants["plant-a"],
            "--state",
            tmp_path / "a",
            log=tmp_path / "a.log",
        )
        try:
            wait_for(tmp_path / "coordinator.log", "a joined")
            said = refused(
                "join",
                broker.url,
                "--name",
                "b",
                "--data",
                plants["plant-b"],
                "--state",
                tmp_path / "b",
            )
            assert "the federation is full" in said
            assert not (tmp_path / "b").exists()
        finally:
            for process in (first, coordinator):
                process.terminate()
                process.wait(60)
