"""Whatever comes over HTTP: it is refused with the client's fault.

`tests/support/fuzz_http.py` sends more.
"""

from pathlib import Path
from random import getrandbits

import pytest

from tests.support.daemon_process import daemon
from tests.support.fuzz_http import GROWTH, Battle, check
from tests.support.tiny_bundle import tiny_bundle


@pytest.mark.slow
def test_five_hundred_malformed_requests_bring_neither_a_fault_of_the_servers_nor_a_crash(
    tmp_path: Path,
) -> None:
    seed = getrandbits(32)
    print(f"seed {seed}")
    with daemon(tiny_bundle(tmp_path / "bundle").folder) as line:
        battle = Battle(line, seed)
        assert battle.fight(500) < GROWTH
        check(line)
        assert line.end() == (0, "", "")
    assert battle.statuses["400"] > 100, battle.statuses
    assert battle.statuses["200"] > 10, battle.statuses
