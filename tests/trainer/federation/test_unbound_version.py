"""Members of this version beside such of the version before masks and noise were bound to the spec.

The others are played from a recording: see `tests.support.recorded_version`.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker_config.broker.embedded import EmbeddedBroker
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import REVISION, Hello, Spec
from tests.support.authority import Authority
from tests.support.plants import CLASSES, draw
from tests.support.recorded_version import (
    NODE,
    RecordedCoordinator,
    RecordedNode,
    read_recorded,
)
from tests.support.threaded_federation import PLANTS, Federation, end_all
from tests.support.tiny_encoder import NAME, register_tiny_encoder
from tests.support.waiting import wait_until
from trainer import progress
from trainer.federation.client.discovery import discover
from trainer.federation.server.coordinator.process import Outcome
from trainer.federation.server.spec import Participation, Request, draft


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    register_tiny_encoder(monkeypatch.setitem)


def found(broker: EmbeddedBroker, folder: Path, name: str, **settings: Any) -> Federation:
    """Found a federation with the recorded run's name and settings."""
    plants = {
        name: draw(folder / "plants" / name, 8, seed, size=16) for seed, name in enumerate(PLANTS)
    }
    return Federation(
        Endpoint.parse(broker.url),
        plants,
        folder,
        name,
        1,
        Participation(),
        "fedavg",
        model=NAME,
        **settings,
    )


def begin_recorded(federation: Federation) -> None:
    """Let a federation of this version have the recorded run's id, which all messages bear."""
    run = recorded_spec(federation.spec.federation).run
    federation.spec = msgspec.structs.replace(federation.spec, run=run)


def recorded_spec(name: str) -> Spec:
    return msgspec.json.decode(read_recorded(f"{name}/spec.json"), type=Spec)


@pytest.mark.parametrize("name", ["open", "private", "masked"])
def test_the_recorded_version_knew_no_revision(name: str) -> None:
    assert b"revision" not in read_recorded(f"{name}/hello.json")
    assert b"revision" not in read_recorded(f"{name}/spec.json")
    assert msgspec.json.decode(read_recorded(f"{name}/hello.json"), type=Hello).revision == 0


def test_an_older_node_takes_part_where_nothing_is_hidden(
    mosquitto: EmbeddedBroker, tmp_path: Path
) -> None:
    federation = found(mosquitto, tmp_path, "open")
    begin_recorded(federation)
    assert federation.spec.revision == REVISION
    coordinator = federation.coordinator()
    node = RecordedNode(mosquitto.url, "open")
    others = [federation.node(name) for name in PLANTS if name != NODE]
    with node.playing():
        end_all([coordinator, *others])
    assert isinstance(coordinator.end(), Outcome)
    assert federation.contributors() == [{*PLANTS}]
    kinds = {each["type"] for each in node.heard}
    assert {"Welcome", "Accepted"} <= kinds
    assert "Refusal" not in kinds


def test_a_node_takes_part_with_an_older_coordinator_where_nothing_is_hidden(
    mosquitto: EmbeddedBroker, tmp_path: Path
) -> None:
    federation = found(mosquitto, tmp_path, "open")
    coordinator = RecordedCoordinator(mosquitto.url, "open")
    with coordinator.playing():
        federation.spec = look(mosquitto, "open", tmp_path)
        assert federation.spec.revision == 0
        model = federation.node(NODE).end()
    assert model == tmp_path / NODE / "model"
    kinds = [each["type"] for each in coordinator.heard]
    assert "Contribution" in kinds
    assert "Finished" in kinds


def look(broker: EmbeddedBroker, name: str, folder: Path) -> Spec:
    """Return the spec that a node finds on the broker."""
    joinable = discover(
        Endpoint.parse(broker.url), name, 60, lambda _: None, lambda: False, folder / "none"
    )
    assert joinable is not None
    return joinable.spec


@pytest.mark.parametrize("name", ["private", "masked"])
def test_an_older_node_is_refused_by_name_where_something_is_hidden(
    name: str, mosquitto: EmbeddedBroker, tmp_path: Path
) -> None:
    signers = Authority(name).signers() if name == "masked" else {}
    federation = found(
        mosquitto, tmp_path, name, signers=signers, secure_aggregation=name == "masked"
    )
    if name == "private":
        training = {"local_epochs": 1, "augment": False, "batch_norm": "eval"}
        request = Request("fedavg", {}, NAME, "none", 32, training, rounds=1, seed=7)
        federation.spec, federation.first = draft(
            request._replace(privacy={"epsilon": "3"}), federation=name, classes=CLASSES, nodes=3
        )
    begin_recorded(federation)
    coordinator = federation.coordinator()
    node = RecordedNode(mosquitto.url, name, signers.get(NODE))
    with node.playing():
        wait_until(lambda: any(each["type"] == "Refusal" for each in node.heard))
        refusal = next(each for each in node.heard if each["type"] == "Refusal")
        told = coordinator.wait_for(progress.Note)
        while NODE not in getattr(told, "text", ""):
            told = coordinator.wait_for(progress.Note)
    coordinator.stop()
    hello = msgspec.json.decode(read_recorded(f"{name}/hello.json"), type=Hello)
    assert refusal["session"] == hello.session
    assert hello.software in refusal["reason"]
    assert "install" in refusal["remedy"]
    assert not any(each["type"] == "Welcome" for each in node.heard)


@pytest.mark.parametrize("name", ["private", "masked"])
def test_an_older_run_in_which_something_is_hidden_is_refused_by_its_name(
    name: str, mosquitto: EmbeddedBroker, tmp_path: Path
) -> None:
    signers = Authority(name).signers() if name == "masked" else {}
    federation = found(mosquitto, tmp_path, name, signers=signers)
    coordinator = RecordedCoordinator(mosquitto.url, name)
    with coordinator.playing():
        federation.spec = look(mosquitto, name, tmp_path)
        with pytest.raises(UsageError, match=federation.spec.run):
            federation.node(NODE).end()
    assert federation.spec == recorded_spec(name)
    assert not (tmp_path / NODE).exists()
    assert not coordinator.heard
