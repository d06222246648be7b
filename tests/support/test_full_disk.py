"""Full disks at some durable steps of each kind of process;
`python -m tests.support.full_disk` tries all.
"""

import subprocess
import sys

import pytest

from tests.support.full_disk import KINDS

STEPS = {"coordinator": 1, "node": 1, "VFL head": 4, "VFL sensor": 6}


@pytest.mark.slow
@pytest.mark.needs("a C compiler")  # it makes the library that is preloaded
@pytest.mark.parametrize("kind", KINDS)
def test_a_process_whose_disk_is_full_says_so_and_goes_on_to_the_same_bytes_with_room(
    kind: str,
) -> None:
    command = [sys.executable, "-m", "tests.support.full_disk", kind, "--most", str(STEPS[kind])]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
