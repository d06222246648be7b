"""The commands of `edge-node`, by who types them. Imports are inside them: `--help` is fast."""

import os

# numpy's OpenBLAS reads it when it is loaded. Its threads wait for one another by spinning: beside
# two busy processes on two cores the eigenvectors of a matrix of 1280 took twelve seconds of
# processor time instead of 0.3.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
