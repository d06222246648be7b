#!/usr/bin/env bash
# Installs the Debian package on this machine, lets its line judge an image as its user, and purges it.
# Usage: tests/deb.sh PACKAGE BUNDLE
set -euo pipefail

package=$(realpath "$1") bundle=$(realpath "$2")
if [ "$(id -u)" -ne 0 ]; then echo "SKIPPED: only root can install $package"; exit; fi
if [ -e /opt/edge-node ] || [ -e /etc/edge-node ]; then echo "SKIPPED: an edge-node is installed here"; exit; fi

line=
clean() {
  [ -z "$line" ] || kill "$line" || true
  dpkg --purge edge-node >/dev/null
  userdel edge-node
  rm -rf /etc/edge-node /var/lib/edge-node /var/log/edge-node-deb-test
}
trap clean EXIT
dpkg --install "$package"
systemd-analyze verify /usr/lib/systemd/system/edge-node.service

cp -r "$bundle" /var/lib/edge-node/bundle
cat >/etc/edge-node/line.toml <<'END'
bundle = "/var/lib/edge-node/bundle"
port = 8099
END
cd /
setpriv --reuid edge-node --regid edge-node --clear-groups /opt/edge-node/bin/python -c \
  "from trainer.models.initial_weights import initial_encoder; initial_encoder('mobilenet_v2', 'surface', 0)" # a coordinator's start
setpriv --reuid edge-node --regid edge-node --clear-groups edge-node infer /var/lib/edge-node/bundle /var/lib/edge-node/bundle/golden.png
setpriv --reuid edge-node --regid edge-node --clear-groups edge-node serve --config /etc/edge-node/line.toml --state /var/lib/edge-node \
  2>/var/log/edge-node-deb-test &
line=$!
for _ in $(seq 300); do grep -q '^ready ' /var/log/edge-node-deb-test && break; sleep 0.2; done
cat /var/log/edge-node-deb-test
/usr/bin/python3 - /var/lib/edge-node/bundle/golden.png <<'END'
import json, sys, urllib.request
with open(sys.argv[1], "rb") as image:
    print(json.load(urllib.request.urlopen("http://127.0.0.1:8099/classify", image.read())))
END
kill $line
wait $line
line=

dpkg --install "$package" # an upgrade: what the line has stays
test -e /var/lib/edge-node/bundle/golden.png
dpkg --remove edge-node
test ! -e /opt/edge-node || { find /opt/edge-node | head; echo "the package leaves files behind" >&2; exit 1; }
test -e /var/lib/edge-node/bundle/golden.png
