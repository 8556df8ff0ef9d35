#!/usr/bin/env bash
# Train with DistributedDataParallel on this machine, through torchrun.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    cat <<'TEXT'
Train on every GPU of this machine (without GPUs: in 2 processes), through torchrun.

    scripts/run_single_node.sh [--help] [--dry-run] [flags of train_ddp.py]
    NPROC_PER_NODE=4 scripts/run_single_node.sh --epochs 5

Settings, as environment variables:
    NPROC_PER_NODE  processes (number of GPUs, or 2)
    MAX_RESTARTS    how often torchrun starts all again after a crash (0)
    RDZV_TIMEOUT    seconds to wait for all processes (120)
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

dry_run=false
case "${1:-}" in
    -h | --help) usage && exit 0 ;;
    --dry-run) dry_run=true && shift ;;
esac
nproc=${NPROC_PER_NODE:-$(count_gpus)}
timeout=${RDZV_TIMEOUT:-120}
torchrun=${TORCHRUN:-$(command -v torchrun || echo .venv/bin/torchrun)}

# A restart must not read the addresses of the attempt before (pytorch/pytorch#135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Not among torchrun's own, which it dies of; the script takes it as a request to save and stop.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1

command=("$torchrun" --standalone
    --nproc_per_node "$nproc"
    --max_restarts "${MAX_RESTARTS:-0}"
    --rdzv-conf "join_timeout=$timeout"
    "${SCRIPT:-train_ddp.py}" --rdzv-timeout "$timeout" "$@")

if $dry_run; then
    echo "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 PET_SIGNALS_TO_HANDLE=$PET_SIGNALS_TO_HANDLE \\"
    printf '%q ' "${command[@]}"
    printf '\n\nnode  node_rank  local ranks  ranks\n'
    printf '%-4s  %-9s  %-11s  %s\n' "$(hostname)" 0 "0-$((nproc - 1))" "0-$((nproc - 1))"
    exit 0
fi
exec "${command[@]}"
