"""The papers' experiments, their results, and one-off studies.

Not in the wheel: `python -m research`.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as in edge_node/cli
