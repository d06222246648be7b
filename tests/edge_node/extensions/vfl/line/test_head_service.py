"""The head's service by itself: a broker that does not take all that it says."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker_config.protocol.errors import BrokerError
from edge_node.extensions.vfl.frames import Embedded, encode_frame
from edge_node.extensions.vfl.line.head_service import _Service
from edge_node.extensions.vfl.line.party_model import load_head
from tests.support.vfl_models import RUN, TrainedRun


class FullBroker:
    """A connection on which nothing more can be said."""

    def publish(self, *_: object, **__: object) -> None:
        raise BrokerError("1000 messages wait for it", "check that the broker is running")


def test_predictions_that_the_broker_does_not_take_are_counted_and_stand_in_the_output(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_head(TrainedRun(1).write(tmp_path)["coordinator"])
    broker: Any = FullBroker()
    service = _Service(model, broker, tmp_path / "out.jsonl", 1.0, {})
    for number in range(3):
        for sensor in model.manifest.sensors:
            zeros = np.zeros(sensor.size, "<f4").tobytes()
            frame = Embedded(run=RUN, round=1, product=f"P{number}", embedding=zeros)
            assert service._add_embedding(sensor.name, encode_frame(frame), 0.0) is None
        service._answer(service._collector.take_due(0.0))
    with caplog.at_level(logging.WARNING):
        service.finish()
    assert [json.loads(line)["product"] for line in (tmp_path / "out.jsonl").open()] == [
        "P0",
        "P1",
        "P2",
    ]
    said = caplog.text
    assert said.count("come faster than the broker takes them") == 1
    assert f"all are in {tmp_path / 'out.jsonl'}" in said
    assert "3 predictions not published" in said
    assert "left out" not in said
