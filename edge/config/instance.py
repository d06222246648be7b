"""The identity of one of the daemons on a machine."""

from pathlib import Path
from typing import NamedTuple


class Instance(NamedTuple):
    """A daemon's line, and the folder for what must outlive the process."""

    line: str
    state: Path
