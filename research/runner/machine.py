"""Properties of a machine that results depend on besides their cell: torch,
and the processor or accelerator.
"""

import os
from functools import cache
from pathlib import Path

import torch

from broker_config.protocol.errors import EdgeNodeError
from trainer.federation.simulation import Device

TORCH = torch.__version__.partition("+")[0]


@cache
def machine(device: Device = "cpu") -> str:
    """The name of the processor, or of the accelerator."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def suited_workers(device: Device) -> int:
    """The number of processes that run cells there: one for each core, or one for a GPU."""
    return 1 if device == "cuda" else len(os.sched_getaffinity(0))


def check_torch(version: str) -> None:
    """Raise EdgeNodeError unless this torch is the one that a cell asks for:
    its numbers would be others.
    """
    if version != TORCH:
        raise EdgeNodeError(
            f"the cell asks for torch {version}, this machine has {TORCH}",
            "install that torch there",
        )
