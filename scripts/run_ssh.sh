#!/usr/bin/env bash
# Train on every host of a list: start scripts/run_torchrun.sh on each of them through ssh.
#
#   HOSTS="node1 node2" scripts/run_ssh.sh [--dry-run] [flag of train_ddp.py...]
#
# The hosts need this folder under the same path, the same packages, and ssh without a password.
# When one host fails, or this script is stopped or killed, the other hosts are stopped too. Each of
# them gets SIGTERM, saves and ends. --dry-run prints the commands and the rank table, and starts
# nothing.
#
# Settings are environment variables:
#   HOSTS        host names, separated by blanks; the first is node 0
#   HOSTFILE     or a file with a host in each line (# starts a comment)
#   DIRECTORY    this project's folder on the hosts (the path that it has here)
#   MASTER_ADDR  address of the first host, as the others know it (its name)
#   SSH          the program to start a command on a host ("ssh" with keep-alive options)
# and MASTER_PORT, NPROC_PER_NODE, RDZV_TIMEOUT, MAX_RESTARTS, SCRIPT, TORCHRUN as in
# scripts/run_torchrun.sh.
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh
read_flags scripts/run_ssh.sh "$@"

if [[ -n ${HOSTFILE:-} ]]; then
    HOSTS=$(cd "$here" && sed 's/#.*//' "$HOSTFILE" | awk 'NF { print $1 }') ||
        fail "HOSTFILE=$HOSTFILE cannot be read"
fi
read -r -d '' -a hosts <<<"${HOSTS:-}" || true
((${#hosts[@]} > 0)) || fail "set HOSTS or HOSTFILE to the hosts to start on (--help)"
for host in "${hosts[@]}"; do
    [[ $host =~ ^[A-Za-z0-9_][A-Za-z0-9_.:@%-]*$ ]] ||
        fail "'$host' in HOSTS is no host name: separate names by blanks, without commas"
done
# A host that no longer answers is a failure after 15 seconds.
read -r -a ssh <<<"${SSH:-ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5}"
directory=${DIRECTORY:-$PWD}
MASTER_ADDR=${MASTER_ADDR:-${hosts[0]#*@}}
# This finds mistakes in the settings before anything starts. Only a user who asks for the table
# waits until torch has counted the GPUs here.
$dry_run || processes=${NPROC_PER_NODE:-1}
preview=$(env NNODES="${#hosts[@]}" NODE_RANK=0 MASTER_ADDR="$MASTER_ADDR" \
    ${processes:+NPROC_PER_NODE="$processes"} scripts/run_torchrun.sh --dry-run "${flags[@]}")

settings() { # of node $1
    printf '%q ' "NNODES=${#hosts[@]}" "NODE_RANK=$1" "MASTER_ADDR=$MASTER_ADDR"
    local name
    for name in MASTER_PORT NPROC_PER_NODE RDZV_TIMEOUT MAX_RESTARTS SCRIPT TORCHRUN; do
        if [[ -n ${!name:-} ]]; then printf '%q ' "$name=${!name}"; fi
    done
}

if $dry_run; then
    for node in "${!hosts[@]}"; do
        printf '%s %s: cd %q && env %sscripts/run_torchrun.sh' \
            "${ssh[*]}" "${hosts[$node]}" "$directory" "$(settings "$node")"
        ((${#flags[@]} == 0)) || printf ' %q' "${flags[@]}"
        echo
    done
    printf '\n%s\n' "${preview#*$'\n\n'}"
    exit
fi

# Each remote command ends when its standard input ends. So it ends when this script ends, for
# whatever reason. Killing ssh itself would leave the remote command running. After SIGTERM torchrun
# may wait minutes for the agent of a dead host, and ignores signals meanwhile.
readonly GRACE=20 # seconds
folder=$(mktemp -d)
mkfifo "$folder/lifeline"
exec 9<>"$folder/lifeline"
trap 'rm -r "$folder"' EXIT

quoted=""
((${#flags[@]} == 0)) || quoted=$(printf '%q ' "${flags[@]}")
start() { # node $1
    local node=$1
    "${ssh[@]}" "${hosts[$node]}" "cd $(printf '%q' "$directory") && {
        exec 3<&0
        env $(settings "$node") scripts/run_torchrun.sh $quoted </dev/null & job=\$!
        { cat <&3 >/dev/null; kill -TERM \$job; n=0
          while [ \$n -lt $GRACE ]; do sleep 1; n=\$((n + 1)); done
          kill -KILL \$job; } 2>/dev/null & watch=\$!
        wait \$job; status=\$?
        kill \$watch 2>/dev/null
        exit \$status; }" <"$folder/lifeline" 2>&1 | sed -u "s/^/[${hosts[$node]}] /"
}

status=0
give_up=0
stop_all() {
    ((status != 0)) || status=$1
    exec 9>&- # the lifeline
    give_up=$((SECONDS + 60))
}
trap 'stop_all 130' INT
trap 'stop_all 143' TERM HUP

pids=()
for node in "${!hosts[@]}"; do
    start "$node" 9>&- & # otherwise the child would hold the lifeline
    pids+=($!)
done
while ((${#pids[@]} > 0)); do
    sleep 0.2 || true
    for node in "${!pids[@]}"; do
        if kill -0 "${pids[$node]}" 2>/dev/null; then
            ((give_up == 0 || SECONDS < give_up)) || kill -KILL "${pids[$node]}"
            continue
        fi
        ended=0
        wait "${pids[$node]}" || ended=$?
        unset "pids[$node]"
        if ((ended > 0 && status == 0)); then
            echo "run_ssh.sh: ${hosts[$node]} ended with status $ended: stopping the others" >&2
            stop_all "$ended"
        fi
    done
done
exit "$status"
