"""The product as a person meets it: the command line."""

import broker_config  # noqa: F401  (before onnxruntime: what it sets must stand by then)
