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

build_packages=(gcc libc6-dev cmake ninja-build pkg-config libjemalloc-dev libfabric-dev libibverbs-dev liburing-dev libucx-dev)

prepare() {
    install_packages "${build_packages[@]}" "$@"
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

# What ci/vm needs: QEMU, a kernel to boot, named in $kernel, and .venv-vm. Debian's pyverbs belongs to the system's Python.
prepare_vm() {
    [ "$(dpkg --print-architecture)" = amd64 ] || { echo "the guest is for amd64 alone" && exit 125; }
    install_packages "${build_packages[@]}" python3 python3-dev python3-venv python3-pyverbs linux-image-amd64 qemu-system-x86 \
        busybox-static file make kmod ndctl e2fsprogs iproute2 rdma-core ibverbs-utils ibverbs-providers perftest
    if [ ! -x .venv-vm/bin/vng ]; then
        say "making a Python environment in .venv-vm with $(/usr/bin/python3 --version)"
        /usr/bin/python3 -m venv --system-site-packages .venv-vm
        .venv-vm/bin/python -m pip install --quiet --disable-pip-version-check pytest ibverbs 'virtme-ng>=1.42'
    fi
    if [ ! -x .venv-vm/bin/jemhooks ] || [ -n "$(find csrc pyproject.toml -newer .venv-vm/bin/jemhooks -print -quit)" ]; then
        say "building and installing jemhooks into .venv-vm"
        .venv-vm/bin/python -m pip install --quiet --disable-pip-version-check --editable .
    fi
    if [ ! -d build/rdma-core ]; then # its own tests; an installation may have left documentation out
        mkdir -p build
        (cd build && apt-get download -qq python3-pyverbs && dpkg-deb -x python3-pyverbs_*.deb rdma-core)
        gunzip build/rdma-core/usr/share/doc/rdma-core/tests/*.gz
    fi
    cmake -S csrc -B build/verbs -G Ninja -DJEMHOOKS_VERBS=on -DJEMHOOKS_FABRIC=on -DJEMHOOKS_TESTS=ON -DJEMHOOKS_FAULTS=ON >/dev/null
    ninja -C build/verbs --quiet test_verbs test_fabric_cache registrar_verbs registrar_null adapter_fabric >/dev/null
    kernel=$(find /boot -name 'vmlinuz-*' | sort -V | tail -1)
}
