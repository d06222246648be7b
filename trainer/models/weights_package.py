"""The package `edge-node-weights`: files of initial weights, and no code.

It is apart from edge-node because a production line never trains: its install need not hold them.
"""

import importlib.util
from importlib.metadata import version
from pathlib import Path

from broker_config.protocol.errors import UsageError

PACKAGE = "edge_node_weights"


def find_file(name: str) -> Path:
    """Return the path of a file of weights.

    Raises:
        UsageError: the package is not installed, or it is another version, without this file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        file = Path(folder) / name
        if file.is_file():
            return file
    raise UsageError(
        f"the weights {name} are missing: the package edge-node-weights, which holds them, is not "
        "installed here, or is another version",
        f"install it: pip install edge-node-weights=={version('edge-node')}, or ./weights from a "
        "checkout; edge-node[train] requires it, too",
    )
