"""A personal model's folder, looked up without torch, so that a wrong one is named at once."""

from pathlib import Path

from broker_config.protocol.errors import UsageError
from broker_config.storage import checksums
from edge.bundle.bundle_format import PERSONAL_MODEL as METADATA

_NODE_STATE = "progress.json"  # as the node's checkpoint calls it
_MAX_SUGGESTIONS = 5


def check(folder: Path) -> None:
    """Raise UsageError, with where to find one, unless a personal model lies in a folder."""
    if (folder / METADATA).is_file() or checksums.lists(folder, METADATA):
        return
    folders = []
    for depth in ("model", "*/model"):
        for path in folder.glob(f"{depth}/{METADATA}"):
            folders.append(str(path.parent))
    inside = sorted(folders)
    if inside:
        remedy = f"did you mean {' '.join(inside[:_MAX_SUGGESTIONS])}?"
    elif any((state / _NODE_STATE).is_file() for state in (folder, folder.parent)):
        remedy = (
            "edge-node join has not come to its end there: let it, or start it again with the "
            "same --state"
        )
    else:
        remedy = "pass the model folder that edge-node join or simulate left"
    raise UsageError(f"there is no personal model in {folder} ({METADATA} is missing)", remedy)
