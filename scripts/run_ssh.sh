#!/usr/bin/env bash
# Start scripts/run_multi_node.sh on every host of a list, and stop all when one fails.
set -euo pipefail

usage() {
    cat <<'TEXT'
Train on every host of a list: starts scripts/run_multi_node.sh on each through ssh.

    HOSTS="node1 node2" scripts/run_ssh.sh [--help] [--dry-run] [flags of train_ddp.py]

The hosts need this folder under the same path, the same packages, and ssh without a password.
When one host fails, or this script is stopped or killed, all the others are stopped, too: each
gets SIGTERM, saves and ends.

Settings, as environment variables:
    HOSTS        host names, separated by blanks; the first is node 0
    HOSTFILE     or a file with a host in each line (# starts a comment)
    DIRECTORY    this project's folder on the hosts (where it is here)
    MASTER_ADDR  address of the first host, as the others know it (its name)
    SSH          the program to start a command on a host ("ssh" with keep-alive options)
and MASTER_PORT, NPROC_PER_NODE, RDZV_TIMEOUT, MAX_RESTARTS, SCRIPT, TORCHRUN as in
scripts/run_multi_node.sh.

--dry-run prints the commands and the rank table, and starts nothing.
TEXT
}

dry_run=false
case "${1:-}" in
    -h | --help) usage && exit 0 ;;
    --dry-run) dry_run=true && shift ;;
esac
if [[ -n "${HOSTFILE:-}" ]]; then
    HOSTS=$(sed 's/#.*//' "$HOSTFILE" | awk 'NF { print $1 }')
fi
read -r -d '' -a hosts <<<"${HOSTS:-}" || true
if ((${#hosts[@]} == 0)); then
    echo "run_ssh.sh: error: set HOSTS or HOSTFILE to the hosts to start on (--help)" >&2
    exit 2
fi
# A host that no longer answers is a failure after 15 seconds.
read -r -a ssh <<<"${SSH:-ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5}"
directory=${DIRECTORY:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}

settings() { # of node $1
    printf '%q ' "NNODES=${#hosts[@]}" "NODE_RANK=$1" "MASTER_ADDR=${MASTER_ADDR:-${hosts[0]}}"
    local name
    for name in MASTER_PORT NPROC_PER_NODE RDZV_TIMEOUT MAX_RESTARTS SCRIPT TORCHRUN; do
        if [[ -n "${!name:-}" ]]; then printf '%q ' "$name=${!name}"; fi
    done
}

if $dry_run; then
    for node in "${!hosts[@]}"; do
        printf '%s %s: cd %q && env %s scripts/run_multi_node.sh' \
            "${ssh[*]}" "${hosts[$node]}" "$directory" "$(settings "$node")"
        printf ' %q' "$@"
        echo
    done
    echo
    env NNODES="${#hosts[@]}" NODE_RANK=0 MASTER_ADDR="${MASTER_ADDR:-${hosts[0]}}" \
        "$(dirname "${BASH_SOURCE[0]}")/run_multi_node.sh" --dry-run "$@" | sed -n '/^node /,$p'
    exit 0
fi

# Each remote command ends when its standard input does, which is when this script ends, however
# that comes about. Killing ssh itself would leave what it started running.
# torchrun may then wait for the agent of a dead host, minutes in which it looks at no signal.
readonly GRACE=20 # seconds
folder=$(mktemp -d)
mkfifo "$folder/lifeline"
exec 9<>"$folder/lifeline"
trap 'rm -r "$folder"' EXIT

start() { # node $1, with the script's flags after it
    local node=$1 here flags=""
    shift
    (($# == 0)) || flags=$(printf '%q ' "$@")
    here=$(printf '%q' "$directory")
    "${ssh[@]}" "${hosts[$node]}" "cd $here && {
        exec 3<&0
        env $(settings "$node") scripts/run_multi_node.sh $flags </dev/null & job=\$!
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
    start "$node" "$@" 9>&- & # or it would hold the lifeline itself
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
