"""Learning: methods, models, data, training, and the federation's two sides."""

import broker_config  # noqa: F401  (before onnxruntime: what it sets must stand by then)
