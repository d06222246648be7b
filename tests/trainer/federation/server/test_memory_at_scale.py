"""A coordinator's memory is that of one sum, however many nodes contribute; `benchmarks.node_scale` takes 200."""

from pathlib import Path

import pytest

from benchmarks.node_scale import measure


@pytest.mark.slow
def test_thirty_nodes_need_no_more_of_the_coordinator_s_memory_than_three_and_give_the_exact_mean(
    tmp_path: Path,
) -> None:
    fleets = []
    for nodes in (3, 30):
        (tmp_path / str(nodes)).mkdir()
        fleets.append(measure(nodes, rounds=1, folder=tmp_path / str(nodes)))
    few, many = fleets
    assert (few.wrong, many.wrong) == (0, 0)
    assert few.blob > 9
    assert many.coordinator_peak < 1.2 * few.coordinator_peak
    assert many.broker_out > 30 * many.blob  # they were there: each has fetched what the others made
