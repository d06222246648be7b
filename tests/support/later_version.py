"""A later minor version of this project: a copy of its packages,
whose every message has a field that is new.
"""

import shutil
from importlib.metadata import distribution
from pathlib import Path

from tests.support.paths import REPOSITORY

VERSION = "0.2.0"
_MESSAGE = '''"""Base of all messages; `type` on the wire is the class name."""\n'''


def later_version(folder: Path, protocol: str = "edge-node/v1") -> dict[str, str]:
    """Write it into `folder`; return the environment in which `python -m edge_node` is this
    version.

    With another `protocol` it is a later major version.
    """
    for room in ("broker_config", "edge", "edge_node", "export", "trainer"):
        shutil.copytree(
            REPOSITORY / room, folder / room, ignore=shutil.ignore_patterns("__pycache__")
        )
    _replace(
        folder / "broker_config" / "protocol" / "messages.py",
        _MESSAGE,
        f"{_MESSAGE}\n    since_0_2: int = 2\n",
    )
    _replace(
        folder / "broker_config" / "protocol" / "topics.py",
        'ROOT = "edge-node/v1"',
        f'ROOT = "{protocol}"',
    )
    installed = folder / f"edge_node-{VERSION}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: edge-node\nVersion: {VERSION}\n"
    )
    (installed / "entry_points.txt").write_text(
        distribution("edge-node").read_text("entry_points.txt") or ""
    )
    # the working directory's packages are this version's
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new))
