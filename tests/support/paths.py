"""Paths of the repository and of the data that lie beside it."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"
WIRE_FILE = REPOSITORY / "tests" / "wire_v1.json"
