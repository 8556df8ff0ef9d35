#!/usr/bin/env bash
# Train with DistributedDataParallel on several machines: start this on each, through torchrun.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    cat <<'TEXT'
Train on several machines: run the same command on each of them.

    scripts/run_multi_node.sh [--help] [--dry-run] [flags of train_ddp.py]
    NNODES=2 MASTER_ADDR=10.0.0.1 scripts/run_multi_node.sh --epochs 5

Settings, as environment variables, the same on every machine unless it says otherwise:
    MASTER_ADDR     address of one of the machines, which all can reach (required)
    MASTER_PORT     a port there that is free and open (29500)
    NNODES          number of machines (2), or MIN:MAX for an elastic job
    NPROC_PER_NODE  processes on each (number of GPUs, or 2)
    NODE_RANK       number of this machine, from 0, where MASTER_ADDR is; without it the machines
                    number themselves in the order in which they come
    RDZV_ID         name of the job, for several jobs at one address (mnist-ddp)
    RDZV_TIMEOUT    seconds to wait for the others (120)
    LAST_CALL       seconds that an elastic job waits for more machines than MIN (10)
    MAX_RESTARTS    how often to start all again after a crash (0; elastic: 3)
    SCRIPT          what to start (train_ddp.py)
    TORCHRUN        the launcher (torchrun, or that of .venv)

CPU threads: the cores are shared out among the processes, or --threads for each. OMP_NUM_THREADS
does not count here: torchrun sets it to 1 where it is not set, and does not tell.

--dry-run prints the command and the rank table, and starts nothing.
TEXT
}

count_gpus() {
    local found
    found=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU') || true
    echo $((found > 0 ? found : 2))
}

# Tell whether MASTER_ADDR is this machine's and torchrun does not see it: it looks only at what the
# hostname resolves to, 127.0.1.1 on many a Debian, and then nobody serves the rendezvous.
is_host_unawares() {
    local address
    address=$(getent ahosts "$MASTER_ADDR" | awk 'NR == 1 { print $1 }')
    [[ " $(hostname -I) " == *" $address "* ]] &&
        ! getent ahosts "$(hostname)" | awk '{ print $1 }' | grep -qxF "$address"
}

dry_run=false
case "${1:-}" in
    -h | --help) usage && exit 0 ;;
    --dry-run) dry_run=true && shift ;;
esac
if [[ -z "${MASTER_ADDR:-}" ]]; then
    echo "run_multi_node.sh: error: set MASTER_ADDR to the address of one machine (--help)" >&2
    exit 2
fi
nnodes=${NNODES:-2}
most=${nnodes#*:}
node_rank=${NODE_RANK:-}
nproc=${NPROC_PER_NODE:-$(count_gpus)}
port=${MASTER_PORT:-29500}
timeout=${RDZV_TIMEOUT:-120}
torchrun=${TORCHRUN:-$(command -v torchrun || echo .venv/bin/torchrun)}
restarts=0
[[ "$nnodes" == *:* ]] && restarts=3
if [[ -n "$node_rank" ]] && ((node_rank >= most)); then
    echo "run_multi_node.sh: error: NODE_RANK=$node_rank is not below NNODES=$nnodes:" \
        "nodes count from 0" >&2
    exit 2
fi

# A restart must not read the addresses of the attempt before (pytorch/pytorch#135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Not among torchrun's own, which it dies of; the script takes it as a request to save and stop.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1

command=("$torchrun" --nnodes "$nnodes" --nproc_per_node "$nproc"
    --max_restarts "${MAX_RESTARTS:-$restarts}")
if [[ -n "$node_rank" ]]; then
    command+=(--node_rank "$node_rank" --master_addr "$MASTER_ADDR" --master_port "$port"
        --rdzv-conf "timeout=$timeout")
else
    conf="join_timeout=$timeout,read_timeout=$timeout,last_call_timeout=${LAST_CALL:-10}"
    if is_host_unawares; then conf+=",is_host=true"; fi
    command+=(--rdzv_backend c10d --rdzv_endpoint "$MASTER_ADDR:$port"
        --rdzv_id "${RDZV_ID:-mnist-ddp}" --rdzv-conf "$conf")
fi
command+=("${SCRIPT:-train_ddp.py}" --rdzv-timeout "$timeout" "$@")

if $dry_run; then
    echo "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 PET_SIGNALS_TO_HANDLE=$PET_SIGNALS_TO_HANDLE \\"
    printf '%q ' "${command[@]}"
    printf '\n\nnode  node_rank  local ranks  ranks\n'
    for ((node = 0; node < most; node++)); do
        first=$((node * nproc))
        printf '%-4s  %-9s  %-11s  %s\n' "$([[ "$node_rank" == "$node" ]] && echo here)" \
            "$node" "0-$((nproc - 1))" "$first-$((first + nproc - 1))"
    done
    exit 0
fi
exec "${command[@]}"
