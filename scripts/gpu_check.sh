#!/usr/bin/env bash
# Run what only a machine with GPUs can show, and write a report that can be sent in.
#
#   ./scripts/gpu_check.sh [part...]
#
# The parts: machine doctor tests one_gpu overlap benchmark time. Without a part all of them run,
# PART_SECONDS (600) each at most. It uses the python3 of this shell and installs nothing.
# MNIST_ROOT names the folder of MNIST, without which digits are drawn. TRAIN_FLAGS go to every
# training, for a short trial. The exit status is 1 if a part failed.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # or torchrun says that it sets it
torchrun=(python3 -m torch.distributed.run --standalone --nproc_per_node)
read -ra flags <<<"${TRAIN_FLAGS:-}"
if [[ -n ${MNIST_ROOT:-} ]]; then flags+=(--data-dir "$MNIST_ROOT"); else flags+=(--dataset synthetic); fi
failed=0

# train NAME COMMAND...: run a training script, and print what its summary says.
train() {
    local folder=$REPORT_FOLDER/$1
    "${@:2}" "${flags[@]}" --run-dir "$folder" --no-progress --no-tensorboard >/dev/null &&
        python3 -c 'import json, sys
run = json.load(open(sys.argv[1] + "/summary.json"))
print(sys.argv[1], *(f"{key} {run[key]:,.4g}" for key in sys.argv[2:]), sep=", ", end=", ")
print("peak_memory_mb", *map(round, run["peak_memory_mb"]))' \
            "$folder" train_seconds test_accuracy train_images_per_second && return
    echo "FAILED: $1"
    failed=1
}

part_machine() { python3 -m torch.utils.collect_env && nvidia-smi topo -m; }

part_doctor() { "${torchrun[@]}" "$gpus" scripts/tools/doctor.py; }

part_tests() { python3 -m pytest -m gpu; }

# What DDP does on one GPU, and how two ranks can share it.
part_one_gpu() {
    export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
    CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*}
    train fp32 "${torchrun[@]}" 1 train_ddp.py
    train bf16 "${torchrun[@]}" 1 train_ddp.py --amp bf16
    train compile "${torchrun[@]}" 1 train_ddp.py --compile
    train workers "${torchrun[@]}" 1 train_ddp.py --num-workers 4
    train two-ranks-gloo "${torchrun[@]}" 2 train_ddp.py --backend gloo
    export NCCL_MULTI_RANK_GPU_ENABLE=1
    train two-ranks-nccl "${torchrun[@]}" 2 train_ddp.py
}

# torch 2.15 has two classes for NCCL. Does the backward wait while gradients travel? If so, the
# class before is faster.
part_overlap() {
    local round backend backends
    ((gpus > 1)) || { echo "skipped: with one GPU nothing travels" && return; }
    backends=$(python3 -c 'import torch.distributed as dist
print(*filter(dist.is_backend_available, ("nccl", "nccl-legacy")))')
    for round in 1 2 3; do
        for backend in $backends; do
            train "overlap-$backend-$round" "${torchrun[@]}" "$gpus" train_ddp.py --model resnet18 \
                --batch-size 32 --bucket-cap-mb 5 --max-steps 300 --epochs 100 --backend "$backend"
        done
    done
}

part_benchmark() { python3 scripts/tools/benchmark.py -- "${flags[@]}"; }

# Is an epoch enough for 99 %, and how long does it take?
part_time() {
    for seed in 0 1 2 3 4; do train "epoch-$seed" python3 train_single.py --seed "$seed"; done
}

if [[ -n ${REPORT_FOLDER:-} ]]; then # see the end
    "part_$1"
    exit "$failed"
fi

(($# > 0)) || set -- machine doctor tests one_gpu overlap benchmark time
for part in "$@"; do declare -F "part_$part" >/dev/null || fail "there is no part $part (see above)"; done
needed=torch,torchvision,tqdm
[[ " $* " != *" tests "* ]] || needed+=,pytest,pytest_timeout,psutil
missing=$(python3 -c "import $needed" 2>&1) || fail "${missing##*$'\n'} in this python3, which is needed"
[[ " $* " != *" machine "* ]] || command -v nvidia-smi >/dev/null || fail "there is no nvidia-smi"
gpus=$(python3 -c 'import torch; print(torch.cuda.is_available() * torch.cuda.device_count())')
((gpus > 0)) || fail "torch can use no GPU: a CPU build, CUDA_VISIBLE_DEVICES, or an old driver?"

# left: the processes of the parts. torchrun's ranks are in sessions of their own, but all have
# inherited REPORT_FOLDER.
left() { grep -lszFx "REPORT_FOLDER=$folder" /proc/[0-9]*/environ | cut -d / -f 3; }

# end_part: interrupt what is left, so that pytest prints where it was. Kill what does not end.
end_part() {
    left | xargs --no-run-if-empty kill -INT || true
    for _ in {1..20}; do
        [[ -n $(left) ]] || return 0
        sleep 1
    done
    left | xargs --no-run-if-empty kill -KILL || true
}

folder=$PWD/runs/gpu-check-$(date +%Y%m%d-%H%M%S)
mkdir -p "$folder"
trap end_part EXIT
export gpus
for part in "$@"; do
    printf '\n## %s\n\n' "$part"
    REPORT_FOLDER=$folder timeout --foreground --signal KILL "${PART_SECONDS:-600}" \
        scripts/gpu_check.sh "$part" 2>&1 || {
        echo "FAILED: $part, with status $? (137: it took too long)"
        failed=1
    }
    end_part
    [[ $part != "${*: -1}" ]] || exit "$failed"
done | tee --ignore-interrupts "$folder/report.md"
