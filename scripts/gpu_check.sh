#!/usr/bin/env bash
# Run what only a machine with GPUs can run: the GPU tests, the benchmark, and the time to 99 %.
#
#   ./scripts/gpu_check.sh [--data-dir DIR] [--dry-run]
#
# The check takes some twenty minutes and writes one report, runs/gpu-check-<date>/report.md. The
# exit status is 1 if a part failed, and 2 if torch can use no GPU. --dry-run prints the commands.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh
read_flags scripts/gpu_check.sh "$@"

data_dir=data
set -- "${flags[@]}"
while (($#)); do
    case $1 in
        --data-dir) data_dir=${2:?--data-dir names a folder} && shift ;;
        *) fail "$1 is none of its flags (--help)" ;;
    esac
    shift
done

# This comes before an environment of 6 GB is made. ROCm has /dev/kfd, but no nvidia-smi.
[[ -e /dev/kfd ]] || nvidia-smi --list-gpus 2>/dev/null | grep -q '^GPU' ||
    fail "nvidia-smi lists no GPU on this machine, and there is nothing to check"
PYTHON=$(command -v python3 || true)
dataset=mnist
run_dir=runs/gpu-check-$(date +%Y%m%d-%H%M%S)
report=$run_dir/report.md
if ! $dry_run; then
    satisfied "$PYTHON" requirements.txt requirements-dev.txt ||
        make_environment requirements.txt requirements-dev.txt
fi
gpus=$(count_gpus "$PYTHON")
((gpus > 0)) || fail "torch can use no GPU (a CPU build, CUDA_VISIBLE_DEVICES, or the driver)"
if ! $dry_run; then
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

# One epoch each, at the same global batch.
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
say $'\n'"The report is in $report."
if ((${#failed[@]})); then
    say "Failed: $(printf '%s; ' "${failed[@]}")"
    exit 1
fi
