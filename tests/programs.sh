#!/usr/bin/env bash
# Installs missing programs. As root it installs Debian's packages. Otherwise it unpacks them into FOLDER, and FOLDER/bin
# has the programs. Without apt-get it names what is missing and how to install it.
# Usage: tests/programs.sh FOLDER mosquitto|openssl|git|chromium|cc|systemd ...
#        tests/programs.sh FOLDER venv PYTHON VENV   makes a virtual environment; Debian's Python may lack pip
set -euo pipefail

if [ $# -lt 2 ]; then
  sed -n '2,5s/^# //p' "$0" >&2
  exit 2
fi

folder=$1
shift
mkdir -p "$folder"
folder=$(realpath "$folder")
root=$folder/root
export PATH=$PATH:$folder/bin:/usr/local/sbin:/usr/sbin

# program -> what must be on the path, and Debian's packages that bring it.
declare -A commands=(
  [mosquitto]="mosquitto mosquitto_passwd" [openssl]=openssl [git]=git
  [chromium]=chromium [cc]=cc [systemd]=systemd-analyze
)
declare -A packages=(
  [mosquitto]=mosquitto [openssl]=openssl [git]=git
  [chromium]="chromium fonts-dejavu-core" [cc]="gcc libc6-dev" [systemd]=systemd
)
# These look for their files at fixed paths: only root can install them, and tests are skipped without them.
declare -A needs_root=([cc]=yes [systemd]=yes)

# Run apt-get with package lists and a cache of our own, which needs no rights. It skips what is installed already.
own_apt() {
  mkdir -p "$folder"/apt/{lists,cache/archives}/partial
  apt-get -qq -o Dir::State::Lists="$folder/apt/lists" -o Dir::Cache="$folder/apt/cache" \
    -o Debug::NoLocking=1 -o APT::Sandbox::User="$(id -un)" -o Acquire::Languages=none "$@"
}

unpack() { # PACKAGE...
  case $folder in
    *[\'\;]*)
      echo "move this repository: no ' or ; may be in $folder" >&2
      exit 1
      ;;
  esac
  rm -rf "$folder/apt" # what an interrupted download left
  own_apt update || true # one unreachable source need not matter
  own_apt install --yes --download-only --no-install-recommends "$@" || could_not_fetch "$@"
  for package in "$folder"/apt/cache/archives/*.deb; do
    dpkg -x "$package" "$root"
  done
  rm -rf "$folder/apt"
}

could_not_fetch() { # PACKAGE...
  echo "could not fetch $*: check the network, or have root install them (apt install $*)" >&2
  exit 1
}

# Start an unpacked program with the libraries and files that were unpacked beside it.
wrap() { # COMMAND
  local libraries at
  at=$(find "$root"/usr/{bin,sbin} -name "$1" -print -quit 2>/dev/null || true)
  if [ -e "$root/usr/lib/$1/$1" ]; then at=$root/usr/lib/$1/$1; fi
  libraries=$({ find "$root"/{lib,usr/lib} -name '*.so*' -printf '%h\n' 2>/dev/null || true; } | sort -u | paste -sd :)
  mkdir -p "$folder/bin"
  echo "<fontconfig><dir>$root/usr/share/fonts</dir><cachedir>$folder/fonts</cachedir></fontconfig>" >"$folder/fonts.conf"
  cat >"$folder/bin/$1" <<END
#!/bin/sh
export LD_LIBRARY_PATH='$libraries' OPENSSL_CONF='$root/etc/ssl/openssl.cnf' FONTCONFIG_FILE='$folder/fonts.conf'
export GIT_EXEC_PATH='$root/usr/lib/git-core' GIT_TEMPLATE_DIR='$root/usr/share/git-core/templates'
exec '$at' "\$@"
END
  chmod +x "$folder/bin/$1"
}

make_venv() { # PYTHON VENV
  local wheel
  if "$1" -c "import ensurepip" 2>/dev/null; then
    "$1" -m venv "$2"
    return
  fi
  if ! command -v apt-get >/dev/null; then
    echo "$1 has no ensurepip, which a virtual environment needs: install python3-venv or your system's package for it" >&2
    exit 1
  fi
  wheel=$(ls /usr/share/python-wheels/pip-*.whl 2>/dev/null || true)
  if [ -z "$wheel" ]; then
    unpack python3-pip-whl
    wheel=$(ls "$root"/usr/share/python-wheels/pip-*.whl)
  fi
  "$1" -m venv --without-pip "$2"
  PYTHONPATH=$wheel "$2/bin/python" -m pip install --quiet --no-index "$wheel"
}

if [ "$1" = venv ]; then
  make_venv "$2" "$3"
  exit
fi

is_here() { # COMMAND
  command -v "$1" >/dev/null && return
  # The tests take these browsers, too.
  [ "$1" = chromium ] && { command -v chromium-browser || command -v google-chrome; } >/dev/null
}

missing=() wanted=()
for program; do
  needed=
  for command in ${commands[$program]}; do
    if ! is_here "$command"; then
      if [ "$(id -u)" -ne 0 ] && [ -n "${needs_root[$program]:-}" ]; then continue; fi
      missing+=("$command")
      needed=yes
    fi
  done
  if [ -n "$needed" ]; then wanted+=(${packages[$program]}); fi
done
if [ ${#missing[@]} -eq 0 ]; then exit; fi

if ! command -v apt-get >/dev/null; then
  cat >&2 <<END
The tests need programs that are not here: ${missing[*]}
Install them, then run the command again. Fedora: dnf install mosquitto openssl git chromium gcc;
Arch: pacman -S mosquitto openssl git chromium gcc.
END
  exit 1
fi
if [ "$(id -u)" -eq 0 ]; then
  echo "installing ${wanted[*]}"
  apt-get -qq update || true # one unreachable source need not matter
  DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 install --yes --no-install-recommends "${wanted[@]}" \
    >/dev/null || could_not_fetch "${wanted[@]}"
else
  echo "unpacking ${wanted[*]} into $folder"
  unpack "${wanted[@]}"
  for command in "${missing[@]}"; do wrap "$command"; done
fi
for command in "${missing[@]}"; do
  is_here "$command" || { echo "$command is still missing: install it by hand" >&2; exit 1; }
done
