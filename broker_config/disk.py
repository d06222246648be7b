"""Writing to a disk that may be full or closed to us."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from broker_config.errors import EdgeNodeError


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what the disk complains about into an EdgeNodeError that names the folder."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise EdgeNodeError(
            f"cannot write to {folder}: {reason}", "free some space there, or make it writable"
        ) from error
