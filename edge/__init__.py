"""The line: inference on frames, and its daemon.

Starts without torch installed.
"""

import broker_config  # noqa: F401  (before onnxruntime: what it sets must stand by then)
