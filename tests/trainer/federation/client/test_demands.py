"""What a plant demands of a private federation, and what it can find in a spec before it joins."""

from pathlib import Path
from typing import Any

import pytest

from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.codec import encode
from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import RoundState, Spec
from broker_config.protocol.topics import round_state
from broker_config.protocol.topics import spec as spec_topic
from tests.support.plants import CLASSES, draw
from trainer import progress
from trainer.federation.client import discovery
from trainer.federation.client import join as joining
from trainer.federation.client.join import join
from trainer.federation.client.plant_checks import read_demands
from trainer.federation.client.privacy_file import open_account
from trainer.federation.server.spec import Request, draft
from trainer.methods import make


def drafted(**privacy: str) -> Spec:
    return draft(
        Request("gaussian", model="small", weights="none", size=32, privacy=privacy),
        federation="steel",
        classes=CLASSES,
        nodes=2,
    )[0]


def checked(spec: Spec, **demanded: str) -> float:
    method = make(spec.method, spec.training, spec.options, spec.head, spec.privacy)
    checks = read_demands(demanded)
    for check in checks.values():
        check.check_spec(spec, method)
    return min(check.most_epsilon for check in checks.values())


def test_an_epsilon_that_a_federation_keeps_is_met_and_bounds_what_is_spent() -> None:
    assert checked(drafted(epsilon="3"), epsilon="3") == 3.0
    assert checked(drafted(epsilon="3"), epsilon="8", images="2") == 8.0


@pytest.mark.parametrize(
    ("privacy", "demanded", "why"),
    [
        (
            {"epsilon": "8"},
            {"epsilon": "3"},
            "would spend epsilon 8 of this plant's images, and it demands 3 at most",
        ),
        ({}, {"epsilon": "3"}, "'steel' is not private: no epsilon bounds what leaves this plant"),
        ({"epsilon": "8"}, {"epsilon": "none"}, "what this node demands cannot be met"),
        ({"epsilon": "8"}, {"epsilon": "0"}, "what this node demands cannot be met"),
        ({"epsilon": "8"}, {"noise": "1"}, "cannot be checked before anything leaves it: noise"),
    ],
)
def test_what_is_not_met_is_refused(
    privacy: dict[str, str], demanded: dict[str, str], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        checked(drafted(**privacy), **demanded)


def told_before(
    spec: Spec, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> list[str]:
    """What a plant is told until it would meet the others."""
    gathering = RoundState(run=spec.run, round=0, status="gathering")
    retained = {spec_topic("steel"): encode(spec), round_state("steel"): encode(gathering)}
    monkeypatch.setattr(discovery, "read_retained", lambda *_, **__: retained)

    def stop_here(*_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(joining, "check_name_free", stop_here)
    told: list[str] = []

    def report(event: progress.AnyEvent) -> None:
        if isinstance(event, progress.Note):
            told.append(event.text)

    images = folder / "images"
    if not images.exists():
        draw(images, 4, 1)
    asked: dict[str, Any] = {"name": "a", "folder": images, "test": None, "state": folder / "state"}
    asked |= {
        "federation": "steel",
        "telemetry": False,
        "demands": {},
        "wait": 1.0,
        "report": report,
    }
    with pytest.raises(InterruptedError):
        join(Endpoint.parse("mqtt://nowhere"), **{**asked, **changes})
    return told


def test_a_plant_hears_what_joining_costs_before_it_meets_anybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = drafted(epsilon="3")
    costs = (
        "this federation is private: what leaves a node spends epsilon 3 of each of its "
        "training images"
    )
    assert any(each.startswith(costs) for each in told_before(spec, tmp_path, monkeypatch))
    open_account(tmp_path / "state").account.spend("an earlier run", 1, "basis", 1.0)
    told = told_before(spec, tmp_path, monkeypatch)
    assert any(each.endswith("state has spent epsilon 4.38 already") for each in told)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"telemetry": True}, "--telemetry"),
        ({"preview": True}, "preview"),
    ],
)
def test_figures_that_no_noise_protects_are_not_told(
    changes: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=why):
        told_before(drafted(epsilon="3"), tmp_path, monkeypatch, **changes)
    assert told_before(drafted(), tmp_path, monkeypatch, **changes), "elsewhere they are"
