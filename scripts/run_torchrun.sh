#!/usr/bin/env bash
# Train with DDP through torchrun, on this machine alone, or on it as one of several.
#
#   scripts/run_torchrun.sh --epochs 5
#   NNODES=2 NODE_RANK=0 HOST0=10.0.0.1 scripts/run_torchrun.sh --epochs 5     and 1 on the other
#
# The flags go to the script. Settings are environment variables:
#   NPROC_PER_NODE  processes on each machine (one for each GPU, two without a GPU)
#   NNODES          number of machines (1)
#   NODE_RANK       number of this machine, from 0
#   HOST0           address of machine 0, as all the others know it
#   MASTER_PORT     a port of machine 0 that is free, and open to the others (29500)
#   SCRIPT          what to start (train_ddp.py), below the project's folder, as all other paths
set -euo pipefail
cd "$(dirname "$0")/.."

where=(--standalone)
if ((${NNODES:-1} > 1)); then
    : "${HOST0:?is needed with NNODES: the address of machine 0}"
    : "${NODE_RANK:?is needed with NNODES: the number of this machine, from 0}"
    where=(--nnodes "$NNODES" --node_rank "$NODE_RANK" --master_addr "$HOST0")
    where+=(--master_port "${MASTER_PORT:-29500}" --rdzv-conf timeout=300) # seconds for all to come
fi
command -v torchrun >/dev/null || PATH=$PWD/.venv/bin:$PATH # ssh activates no environment
command -v torchrun >/dev/null || {
    echo "run_torchrun.sh: error: $(hostname) has no torchrun in its PATH, nor in $PWD/.venv/bin" >&2
    exit 127
}
processes=${NPROC_PER_NODE:-$(python3 -c 'import torch; print(torch.cuda.device_count() or 2)')}
# torchrun passes on these signals, and the script saves and stops. By default SIGUSR1 kills torchrun.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # or torchrun says that it sets it
exec torchrun "${where[@]}" --nproc_per_node "$processes" "${SCRIPT:-train_ddp.py}" "$@"
