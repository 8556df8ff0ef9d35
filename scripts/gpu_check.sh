#!/usr/bin/env bash
# Run what only a machine with GPUs can: its tests, the benchmark, and the time to 99 %.
#
#   ./scripts/gpu_check.sh [--data-dir DIR] [--dry-run]
#
# Takes some twenty minutes and writes one report to hand on, runs/gpu-check-<date>/report.md. Ends
# with status 1 if a part failed, and with 2 if there is no GPU. --dry-run prints the commands.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh

data_dir=data dry_run=false
while (($#)); do
    case $1 in
        -h | --help) sed -n '2,7s/^# \{0,1\}//p' scripts/gpu_check.sh && exit ;;
        --dry-run) dry_run=true ;;
        --data-dir) data_dir=${2:?--data-dir names a folder} && shift ;;
        *) say "gpu_check.sh: error: $1 is none of its flags (--help)" && exit 2 ;;
    esac
    shift
done

gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)
if ((gpus == 0)); then
    say "gpu_check.sh: error: nvidia-smi lists no GPU on this machine, and there is nothing to check"
    exit 2
fi
PYTHON=$(command -v python3 || true)
dataset=mnist
run_dir=runs/gpu-check-$(date +%Y%m%d-%H%M%S)
report=$run_dir/report.md
if ! $dry_run; then
    satisfied "$PYTHON" requirements.txt requirements-dev.txt ||
        make_environment requirements.txt requirements-dev.txt
    # Those that CUDA_VISIBLE_DEVICES leaves, and that this torch can use.
    gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
    if ((gpus == 0)); then
        say "gpu_check.sh: error: torch sees no GPU (a CPU build, CUDA_VISIBLE_DEVICES, or the driver)"
        exit 2
    fi
    mkdir -p "$run_dir"
    if ! "$PYTHON" scripts/tools/prepare_data.py mnist --data-dir "$data_dir"; then
        dataset=synthetic
    fi
    printf '# GPU check of %s, %s\n' "$(git describe --always --dirty 2>/dev/null)" "$(date)" >"$report"
fi
data=(--dataset "$dataset" --data-dir "$data_dir")
launcher=("$PYTHON" -m torch.distributed.run --standalone --nproc_per_node)

failed=()
# part TITLE COMMAND...: run a command, on the terminal and into the report.
part() {
    local title=$1
    shift
    if $dry_run; then
        printf '%q ' "$@" && printf '\n' && return
    fi
    printf '\n## %s\n\n```\n$ %s\n' "$title" "$*" | tee -a "$report"
    "$@" 2>&1 | tee -a "$report" || failed+=("$title")
    printf '```\n' >>"$report"
}

part "Driver" nvidia-smi
((gpus == 1)) || part "Topology" nvidia-smi topo -m
part "Doctor" "${launcher[@]}" "$gpus" scripts/tools/doctor.py "${data[@]}"
part "Tests" "$PYTHON" -m pytest -m gpu --all
part "Benchmark" "$PYTHON" scripts/tools/benchmark.py --quick "${data[@]}" --output "$run_dir"

# One epoch each, at the same global batch: it ends above 99 %.
runs=("$run_dir/single")
part "One GPU" "$PYTHON" train_single.py "${data[@]}" --no-progress --batch-size 96 \
    --run-dir "$run_dir/single"
if ((gpus > 1)); then
    two=("${data[@]}" --no-progress --batch-size 48 --devices "0,1")
    part "DataParallel" "$PYTHON" train_dp.py "${two[@]}" --run-dir "$run_dir/dp"
    part "DistributedDataParallel" "${launcher[@]}" 2 train_ddp.py "${two[@]}" \
        --run-dir "$run_dir/ddp"
    runs+=("$run_dir/dp" "$run_dir/ddp")
fi
part "Time to 99 %" "$PYTHON" scripts/tools/compare.py "${runs[@]}"

$dry_run && exit
say "" "The report is in $report."
if ((${#failed[@]})); then
    say "Failed: $(printf '%s; ' "${failed[@]}")"
    exit 1
fi
