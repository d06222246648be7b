"""From a frame to its verdict: decoding, tiles, onnxruntime, decision, pictures."""
