#!/usr/bin/env bash
# Runs the README's two commands as a new user would: on a fresh clone, in a bare Debian that has Python and make but no
# broker, no compiler, no browser and no git, first without root. Then root fetches what the tests need.
# Needs root. Usage: tests/bare.sh
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "$(id -u)" -ne 0 ]; then
  echo "make bare makes a chroot: run it as root" >&2
  exit 1
fi
if [ -z "${NAMESPACE:-}" ]; then
  command -v debootstrap >/dev/null || { apt-get -qq update && apt-get -qq install --yes debootstrap >/dev/null; }
  # Own mounts and processes: all of them are gone when this script ends, however it ends.
  exec env NAMESPACE=own unshare --mount --pid --fork --kill-child "$0"
fi

bare=$PWD/build/bare
rm -rf --one-file-system "$bare"
mkdir -p "$bare"
debootstrap --variant=minbase --include=python3,make bookworm "$bare" "${DEBIAN_MIRROR:-http://deb.debian.org/debian}" >"$bare.log" \
  || { tail "$bare.log"; exit 1; }
mount -t proc proc "$bare/proc"
mount --rbind /dev "$bare/dev"
chroot "$bare" useradd --create-home plant

# How this machine reaches the network: names, certificates and pip's settings, with the local folders that these name.
cp /etc/resolv.conf "$bare/etc/"
echo "127.0.0.1 localhost" >"$bare/etc/hosts"
settings=()
if [ -e /etc/ssl/certs/ca-certificates.crt ]; then
  mkdir -p "$bare/etc/ssl/certs"
  cp /etc/ssl/certs/ca-certificates.crt "$bare/etc/ssl/certs/"
fi
for name in $(compgen -e | grep -iE '^(PIP_|UV_|SSL_CERT_FILE$|https?_proxy$|no_proxy$)'); do
  settings+=("$name=${!name}")
  if [ -d "${!name}" ]; then
    mkdir -p "$bare${!name}"
    mount --bind -o ro "${!name}" "$bare${!name}"
  elif [ -f "${!name}" ]; then
    mkdir -p "$bare$(dirname "${!name}")"
    cp "${!name}" "$bare${!name}"
  fi
done

as() { # USER COMMAND...
  local user=$1
  shift
  chroot --userspec="$user:$user" "$bare" env -i HOME="/home/$user" USER="$user" PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 \
    "${settings[@]}" bash -euo pipefail -c "$*"
}

for program in mosquitto git cc chromium openssl; do
  if as plant command -v "$program"; then
    echo "$program is installed: this is no bare machine" >&2
    exit 1
  fi
done
git clone --quiet --no-hardlinks . "$bare/home/plant/edge-node"
chroot "$bare" chown -R plant:plant /home/plant
as plant "cd ~/edge-node && time make demo"
if [ -n "$(find "$bare/home/plant/edge-node/.venv/programs" -name 'mosquitto*' 2>/dev/null)" ]; then
  echo "make demo has fetched mosquitto, which it does not need" >&2
  exit 1
fi
as plant "cd ~/edge-node && time make test"
as plant "cd ~/edge-node && tests/programs.sh /tmp/one git && /tmp/one/bin/git --version"
as root "cd /home/plant/edge-node && tests/programs.sh /tmp/programs mosquitto openssl git && mosquitto_passwd -b -c /tmp/passwords a b"
if [ -e "$bare/tmp/programs/root" ]; then
  echo "root was given unpacked programs, not installed ones" >&2
  exit 1
fi
rm -rf "$bare/home/plant/edge-node"
