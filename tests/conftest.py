"""Brokers for all tests: real ones, one for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_config.embedded import EmbeddedBroker, start_broker


@pytest.fixture(params=["mosquitto", "amqtt"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """Each kind of broker in turn."""
    with start_broker(tmp_path / "broker", kind=request.param) as running:
        yield running


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """A mosquitto."""
    with start_broker(tmp_path / "broker", kind="mosquitto") as running:
        yield running
