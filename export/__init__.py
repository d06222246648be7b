"""Personal model -> ONNX -> parity check -> bundle."""

import broker_config  # noqa: F401  (before onnxruntime: what it sets must stand by then)
