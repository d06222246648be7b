#!/usr/bin/env bash
# Installs from a wheelhouse in a network namespace without routes and runs what was installed: the line judges a
# bundle's image and, with the weights beside it, makes a coordinator's first encoder; the trainer runs the demo.
# Usage: tests/offline.sh PYTHON WHEELHOUSE line|train BUNDLE
set -euo pipefail

if [ -z "${NAMESPACE:-}" ]; then
  python=$("$1" -c 'import sys; print(sys.executable)')
  set -- "$python" "$(realpath "$2")" "$3" "$(realpath "$4")"
  clean=(env -i PATH="$PATH" PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1)
  inside=(unshare --map-root-user --net)
  if "${inside[@]}" ip link set lo up; then # the demo's processes talk over loopback
    exec "${clean[@]}" NAMESPACE=own "${inside[@]}" "$(realpath "$0")" "$@"
  fi
  echo "SKIPPED: no network namespace can be made here; installing from the wheelhouse alone, but beside a network" >&2
  exec "${clean[@]}" NAMESPACE=none "$(realpath "$0")" "$@"
fi

python=$1 wheelhouse=$2 set=$3 bundle=$4
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HOME=$work
cd "$work" # away from the checkout, whose packages would be imported instead

if [ "$NAMESPACE" = own ]; then
  ip link set lo up
  "$python" - <<'END'
import errno, os, socket
code = socket.socket().connect_ex(("1.1.1.1", 443))
assert code == errno.ENETUNREACH, f"this must run without a network, but connecting gave {os.strerror(code)}"
END
  echo "no network: 1.1.1.1 is unreachable"
fi

(cd "$wheelhouse" && sha256sum --check --quiet SHA256SUMS)
"$python" -m venv venv
before=$(du -sm venv | cut -f1)
install=(venv/bin/pip install --quiet --no-index --find-links "$wheelhouse" --constraint "$wheelhouse/constraints.txt")
if [ "$set" = line ]; then
  "${install[@]}" edge-node
  if venv/bin/python -c "import torch" 2>/dev/null; then echo "the line's install has torch" >&2; exit 1; fi
  venv/bin/edge-node infer "$bundle" "$bundle/golden.png"
  if venv/bin/python -c "import edge_node_weights" 2>/dev/null; then echo "the line's install has weights" >&2; exit 1; fi
  echo "installed, line alone: $(($(du -sm venv | cut -f1) - before)) MB"
  "${install[@]}" edge-node-weights # what a coordinator starts from
  venv/bin/python - <<'END'
import trainer.federation.server.coordinator.process
from trainer.models.initial_weights import initial_encoder
initial_encoder("mobilenet_v2", "surface", 0)
END
else
  "${install[@]}" 'edge-node[train]'
  venv/bin/edge-node demo --rounds 2
fi
echo "installed, $set: $(venv/bin/edge-node --version), $(($(du -sm venv | cut -f1) - before)) MB"
