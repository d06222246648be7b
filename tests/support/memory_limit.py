"""A running process that the system grants no more memory."""

import resource
from pathlib import Path


def take_memory(pid: int) -> None:
    """The process gets no more address space than it has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    resource.prlimit(
        pid, resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY)
    )
