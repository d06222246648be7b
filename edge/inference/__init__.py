"""Inference on frames: decoding, tiling, onnxruntime, decision, verdicts and annotated pictures."""
