# Sourced by the scripts beside it: installs Debian's packages and the Python environment, if they are not there yet.
# Usage: prepare [Debian package …]; leaves the environment in .venv and the shell in the repository's root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\n== %s\n' "$*"; }

install_packages() {
    local missing=() package
    for package in "$@"; do
        dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    say "installing Debian packages: ${missing[*]}"
    local root=()
    [ "$(id -u)" -eq 0 ] || root=(sudo)
    "${root[@]}" apt-get update -qq
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

prepare() {
    install_packages gcc libc6-dev cmake ninja-build pkg-config libjemalloc-dev libfabric-dev liburing-dev "$@"
    local python=${PYTHON:-python3}
    if ! command -v "$python" >/dev/null || [ "$(readlink -f "$(command -v "$python")")" = "$(readlink -f /usr/bin/python3)" ]; then
        install_packages python3 python3-dev python3-venv
    fi
    if [ ! -x .venv/bin/python ]; then
        say "making a Python environment in .venv with $("$python" --version)"
        "$python" -m venv .venv
    fi
    say "building and installing jemhooks (and its Python packages) into .venv"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
    .venv/bin/jemhooks --version
}
