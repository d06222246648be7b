"""Plants with names of their own for the classes, and with demands, come to a federation,
over a real broker.
"""

import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.numpy import load_file

from broker_config.broker.embedded import EmbeddedBroker
from broker_config.mqtt.client import MqttClient
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import encode
from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Encryption, RoundState, Spec
from tests.support.authority import Authority
from tests.support.plants import CLASSES, draw, here, load_images
from tests.support.terminal import Terminal
from tests.support.threaded_federation import same
from tests.support.waiting import PATIENCE
from trainer import progress
from trainer.federation.client import discovery
from trainer.federation.client.discovery import Joinable
from trainer.federation.client.join import join
from trainer.federation.server.coordinator.process import coordinate
from trainer.federation.server.ledger import Ledger
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate
from trainer.models.network import to_arrays
from trainer.training.personal_model import load_metadata, load_predictions

GERMAN = {"Einschluss": "inclusion", "Flecken": "patches", "Kratzer": "scratches"}


def drafted(**changes: Any) -> tuple[Spec, Any]:
    request = Request(
        "fedavg",
        model="small",
        weights="none",
        size=32,
        training={"local_epochs": 1},
        rounds=1,
        seed=7,
    )
    return draft(request, **{"federation": "steel", "classes": CLASSES, "nodes": 2, **changes})


def test_a_plant_with_german_folders_learns_the_same_by_the_federations_aliases_or_its_own(
    mosquitto: EmbeddedBroker, tmp_path: Path
) -> None:
    spec, broadcast = drafted(aliases={"Einschluss": "inclusion", "Flecken": "patches"})
    ours = draw(tmp_path / "images" / "a", 5, 1, ("Einschluss", "Flecken", "Kratzer"))
    theirs = draw(tmp_path / "images" / "b", 5, 2)
    endpoint, deadline = Endpoint.parse(mosquitto.url), time.monotonic() + PATIENCE
    told: list[str] = []

    def report(event: progress.AnyEvent) -> None:
        if isinstance(event, progress.Note):
            told.append(event.text)

    def late() -> bool:
        return time.monotonic() > deadline

    def coordinating() -> None:
        with Ledger(tmp_path / "coordinator") as ledger:
            assert coordinate(
                ledger, spec, broadcast, endpoint, progress.ignore, linger=0, stop=late
            )

    def joining(name: str, folder: Path, aliases: Mapping[str, str]) -> Path | None:
        return join(
            endpoint,
            name=name,
            folder=folder,
            test=None,
            state=tmp_path / name,
            federation="steel",
            telemetry=False,
            demands={},
            aliases=aliases,
            like=None,
            confirm=None,
            wait=60,
            report=report,
            stop=late,
        )

    with ThreadPoolExecutor(3) as pool:
        parts = [
            pool.submit(coordinating),
            pool.submit(joining, "a", ours, {"Kratzer": "scratches"}),
            pool.submit(joining, "b", theirs, {}),
        ]
        for part in parts:
            part.result(60)
    assert {
        "Einschluss is taught as inclusion (an alias of the federation)",
        "Flecken is taught as patches (an alias of the federation)",
        "Kratzer is taught as scratches (--alias)",
    } <= set(told)
    metadata, predictions = (
        load_metadata(tmp_path / "a" / "model"),
        load_predictions(tmp_path / "a" / "model"),
    )
    assert metadata.trained == dict.fromkeys(CLASSES, 5)
    assert {each.label for each in predictions} == set(CLASSES)
    for german, name in GERMAN.items():
        (ours / german).rename(ours / name)
    images = {"a": load_images(spec, ours), "b": load_images(spec, theirs)}
    simulated = simulate(spec, broadcast, images, compare=True)
    learnt = load_file(tmp_path / "a" / "model" / "personal.safetensors")
    assert same(learnt, to_arrays(simulated.models["a"].tensors)), (
        "what folders are called never reaches training"
    )


@pytest.mark.parametrize(
    ("aliases", "why"),
    [
        ({"patches": "scratches"}, "contradicts itself: the alias 'patches' is a class itself"),
        (
            {"Kratzer": "scratch"},
            "contradicts itself: 'Kratzer' is an alias of 'scratch', which is no class",
        ),
        ({"K\x1b[2Jratzer": "scratches"}, "cannot be read"),
    ],
)
def test_a_spec_with_false_aliases_is_refused(
    aliases: dict[str, str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, _ = drafted()
    payload = encode(spec).replace(b'"aliases":{}', b'"aliases":' + msgspec.json.encode(aliases))
    assert payload != encode(spec)
    retained = {topics.spec("steel"): payload}
    monkeypatch.setattr(discovery, "read_retained", lambda *_, **__: retained)
    with pytest.raises(UsageError, match=why) as caught:
        discovery.discover(
            Endpoint.parse("mqtt://nowhere"), None, 1, print, lambda: False, tmp_path
        )
    assert "\x1b" not in caught.value.what


def test_in_a_terminal_it_asks_once_and_remembers_the_answer(
    mosquitto: EmbeddedBroker, tmp_path: Path
) -> None:
    spec, _ = drafted()
    images = draw(tmp_path / "images", 1, 1, ("Kratzer", "patches"))
    gathering = RoundState(run=spec.run, round=0, status="gathering")
    client = MqttClient(
        Endpoint.parse(mosquitto.url), "coordinator", inbox=queue.Queue(), persistent=False
    ).open()
    client.publish(topics.spec("steel"), encode(spec), retain=True)
    client.publish(topics.round_state("steel"), encode(gathering), retain=True)
    assert client.flush(60)
    client.close()
    command = ("join", mosquitto.url, "--name", "a", "--data", images, "--state", tmp_path / "a")
    quiet = here(*command)
    assert (quiet.returncode, "--alias Kratzer=scratches" in quiet.stderr) == (2, True), (
        "nobody to ask: no guess"
    )
    first = Terminal(200, *command)
    first.read_until(
        r"^'Kratzer' is none of the federation's classes; perhaps scratches \(German for it\)$"
    )
    first.read_until(r"^Shall the images in Kratzer be taught as scratches\? \[y/N\]:$")
    first.type("y")
    first.read_until("^joining federation 'steel'.* of patches, scratches")
    first.process.kill()
    again = Terminal(200, *command)
    again.read_until("^joining federation 'steel'.* of patches, scratches")
    again.process.kill()
    assert re.search(
        r"^Kratzer is taught as scratches \(confirmed: .*aliases\.json\)$", again.text, re.MULTILINE
    )
    assert "[y/N]" not in again.text


def test_a_node_that_waits_in_a_run_goes_on_with_the_one_that_replaces_it(
    mosquitto: EmbeddedBroker, tmp_path: Path
) -> None:
    """What a broker keeps of an earlier run leads a node there;
    the coordinator comes back with another one.
    """
    endpoint, deadline = Endpoint.parse(mosquitto.url), time.monotonic() + PATIENCE
    images = {name: draw(tmp_path / "images" / name, 3, seed) for seed, name in enumerate("ab")}
    told: queue.Queue[str] = queue.Queue()
    stopped = threading.Event()

    def report(event: progress.AnyEvent) -> None:
        if isinstance(event, progress.NodeJoined):
            stopped.set()  # the first run waits for a second node, and ends here
        if isinstance(event, progress.Note):
            told.put(event.text)

    def late() -> bool:
        return time.monotonic() > deadline

    def coordinating(folder: str, stop: Callable[[], bool], watch: progress.Report) -> object:
        with Ledger(tmp_path / folder) as ledger:
            return coordinate(
                ledger, *drafted(federation="replaced"), endpoint, watch, linger=0, stop=stop
            )

    def joining(name: str) -> Path | None:
        return join(
            endpoint,
            name=name,
            folder=images[name],
            test=None,
            state=tmp_path / name,
            federation="replaced",
            telemetry=False,
            demands={},
            wait=60,
            report=report,
            stop=late,
        )

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(coordinating, "first", stopped.is_set, report)
        waiting = pool.submit(joining, "a")
        assert first.result(60) is None
        second = pool.submit(coordinating, "second", late, progress.ignore)
        other = pool.submit(joining, "b")
        assert second.result(60)
        assert waiting.result(60) == tmp_path / "a" / "model"
        assert other.result(60)
    assert any("new run of this federation" in each for each in told.queue)


@pytest.mark.parametrize(
    ("demands", "why"),
    [
        (
            {"images": "4"},
            "would tell more .* than it demands: it lacks 4 images of scratches, look-alikes",
        ),
        (
            {"images": "4", "nodes": "3"},
            r"4 images of scratches, .*; a quorum of 3 nodes \(it is 2\)",
        ),
        ({"images": "0"}, "cannot be met: Expected `int` >= 1"),
        ({"holders": "3"}, "nothing here can check .*: holders"),
        ({"images": "2", "mix": "4"}, "cannot be checked before anything leaves it: mix"),
        ({"images": "3", "nodes": "2"}, ""),
    ],
)
def test_a_plant_whose_sums_would_tell_more_than_it_demands_sends_none(
    demands: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ten images of each class but one, of which it has three."""
    refused_to_join("gaussian", demands, why, monkeypatch, tmp_path)


def test_a_demand_on_what_is_not_exchanged_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused_to_join(
        "fedavg", {"images": "2"}, "cannot be checked .*: images", monkeypatch, tmp_path
    )
    refused_to_join("fedavg", {"mix": "4"}, "cannot be checked .*: mix", monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("is_masked", "masked", "why"),
    [
        (
            False,
            "1",
            r"can be read by itself, or in a sum of fewer than the 1 that it demands \(it is 0\)",
        ),
        (True, "3", r"fewer than the 3 that it demands \(it is 2\)"),
        (True, "x", "cannot be met: Expected `int`"),
        (True, "2", ""),
        (False, "0", ""),
    ],
)
def test_a_plant_can_demand_that_its_contribution_is_read_in_sums_of_so_many_alone(
    is_masked: bool, masked: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused_to_join(
        "fedavg", {"masked": masked}, why, monkeypatch, tmp_path, nodes=3, is_masked=is_masked
    )


@pytest.mark.parametrize(
    ("encryption", "has_kit", "is_told"),
    [("none", True, True), ("group", True, False), ("none", False, False)],
)
def test_a_plant_with_a_kit_hears_before_anything_leaves_it_that_the_broker_can_read_what_is_learnt(
    encryption: Encryption,
    has_kit: bool,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Without a kit nobody expects otherwise."""
    said: list[progress.AnyEvent] = []
    signer = Authority("steel").signers()["plant-a"] if has_kit else None
    monkeypatch.setattr(
        "trainer.federation.client.join.discover",
        lambda *_, **__: Joinable(drafted(encryption=encryption)[0], finished=False),
    )

    def connect(*_: object) -> None:
        raise JoinedError

    monkeypatch.setattr("trainer.federation.client.join.check_name_free", connect)
    with pytest.raises(JoinedError):
        join(
            replace(Endpoint.parse("mqtt://127.0.0.1:9"), signer=signer),
            name="plant-a",
            folder=draw(tmp_path / "images", 10, 1),
            test=None,
            state=tmp_path / "a",
            federation="steel",
            telemetry=False,
            demands={},
            wait=0,
            report=said.append,
        )
    notes = [event.text for event in said if isinstance(event, progress.Note)]
    assert any("signed, but not encrypted" in text for text in notes) == is_told


class JoinedError(Exception):
    """The node has come to where it connects."""


def refused_to_join(
    method: str,
    demands: dict[str, str],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    nodes: int = 2,
    *,
    is_masked: bool = False,
) -> None:
    request = Request(method, model="small", weights="none", size=32, secure_aggregation=is_masked)
    spec, _ = draft(request, federation="steel", classes=CLASSES, nodes=nodes)

    def connect(*_: object) -> None:
        raise JoinedError

    monkeypatch.setattr(
        "trainer.federation.client.join.discover", lambda *_, **__: Joinable(spec, finished=False)
    )
    monkeypatch.setattr("trainer.federation.client.join.check_name_free", connect)
    images = folder / "images"
    if not images.exists():
        draw(images, 10, 1)
        for path in sorted((images / "scratches").iterdir())[3:]:
            path.unlink()
    with pytest.raises(UsageError if why else JoinedError, match=why or None):
        join(
            Endpoint.parse("mqtt://127.0.0.1:9"),
            name="a",
            folder=images,
            test=None,
            state=folder / "a",
            federation="steel",
            telemetry=False,
            demands=demands,
            wait=0,
            report=progress.ignore,
        )
