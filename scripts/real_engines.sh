#!/usr/bin/env bash
# Run the project on what it is made for: containers (podman), Slurm, ssh, two machines, a notebook.
#
#   sudo scripts/real_engines.sh [flag of pytest...]         such as -k slurm
#
# For a Debian computer that you can spare: it installs packages of Debian, and needs an hour and
# 25 GB. The second machine is a namespace of Linux, and no service listens outside of it.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

[[ $EUID == 0 ]] || fail "only root can make namespaces and start Slurm"
packages=(podman runc debootstrap slurmctld slurmd slurm-client openssh-server openssh-client)
folder=$(mktemp -d)
made=()
clean_up() {
    rm -rf "$folder"
    ((${#made[@]} == 0)) || podman rmi "${made[@]}" >/dev/null
}
trap clean_up EXIT

if ! dpkg --status "${packages[@]}" iproute2 >"$folder/log" 2>&1; then
    echo "Installing ${packages[*]}" >&2
    # Debian would start Slurm's daemons and sshd. This file forbids it.
    if [[ ! -e /usr/sbin/policy-rc.d ]]; then
        printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
        chmod +x /usr/sbin/policy-rc.d
        trap 'rm /usr/sbin/policy-rc.d; clean_up' EXIT
    fi
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes \
        --no-install-recommends "${packages[@]}" iproute2; } >"$folder/log" 2>&1 ||
        fail "apt-get: $(tail -n 1 "$folder/log")"
fi

# The base of the Dockerfile, or one like it from Debian's packages.
base=python:3.13-slim
if ! podman image exists "$base" && ! timeout 300 podman pull --quiet "docker.io/library/$base"; then
    echo "No registry of images answers, so debootstrap makes the image $base" >&2
    root=$folder/root
    timeout 1200 debootstrap --variant=minbase \
        --include=ca-certificates,python3,python3-dev,python3-pip trixie "$root" >"$folder/log" ||
        fail "debootstrap: $(tail -n 1 "$folder/log")"
    ln -s python3 "$root/usr/bin/python"
    rm "$root"/usr/lib/python3*/EXTERNALLY-MANAGED # pip may install beside Debian's packages
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/" # those that this computer trusts
    tar --directory "$root" --create . | podman import - "$base" >/dev/null
    rm -rf "$root"
    made=("$base")
fi

printf '%s\n' nbclient ipykernel >"$folder/notebook.txt"
make_environment requirements.txt requirements-dev.txt "$folder/notebook.txt"
# In one process, because each test starts several.
"$PYTHON" -m pytest -m slow tests/test_engines.py "$@"
