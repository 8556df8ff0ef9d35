#!/usr/bin/env bash
# Train on several machines: start scripts/run_torchrun.sh on each of them through ssh.
#
#   HOSTS="node0 node1" scripts/run_ssh.sh --epochs 5
#
# The machines need this folder under the same path, the same packages (in its .venv, or in the PATH
# that ssh sets), and ssh without a password or a question about their keys.
# Ctrl-C, SIGTERM and a closed terminal stop all of them, and so does a machine that fails: each
# saves and ends. What they print is marked with their name. Settings are environment variables:
#   HOSTS   host names, separated by blanks; the first one is machine 0
#   HOST0   address of machine 0, as the others know it (its name in HOSTS)
#   SSH     how to start a command on a host (ssh, which gives up a dead host after 15 seconds)
# and those of run_torchrun.sh, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, NCCL_DEBUG.
set -euo pipefail
cd "$(dirname "$0")/.."

read -ra hosts <<<"${HOSTS:?names the machines, such as HOSTS=\"node0 node1\"}"
read -ra ssh <<<"${SSH:-ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5}"
settings=("NNODES=${#hosts[@]}" "HOST0=${HOST0:-${hosts[0]#*@}}")
for name in NPROC_PER_NODE MASTER_PORT SCRIPT {GLOO,NCCL}_SOCKET_IFNAME NCCL_DEBUG; do
    [[ -z ${!name:-} ]] || settings+=("$name=${!name}")
done

jobs=() keys=() status=0 deadline=$((SECONDS + 10 ** 9))
stop_all() { # with the exit status $1
    ((status > 0)) || status=$1
    echo "run_ssh.sh: all machines stop, which takes a minute at most" >&2
    # On the terminals that -tt makes this byte is Ctrl-C.
    for key in "${keys[@]}"; do printf '\003' >&"$key"; done
    deadline=$((SECONDS + 60)) # for those that do not answer
}
trap 'stop_all 130' INT
trap 'stop_all 143' TERM HUP
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT

for node in "${!hosts[@]}"; do
    mkfifo "$folder/$node"
    exec {key}<>"$folder/$node"
    command=$(printf '%q ' env "${settings[@]}" "NODE_RANK=$node" scripts/run_torchrun.sh "$@")
    "${ssh[@]}" -tt "${hosts[node]}" "cd $(printf '%q' "$PWD") && $command" \
        <"$folder/$node" > >(trap '' INT && exec sed -u "s/^/[${hosts[node]}] /; s/\r//g") 2>&1 &
    jobs+=($!) keys+=("$key")
done
while ((${#jobs[@]} > 0)); do
    sleep 0.2 || true # Ctrl-C ends it too
    for node in "${!jobs[@]}"; do
        ((SECONDS < deadline)) || kill "${jobs[node]}" 2>/dev/null || true
        if kill -0 "${jobs[node]}" 2>/dev/null; then continue; fi
        ended=0
        wait "${jobs[node]}" || ended=$?
        unset "jobs[node]"
        if ((ended > 0 && status == 0)); then
            echo "run_ssh.sh: ${hosts[node]} ended with status $ended" >&2
            stop_all "$ended"
        fi
    done
done
exit "$status"
