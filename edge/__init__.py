"""The line: inference on frames, its daemon, and the command line.

Starts without torch installed.
"""

import broker_config  # noqa: F401  (before onnxruntime: what it sets must stand by then)
