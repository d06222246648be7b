"""How long sensors take, as the head sees it."""

import pytest

from edge_node.extensions.vfl.server.response_times import ResponseTimes
from edge_node.extensions.vfl.server.round_state import ReportedTimes

SENSORS = ("camera", "probe")


def test_what_a_round_takes_is_collection_embedding_training_and_the_networks_rest() -> None:
    times = ResponseTimes(SENSORS, patience=5.0, now=0.0)
    times.open_round(1, 0.0)
    assert times.close_round((2, 4), 1.0) == 1.0
    times.open_round(2, 1.0)
    latency = times.measure(
        "probe", ReportedTimes(collection=0.1, embedding=0.2, iteration=0.05), 2.0
    )
    assert latency == 1.0
    assert times.costs["probe"] == pytest.approx((0.1, 1.0 - 4 * 0.05 - 0.1 - 0.2, 0.05))


def test_a_sensor_cannot_claim_more_time_than_has_passed() -> None:
    times = ResponseTimes(SENSORS, patience=5.0, now=0.0)
    times.open_round(1, 0.0)
    times.measure("camera", ReportedTimes(collection=1e9, embedding=1e9, iteration=1e9), 0.5)
    collection, communication, iteration = times.costs["camera"]
    assert collection <= 0.5
    assert communication == 0.0
    assert iteration <= 5.0


def test_a_round_is_recent_within_the_patience_and_within_its_attempt() -> None:
    times = ResponseTimes(SENSORS, patience=5.0, now=0.0)
    times.open_round(1, 0.0)
    times.open_round(2, 3.0)
    assert times.is_recent(1, 4.9)
    assert not times.is_recent(1, 5.0)
    times.start_attempt()
    assert not times.is_recent(2, 4.0)
