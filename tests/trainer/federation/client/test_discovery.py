"""Which federations on a broker can be joined; that of one which has ended,
a node is told so soon.
"""

from pathlib import Path
from typing import Literal

import msgspec
import pytest

from broker_config.broker.embedded import EmbeddedBroker
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import encode
from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.protocol.messages import RoundState
from tests.support.plants import CLASSES
from trainer import progress
from trainer.federation.client.join import join
from trainer.federation.server.connection import publish_retained
from trainer.federation.server.spec import Request, draft

Ended = Literal["finished", "aborted"]


def joining(mosquitto: EmbeddedBroker, folder: Path, wait: float = 60) -> None:
    join(
        Endpoint.parse(mosquitto.url),
        name="a",
        folder=None,
        test=None,
        state=folder,
        federation="steel",
        telemetry=False,
        demands={},
        wait=wait,
        report=progress.ignore,
    )


def retain(
    mosquitto: EmbeddedBroker,
    status: Literal["gathering", "finished", "aborted"],
    method: str,
    *,
    chooses: bool = False,
) -> None:
    """What a broker keeps of a federation whose coordinator has gone."""
    spec, _ = draft(
        Request(method, model="small", weights="none", size=32),
        federation="steel",
        classes=CLASSES,
        nodes=2,
        chooses=chooses,
    )
    state = RoundState(
        run=spec.run, round=0, status=status, reason="a shift's end" if status == "aborted" else ""
    )
    said = {topics.spec("steel"): encode(spec), topics.round_state("steel"): encode(state)}
    assert publish_retained(Endpoint.parse(mosquitto.url), said)


@pytest.mark.parametrize(
    ("status", "method", "what", "remedy"),
    [
        (
            "finished",
            "fedavg",
            "has finished, and this node has no part in its model",
            "edge-node coordinate --new",
        ),
        (
            "finished",
            "gaussian",
            "is not there to serve newcomers its result",
            "again with its --state",
        ),
        (
            "aborted",
            "fedavg",
            "the federation ended early: a shift's end",
            "ask its operator, then join again",
        ),
    ],
)
@pytest.mark.parametrize("wait", [0, pytest.param(300, marks=pytest.mark.slow)])
def test_a_newcomer_to_a_federation_that_has_ended_is_told_so_soon(
    status: Ended,
    method: str,
    what: str,
    remedy: str,
    wait: float,
    mosquitto: EmbeddedBroker,
    tmp_path: Path,
) -> None:
    """After ten seconds in which no other run has begun."""
    retain(mosquitto, status, method)
    with pytest.raises(EdgeNodeError, match=what) as told:  # a minute before the test's own limit
        joining(mosquitto, tmp_path, wait)
    assert remedy in str(told.value.remedy)
    assert told.value.exit_code == 1, "systemd starts it again, and it finds the next run"


def test_the_run_after_a_choosing_run_is_waited_for(
    mosquitto: EmbeddedBroker, tmp_path: Path
) -> None:
    """The choosing run itself has finished, and needs no other node."""
    retain(mosquitto, "finished", "gaussian", chooses=True)
    with pytest.raises(UsageError, match="no coordinator appeared"):
        joining(mosquitto, tmp_path, wait=0.1)


def test_a_federation_that_is_under_way_is_waited_for(
    mosquitto: EmbeddedBroker, tmp_path: Path
) -> None:
    retain(mosquitto, "gathering", "fedavg")
    with pytest.raises(UsageError, match="no coordinator"):
        joining(mosquitto, tmp_path, wait=0)


@pytest.mark.parametrize("changed", [{"method": "exchange"}, {"model": "exchange_small"}])
def test_a_method_or_model_that_another_package_brings_is_named_with_what_to_install(
    changed: dict[str, str], mosquitto: EmbeddedBroker, tmp_path: Path
) -> None:
    """A coordinator may have an extension that this machine has not."""
    spec, _ = draft(
        Request("fedavg", model="small", weights="none", size=32),
        federation="steel",
        classes=CLASSES,
        nodes=2,
    )
    said = {topics.spec("steel"): encode(msgspec.structs.replace(spec, **changed))}
    assert publish_retained(Endpoint.parse(mosquitto.url), said)
    with pytest.raises(UsageError) as caught:
        joining(mosquitto, tmp_path)
    (name,) = changed.values()
    assert name in caught.value.what
    assert f"package that brings {name!r}" in caught.value.remedy
