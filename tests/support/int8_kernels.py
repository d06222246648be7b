"""Both kinds of kernels that onnxruntime has for int8 on x86, whatever the processor here."""

import numpy as np
import onnxruntime


def answers(graph: bytes, images: np.ndarray) -> list[np.ndarray]:
    """Probabilities by those for processors with VNNI, then by those without,
    as the predictor asks for them.
    """
    found = []
    for without in ("0", "1"):
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.x64quantprecision", without)
        loaded = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        found.append(loaded.run(["probabilities"], {"image": images})[0])
    return found
