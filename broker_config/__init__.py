"""The contract between machines, and the broker: protocol, MQTT, blob transfer,
security, storage.
"""

import os

# onnxruntime has code that reports its use to its maker unless this stands in the environment
# before it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
