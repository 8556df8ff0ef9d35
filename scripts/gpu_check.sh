#!/usr/bin/env bash
# Run what only a machine with GPUs can show, in parts, and write a report that can be sent in.
#
#   ./scripts/gpu_check.sh [--data-dir DIR] [--only PART[,PART]...] [--dry-run]
#   ./scripts/gpu_check.sh --list
#
# It takes the python3 of this shell, if that has torch 2.9 or later, and installs nothing then. A
# part that lacks something is skipped, and says what. A part ends after ten minutes. The report,
# runs/gpu-check-<date>/report.md, grows with each part. The exit status is 1 if a part failed, and
# 2 if torch can compute on no GPU. --dry-run prints the commands.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh
read_flags scripts/gpu_check.sh "$@"

readonly LIMIT=600 # seconds of a part
# What each part shows, in the order in which they run.
PARTS=(
    "machine     driver, GPUs, their links and versions"
    "doctor      sums, latency and bandwidth between the GPUs"
    "overlap     whether DDP sends gradients while the backward computes, with each NCCL class"
    "launches    operations and kernels of a step"
    "time        seconds to 99 % on MNIST, with five seeds"
    "benchmark   one GPU, DP and DDP"
    "quickstart  the first command of the README"
    "tests       the tests that need GPUs"
    "nccl        those that talk over NCCL, with the class that torch 2.15 takes by default"
)
data_dir=data only=
set -- "${flags[@]}"
while (($#)); do
    name=${1%%=*}
    case $1 in
        --list) printf '%s\n' "${PARTS[@]}" && exit ;;
        --data-dir=* | --only=*) value=${1#*=} ;;
        --data-dir | --only) value=${2:-} && shift ;;
        *) fail "$1 is none of its flags (--help)" ;;
    esac
    case $name in
        --data-dir) data_dir=$value && [[ -n $value ]] || fail "--data-dir wants a folder after it" ;;
        --only) only=$value && [[ -n $value ]] || fail "--only wants a part after it: see --list" ;;
    esac
    shift $(($# > 0))
done
for name in ${only//,/ }; do
    [[ " ${PARTS[*]%% *} " == *" $name "* ]] || fail "$name is no part: see --list"
done

# has_torch PYTHON: return whether that Python has a torch that this project runs on.
has_torch() {
    command -v "$1" >/dev/null && is_recent "$1" && "$1" -c 'import sys, torch
sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9))' 2>/dev/null
}

# lacks MODULE...: print which of these modules there are not.
lacks() {
    "$PYTHON" -c 'import sys
from importlib.util import find_spec
print(*[name for name in sys.argv[1:] if find_spec(name) is None])' "$@"
}

PYTHON=$(command -v python3 || true)
if ! has_torch "$PYTHON"; then
    # An environment takes 6 GB, so a driver has to be there first. The output is read to its end,
    # or nvidia-smi might be killed by SIGPIPE, which counts as a failure here.
    [[ -e /dev/kfd || $(nvidia-smi --list-gpus 2>/dev/null) == *GPU* ]] ||
        fail "nvidia-smi lists no GPU on this machine, and there is nothing to check"
    $dry_run || make_environment requirements.txt requirements-dev.txt
fi
gpus=$(count_gpus "$PYTHON")
((gpus > 0)) || fail "torch can use no GPU (a CPU build, CUDA_VISIBLE_DEVICES, or the driver)"
missing=$(lacks numpy tqdm tensorboard)
[[ -z $missing ]] || fail "$PYTHON lacks $missing: $PYTHON -m pip install $missing"

run_dir=runs/gpu-check-$(date +%Y%m%d-%H%M%S)
report=$run_dir/report.md
# torchrun prints a banner if it sets this variable itself. The scripts divide the cores themselves.
launcher=(env "OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}")
launcher+=("$PYTHON" -m torch.distributed.run --standalone --nproc_per_node)
pair=$((gpus > 1 ? 2 : 1))
classes=(1 0)
"$PYTHON" -c 'from torch.distributed import ProcessGroupNCCL2' 2>/dev/null || classes=("")

# note WORDS...: write a line into the report, and on the terminal.
note() { if ! $dry_run; then printf '\n%s\n' "$*" | tee -a "$report"; fi; }

# skip WORDS...: note why this part shows less, or nothing.
skip() { note "Skipped: $*" && state="skipped: $*"; }

# show COMMAND...: run a command in the time that is left, on the terminal and into the report.
show() {
    local left=$((part_end - SECONDS)) status=0 line
    if $dry_run; then
        printf '%q ' "$@" && printf '\n' && return
    fi
    printf '\n```\n$ %s\n' "$*" | tee -a "$report"
    if ((left > 0)); then
        timeout --foreground --kill-after=30 "$left" "$@" 2>&1 | tee -a "$report" || status=$?
    else
        status=124
    fi
    printf '```\n' >>"$report"
    if ((status != 0)) && [[ $state != failed* ]]; then
        line=$*
        state="failed: ${line%%$'\n'*}"
    fi
    ((status != 124)) || note "This did not end within the ten minutes of its part."
}

# only_one WORDS...: if there is one GPU, note what its figures cannot show.
only_one() {
    ((gpus > 1)) || note "One GPU: $*, so what GPUs send to each other is not in these figures."
}

part_machine() {
    local smi=nvidia-smi topology=(nvidia-smi topo -m)
    # ROCm has /dev/kfd, but no nvidia-smi.
    [[ ! -e /dev/kfd ]] || smi=rocm-smi topology=(rocm-smi --showtopo)
    show "$PYTHON" -c 'import platform, torch
print(platform.platform(), "Python", platform.python_version(), "torch", torch.__version__)
print("CUDA", torch.version.cuda, "HIP", torch.version.hip, "NCCL", torch.cuda.nccl.version())
print("code for", *torch.cuda.get_arch_list())
for index in range(torch.cuda.device_count()):
    major, minor = torch.cuda.get_device_capability(index)
    print(index, torch.cuda.get_device_name(index), f"sm_{major}{minor}")'
    show "$smi"
    ((gpus == 1)) || show "${topology[@]}"
}

part_doctor() {
    only_one "one rank has nobody to send to"
    show "${launcher[@]}" "$gpus" scripts/tools/doctor.py "${data[@]}"
}

part_overlap() {
    local class chosen run model=resnet18
    [[ -z $(lacks torchvision) ]] || model=basic # which has two buckets
    if ((gpus == 1)); then
        skip "it takes two GPUs to see when gradients are sent"
        return
    fi
    for class in "${classes[@]}"; do
        chosen=(env ${class:+"TORCH_DIST_USE_NCCL2=$class"} "${launcher[@]}" 2)
        # It says when this torch sends, if sending takes long enough.
        show "${chosen[@]}" scripts/tools/scaling.py --model $model --batch-size 16
        # The trace sees it over any link: how much of the communication is hidden?
        run=$run_dir/overlap$class
        show "${chosen[@]}" train_ddp.py "${data[@]}" --no-progress --model $model \
            --batch-size 16 --bucket-cap-mb 5 --max-steps 24 --profile --run-dir "$run"
        show "$PYTHON" scripts/tools/trace.py "$run"
    done
}

part_launches() {
    local name command
    only_one "DataParallel and DDP have one device each"
    for name in single dp ddp; do
        command=("$PYTHON")
        [[ $name != ddp ]] || command=("${launcher[@]}" "$pair")
        command+=("train_$name.py" "${data[@]}" --no-progress --no-tensorboard --profile)
        [[ $name != single ]] || command+=(--devices 0)
        show "${command[@]}" --max-steps 24 --run-dir "$run_dir/launches-$name"
        show "$PYTHON" scripts/tools/trace.py "$run_dir/launches-$name"
    done
}

part_time() {
    local seed folders
    if [[ ${data[1]} != mnist ]]; then
        skip "it takes MNIST: name its folder by --data-dir"
        return
    fi
    for flags in "--epochs 0.5" "--batch-size 768 --epochs 1"; do
        folders=()
        for seed in 0 1 2 3 4; do
            folders+=("$run_dir/time-${flags//[- ]/}-$seed")
            # shellcheck disable=SC2086 # several flags
            show "$PYTHON" train_single.py "${data[@]}" --devices 0 --no-progress --no-tensorboard \
                $flags --seed $seed --run-dir "${folders[-1]}"
        done
        show "$PYTHON" -c 'import json, os, statistics, sys
paths = [f"{folder}/summary.json" for folder in sys.argv[2:]]
runs = [json.load(open(path)) for path in paths if os.path.exists(path)]
print(f"train_single.py {sys.argv[1]}: mean of {len(runs)} seeds, least to most")
for name, unit, factor in (("train_seconds", "s", 1), ("test_accuracy", "%", 100)):
    found = [factor * run[name] for run in runs]
    print(f"{name} {statistics.mean(found):.2f} {unit}, {min(found):.2f} to {max(found):.2f}")' \
            "$flags" "${folders[@]}"
    done
}

part_benchmark() {
    only_one "DataParallel and DDP have one device each"
    show "$PYTHON" scripts/tools/benchmark.py --quick "${data[@]}" --output "$run_dir"
}

part_quickstart() {
    if satisfied "$PYTHON" requirements.txt; then
        show scripts/quickstart.sh "${data[@]}"
    else
        skip "$PYTHON lacks a package of requirements.txt ($(lacks torchvision packaging))"
    fi
}

# run_tests MARK [VARIABLE]: run the tests with this mark.
run_tests() {
    local files missing workers=()
    missing=$(lacks pytest pytest_timeout psutil yaml markdown_it)
    if [[ -n $missing ]]; then
        skip "the tests need $missing (requirements-dev.txt)"
        return
    fi
    [[ -n $(lacks xdist) ]] || workers=(--numprocesses 4 --dist worksteal)
    mapfile -t files < <(grep -lE 'mark\.(gpu|nccl)' tests/test_*.py)
    show env "${@:2}" "$PYTHON" -m pytest "${workers[@]}" -m "$1" "${files[@]}"
}

part_tests() { run_tests gpu; }

part_nccl() {
    if ((${#classes[@]} == 1)); then
        skip "this torch has one NCCL class"
        return
    fi
    # The scripts choose the class before it, as long as nobody sets this.
    run_tests nccl TORCH_DIST_USE_NCCL2=1
}

dataset=mnist
if ! $dry_run; then
    mkdir -p "$run_dir"
    printf '# GPU check of %s, %s\n' \
        "$(git describe --always --dirty 2>/dev/null || echo a copy)" "$(date)" >"$report"
    if ! why=$("$PYTHON" scripts/tools/prepare_data.py mnist --data-dir "$data_dir" 2>&1); then
        dataset=synthetic
        note "No MNIST (${why##*$'\n'}): drawn digits instead (--dataset synthetic)."
    fi
fi
data=(--dataset "$dataset" --data-dir "$data_dir")
results=() failed=false
for part in "${PARTS[@]%% *}"; do
    [[ -z $only || ,$only, == *,$part,* ]] || continue
    note "## ${part^}"
    begin=$SECONDS part_end=$((SECONDS + LIMIT)) state=complete
    "part_$part"
    results+=("- $part: $state ($((SECONDS - begin)) s)")
    [[ $state != failed* ]] || failed=true
done
$dry_run && exit
note "## Summary"
note "$(printf '%s\n' "${results[@]}")"
say $'\n'"The report is in $report. Reports are welcome."
if $failed; then exit 1; fi
