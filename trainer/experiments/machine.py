"""What results hang on besides their cell: torch, and the processor."""

from functools import cache
from pathlib import Path

import torch

TORCH = torch.__version__.partition("+")[0]


@cache
def machine() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"
