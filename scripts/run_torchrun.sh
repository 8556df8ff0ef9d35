#!/usr/bin/env bash
# Train with DistributedDataParallel through torchrun, on this machine or on several.
#
#   scripts/run_torchrun.sh [--dry-run] [flag of train_ddp.py...]
#
#   scripts/run_torchrun.sh --epochs 5                                  every GPU of this machine
#   NNODES=2 MASTER_ADDR=10.0.0.1 scripts/run_torchrun.sh --epochs 5    the same on each machine
#
# --dry-run prints the command and the rank table, and starts nothing.
#
# Settings are environment variables, the same on every machine unless it says otherwise:
#   NPROC_PER_NODE  processes on each machine (its GPUs, or 2 without GPUs)
#   NNODES          number of machines (1), or MIN:MAX for an elastic job
#   MASTER_ADDR     address of one of the machines, which all can reach
#   MASTER_PORT     a port there that is free and open (29500)
#   NODE_RANK       number of this machine, 0 where MASTER_ADDR is; without it the machines number
#                   themselves in the order in which they come
#   RDZV_ID         name of the job, for several jobs at one address (mnist-ddp- and the day in UTC,
#                   elastic: mnist-ddp, since machines may join on another day). A job with the same
#                   name and flags continues a run that was killed or failed, and says so
#   RDZV_TIMEOUT    seconds to wait for all processes (120)
#   MAX_RESTARTS    how often to start all processes again after a crash (0; elastic: 3)
#   SCRIPT          what to start (train_ddp.py)
#   TORCHRUN        the launcher (torchrun, or the one in .venv)
#
# CPU threads: the processes share the cores, unless --threads says how many each of them has.
# torchrun sets OMP_NUM_THREADS to 1 where it is unset, so any other value of it counts, too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh
read_flags scripts/run_torchrun.sh "$@"

# check_number NAME LEAST: fail unless this variable is a whole number of at least LEAST.
check_number() {
    if ! [[ ${!1} =~ ^(0|[1-9][0-9]{0,6})$ ]] || ((${!1} < $2)); then
        fail "$1=${!1} is not a whole number, $2 or more"
    fi
}

# Return whether MASTER_ADDR is this machine's, and torchrun does not notice. It looks only at what
# the hostname resolves to (127.0.1.1 on many a Debian), and then no machine serves the rendezvous.
is_unnoticed_host() {
    local address
    address=$(getent ahosts "$MASTER_ADDR" | awk 'NR == 1 { print $1 }')
    [[ " $(hostname -I) " == *" $address "* ]] &&
        ! getent ahosts "$(hostname)" | awk '{ print $1 }' | grep -qxF "$address"
}

if [[ -z ${NNODES:-} && -n ${MASTER_ADDR:-} ]]; then
    fail "MASTER_ADDR is set, but NNODES is not: set it to the number of machines (1: only this one)"
fi
NNODES=${NNODES:-1} MASTER_PORT=${MASTER_PORT:-29500} NODE_RANK=${NODE_RANK:-}
RDZV_TIMEOUT=${RDZV_TIMEOUT:-120}
least=${NNODES%:*} most=${NNODES#*:}
if ! [[ $NNODES =~ ^([1-9][0-9]{0,5}:)?[1-9][0-9]{0,5}$ ]] || ((least > most)); then
    fail "NNODES=$NNODES is neither a number of machines nor MIN:MAX"
fi
MAX_RESTARTS=${MAX_RESTARTS:-$((least < most ? 3 : 0))}
check_number MASTER_PORT 1
check_number RDZV_TIMEOUT 1
check_number MAX_RESTARTS 0
if [[ $NNODES != 1 && -z ${MASTER_ADDR:-} ]]; then
    fail "NNODES=$NNODES needs MASTER_ADDR, the address of one of the machines"
fi
if [[ -n $NODE_RANK ]]; then
    [[ $NNODES != *:* ]] || fail "with NNODES=MIN:MAX the machines number themselves: drop NODE_RANK"
    check_number NODE_RANK 0
    ((NODE_RANK < most)) ||
        fail "NODE_RANK=$NODE_RANK is not below NNODES=$NNODES: machines count from 0"
fi

torchrun=${TORCHRUN:-$(command -v torchrun || echo "$VENV/bin/torchrun")}
python=$(dirname "$torchrun")/python3
if ! $dry_run; then
    refuse_dangling "$python"
    command -v "$torchrun" >/dev/null ||
        fail "there is no $torchrun: activate the environment that has torch, or make one with" \
            "./scripts/quickstart.sh"
fi
if [[ ${NPROC_PER_NODE:-gpu} == gpu ]]; then
    NPROC_PER_NODE=$(count_gpus "$([[ -x $python ]] && echo "$python" || echo python3)")
    ((NPROC_PER_NODE > 0)) || NPROC_PER_NODE=2
fi
check_number NPROC_PER_NODE 1

# A restart must not read the addresses of the attempt before (pytorch/pytorch#135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# By default torchrun does not pass on SIGUSR1, and would die of it. The script treats SIGUSR1 as a
# request to save and stop.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1

command=("$torchrun" --nproc_per_node "$NPROC_PER_NODE" --max_restarts "$MAX_RESTARTS")
if [[ $NNODES == 1 ]]; then
    command+=(--standalone --rdzv-conf "join_timeout=$RDZV_TIMEOUT")
elif [[ -n $NODE_RANK ]]; then
    command+=(--nnodes "$NNODES" --node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR"
        --master_port "$MASTER_PORT" --rdzv-conf "timeout=$RDZV_TIMEOUT")
else
    # An elastic job waits ten seconds for more machines than MIN.
    conf="join_timeout=$RDZV_TIMEOUT,read_timeout=$RDZV_TIMEOUT,last_call_timeout=10"
    if is_unnoticed_host; then conf+=",is_host=true"; fi
    # With a constant name, a new job would continue the run of a failed one.
    ((least < most)) || RDZV_ID=${RDZV_ID:-mnist-ddp-$(date -u +%Y%m%d)}
    command+=(--nnodes "$NNODES" --rdzv_backend c10d --rdzv_endpoint "$MASTER_ADDR:$MASTER_PORT"
        --rdzv_id "${RDZV_ID:-mnist-ddp}" --rdzv-conf "$conf")
fi
command+=("${SCRIPT:-train_ddp.py}" --rdzv-timeout "$RDZV_TIMEOUT" "${flags[@]}")

if $dry_run; then
    echo "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 PET_SIGNALS_TO_HANDLE=$PET_SIGNALS_TO_HANDLE \\"
    printf '%q ' "${command[@]}"
    rank_table "$most" "$NPROC_PER_NODE"
    exit
fi
exec "${command[@]}"
