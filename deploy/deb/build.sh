#!/usr/bin/env bash
# Builds the Debian package of the line and the coordinator for this machine's own Python and processor: an environment
# in /opt/edge-node, the unit, the user. The environment is the package's, so it also holds the weights that a coordinator
# starts from. What it needs is pinned by constraints.txt. Usage: deploy/deb/build.sh UV DIST OUT
set -euo pipefail

uv=$1 wheel=$(ls "$2"/edge_node-*.whl) weights=$(ls "$2"/edge_node_weights-*.whl) out=$3 deb=$(dirname "$0")
version=$(basename "$wheel" | cut -d- -f2)
architecture=$(dpkg --print-architecture)
python=$(/usr/bin/python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
chmod 0755 "$tree"

"$uv" venv --quiet --relocatable --python /usr/bin/python3 "$tree/opt/edge-node"
"$uv" pip install --quiet --python "$tree/opt/edge-node/bin/python" --link-mode copy --constraint constraints.txt "$wheel" "$weights"
rm -f "$tree"/opt/edge-node/{.gitignore,.lock,CACHEDIR.TAG}
chmod -R u=rwX,go=rX "$tree/opt"
mkdir -p "$tree"/{DEBIAN,etc/edge-node,usr/bin,usr/lib/systemd/system,usr/lib/sysusers.d,usr/share/doc/edge-node}
ln -s /opt/edge-node/bin/edge-node "$tree/usr/bin/edge-node"
cp LICENSE "$tree/usr/share/doc/edge-node/copyright"
cp edge/config/line.example.toml "$tree/usr/share/doc/edge-node/line.example.toml"
echo 'u edge-node - "edge-node, inspecting images" /var/lib/edge-node' >"$tree/usr/lib/sysusers.d/edge-node.conf"
(cd "$tree" && opt/edge-node/bin/python -B) >"$tree/usr/lib/systemd/system/edge-node.service" <<'END'
from pathlib import Path
from edge.daemon.systemd_unit import Needs, compose
needs = Needs(Path("/etc/edge-node/line.toml"), reads=(), writes=(), cameras=(), interfaces=False, port=8080, secrets=())
print(compose("edge-node", "edge-node", ("/opt/edge-node/bin/edge-node",), needs), end="")
END
sed -e "s/@VERSION@/$version/" -e "s/@ARCHITECTURE@/$architecture/" -e "s/@PYTHON@/$python/" \
  -e "s/@NEXT_PYTHON@/${python%.*}.$((${python#*.} + 1))/" "$deb/control" >"$tree/DEBIAN/control"
install -m 0755 "$deb/postinst" "$deb/prerm" "$tree/DEBIAN"
mkdir -p "$out"
dpkg-deb -Zzstd --root-owner-group --build "$tree" "$out/edge-node_${version}_$architecture.deb"
