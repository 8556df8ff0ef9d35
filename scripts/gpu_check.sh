#!/usr/bin/env bash
# Run what only a machine with GPUs can show, and write a report that can be sent in.
#
#   ./scripts/gpu_check.sh [part...]
#
# The parts: machine doctor tests overlap benchmark time. Without a part all of them run, ten minutes
# each at most. It uses the python3 of this shell and installs nothing. MNIST_ROOT names the folder
# of MNIST, without which digits are drawn. The exit status is 1 if a part failed.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

gpus=$(python3 -c 'import torch; print(torch.cuda.is_available() * torch.cuda.device_count())') ||
    fail "python3 has no torch: activate an environment that has it"
((gpus > 0)) || fail "torch can use no GPU: a CPU build, CUDA_VISIBLE_DEVICES, or an old driver?"
folder=${REPORT_FOLDER:-runs/gpu-check-$(date +%Y%m%d-%H%M%S)}
mkdir -p "$folder"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # or torchrun says that it sets it
torchrun=(python3 -m torch.distributed.run --standalone --nproc_per_node)
data=(--dataset synthetic)
[[ -z ${MNIST_ROOT:-} ]] || data=(--dataset mnist --data-dir "$MNIST_ROOT")

# train NAME COMMAND...: run a training script, and print what its summary says.
train() {
    "${@:2}" "${data[@]}" --run-dir "$folder/$1" --no-progress --no-tensorboard >/dev/null
    python3 -c 'import json, sys
run = json.load(open(sys.argv[1]))
print(sys.argv[1], *(f"{k} {run[k]:,.4g}" for k in sys.argv[2:]))' "$folder/$1/summary.json" \
        train_seconds test_accuracy train_images_per_second
}

part_machine() {
    python3 -m torch.utils.collect_env
    nvidia-smi topo -m
}

part_doctor() { "${torchrun[@]}" "$gpus" scripts/tools/doctor.py; }

part_tests() { python3 -m pytest -m gpu; }

# torch 2.15 has two classes for NCCL. Does the backward wait while gradients travel? If so, the
# class before is faster.
part_overlap() {
    local round backend backends
    ((gpus > 1)) || fail "with one GPU nothing travels"
    backends=$(python3 -c 'import torch.distributed as dist
print(*filter(dist.is_backend_available, ("nccl", "nccl-legacy")))')
    for round in 1 2 3; do
        for backend in $backends; do
            train "overlap-$backend-$round" "${torchrun[@]}" "$gpus" train_ddp.py --model resnet18 \
                --batch-size 32 --bucket-cap-mb 5 --max-steps 300 --epochs 100 \
                --backend "cpu:gloo,cuda:$backend"
        done
    done
}

part_benchmark() { python3 scripts/tools/benchmark.py -- "${data[@]}"; }

part_time() {
    local seed
    for seed in 0 1 2 3 4; do
        train "half-epoch-$seed" python3 train_single.py --devices 0 --epochs 0.5 --seed "$seed"
        train "epoch-of-768-$seed" python3 train_single.py --devices 0 --batch-size 768 --seed "$seed"
    done
}

if [[ -n ${REPORT_FOLDER:-} ]]; then # see below
    "part_$1"
    exit
fi
(($# > 0)) || set -- machine doctor tests overlap benchmark time
for part in "$@"; do declare -F "part_$part" >/dev/null || fail "there is no part $part (see above)"; done
failed=0
for part in "$@"; do
    printf '\n## %s\n\n' "$part"
    REPORT_FOLDER=$folder timeout --kill-after 30 600 scripts/gpu_check.sh "$part" 2>&1 || {
        failed=1
        echo "FAILED: $part"
    }
    [[ $part != "${*: -1}" ]] || exit "$failed"
done | tee "$folder/report.md"
