"""Personal model -> ONNX -> parity check -> bundle."""
