"""Viky, the simulator of GenICam cameras that comes with the package genicam:
a real GenTL producer.
"""

from pathlib import Path

import genicam

# its three cameras have the serial numbers 0, 1 and 2
PRODUCER = Path(genicam.__file__).parent / "viky.cti"
