#!/usr/bin/env bash
# Run what only a machine with GPUs can run: the GPU tests, the quick start and the benchmark.
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

PYTHON=$(command -v python3 || true)
run_dir=runs/gpu-check-$(date +%Y%m%d-%H%M%S)
report=$run_dir/report.md
smi=nvidia-smi topology=(nvidia-smi topo -m)
# ROCm has /dev/kfd, but no nvidia-smi.
[[ ! -e /dev/kfd ]] || smi=rocm-smi topology=(rocm-smi --showtopo)
if ! satisfied "$PYTHON" requirements.txt requirements-dev.txt; then
    # An environment takes 6 GB, so a driver has to be there first. The output is read to its end,
    # or nvidia-smi might be killed by SIGPIPE, which counts as a failure here.
    [[ -e /dev/kfd || $(nvidia-smi --list-gpus 2>/dev/null) == *GPU* ]] ||
        fail "nvidia-smi lists no GPU on this machine, and there is nothing to check"
    $dry_run || make_environment requirements.txt requirements-dev.txt
fi
gpus=$(count_gpus "$PYTHON")
((gpus > 0)) || fail "torch can use no GPU (a CPU build, CUDA_VISIBLE_DEVICES, or the driver)"
dataset=mnist
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

part "Driver" "$smi"
((gpus == 1)) || part "Topology" "${topology[@]}"
part "Doctor" "${launcher[@]}" "$gpus" scripts/tools/doctor.py "${data[@]}"
part "Tests" "$PYTHON" -m pytest -m gpu
# From torch 2.15 on, "nccl" is another class, and this variable brings the former one back.
part "Tests with the former NCCL backend" env TORCH_DIST_USE_NCCL2=0 "$PYTHON" -m pytest -m nccl
part "Benchmark" "$PYTHON" scripts/tools/benchmark.py --quick "${data[@]}" --output "$run_dir"
part "Quick start" scripts/quickstart.sh "${data[@]}"
if ((gpus > 1)); then
    # Does the newer backend send a bucket beside the backward? "hidden" says how much it does.
    for nccl2 in 1 0; do
        part "Overlap of buckets, TORCH_DIST_USE_NCCL2=$nccl2" env TORCH_DIST_USE_NCCL2=$nccl2 \
            "${launcher[@]}" 2 train_ddp.py "${data[@]}" --no-progress --model resnet18 \
            --bucket-cap-mb 5 --max-steps 30 --profile --run-dir "$run_dir/buckets$nccl2"
        part "Its trace" "$PYTHON" scripts/tools/trace.py "$run_dir/buckets$nccl2"
    done
fi

$dry_run && exit
say $'\n'"The report is in $report. Reports are welcome."
if ((${#failed[@]})); then
    say "Failed: $(printf '%s; ' "${failed[@]}")"
    exit 1
fi
