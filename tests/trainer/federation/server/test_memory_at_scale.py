"""A fleet at one coordinator gives the exact mean; `benchmarks.node_scale` takes 200,
and measures its memory.
"""

from pathlib import Path

import pytest

from benchmarks.node_scale import measure


@pytest.mark.slow
def test_thirty_nodes_give_the_exact_mean(tmp_path: Path) -> None:
    many = measure(30, rounds=1, folder=tmp_path)
    assert many.wrong == 0
    assert many.blob > 9
    # they were there: each has fetched what the others made
    assert many.broker_out > 30 * many.blob
