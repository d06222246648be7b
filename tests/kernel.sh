#!/usr/bin/env bash
# Builds the wheel without the extensions, and runs the kernel's tests on it.
# Usage: tests/kernel.sh PYTHON [PYTEST-OPTION...]
set -euo pipefail

python=$(realpath --no-symlinks "$1")
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git ls-files -z | xargs -0 cp --parents --target-directory "$work"
cd "$work"
rm -r edge_node/extensions tests/edge_node/extensions
sed -i '/= "edge_node\.extensions\./d' pyproject.toml
"$python" -m hatchling build -t wheel -d dist
"$python" -m zipfile --extract dist/*.whl installed
find broker_config edge edge_node export trainer -name '*.py' -delete # what is tested is what the wheel holds
export PYTHONPATH=$work/installed:$work
"$python" -m pytest "$@" -m "not slow and not page" --ignore-glob='*/test_containment.py' \
  tests/broker_config tests/edge tests/edge_node tests/export tests/trainer
