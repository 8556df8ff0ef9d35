# What the scripts share: flags, errors, GPUs, and a Python environment. They source this file.
# shellcheck shell=bash

VENV=${VENV:-.venv}

say() { printf '%s\n' "$*" >&2; }

# fail WORDS...: end with one line and status 2.
fail() {
    say "${0##*/}: error: $*"
    exit 2
}

# read_flags SCRIPT FLAG...: set dry_run and flags. --help prints the comment that opens SCRIPT.
# shellcheck disable=SC2034 # the scripts read them
read_flags() {
    local script=$1 flag
    dry_run=false flags=()
    for flag in "${@:2}"; do
        case $flag in
            -h | --help) sed -nE '1d; /^set /q; s/^#( |$)//p' "$script" && exit ;;
            --dry-run) dry_run=true ;;
            *) flags+=("$flag") ;;
        esac
    done
}

# rank_table NODES PROCESSES: print which ranks run on each node.
rank_table() {
    local node
    printf '\n\nnode  local ranks  ranks\n'
    for ((node = 0; node < $1; node++)); do
        printf '%-4s  %-11s  %s\n' "$node" "0-$(($2 - 1))" "$((node * $2))-$((node * $2 + $2 - 1))"
    done
}

# count_gpus PYTHON: print how many GPUs the torch of that Python can use. torch may list more GPUs
# than it can use, because NVML counts GPUs for which the driver is too old.
count_gpus() {
    PYTHONWARNINGS=ignore "$1" -c '
import sys
try:
    import torch
except ImportError:
    print(0)
    sys.exit()
listed = torch.cuda.device_count()
usable = listed if torch.cuda.is_available() else 0
if listed > usable:
    print(
        f"torch {torch.__version__} lists {listed} GPUs but cannot use them: update the GPU driver,"
        " or install a torch that is built for it (https://pytorch.org/get-started/locally/)",
        file=sys.stderr,
    )
print(usable)'
}

# refuse_dangling PYTHON: fail if PYTHON is a link to an interpreter that no longer exists.
refuse_dangling() {
    if [[ -L $1 && ! -e $1 ]]; then
        fail "$1 leads to a Python that is gone, because Python was upgraded or removed: remove" \
            "the environment (rm -r ${1%/bin/*}), and run ./scripts/quickstart.sh to make it again"
    fi
}

# satisfied PYTHON FILE...: return whether that Python satisfies the requirements files.
satisfied() {
    command -v "$1" >/dev/null || return 1
    "$1" - "${@:2}" <<'PYTHON_CODE'
import sys
from importlib.metadata import version

try:
    from packaging.requirements import Requirement  # tensorboard depends on it

    lines = [line.strip() for file in sys.argv[1:] for line in open(file)]
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    found = [one.specifier.contains(version(one.name), prereleases=True) for one in wanted]
except ImportError:  # packaging itself, or a package of the list
    sys.exit(1)
sys.exit(sys.version_info < (3, 11) or not all(found))
PYTHON_CODE
}

# Where PyTorch keeps its builds without CUDA: 200 MB, where the one with CUDA takes 5 GB.
CPU_BUILDS=https://download.pytorch.org/whl/cpu

# choose_torch PYTHON: have pip and uv install torch without CUDA if TORCH_BACKEND is cpu, or if it is
# not set and there is no GPU. TORCH_BACKEND=cuda takes the build of the package index, and so does
# a machine that cannot reach the other one.
choose_torch() {
    local backend=${TORCH_BACKEND:-cpu}
    case ${TORCH_BACKEND:-} in
        cpu | cuda) ;;
        "") if nvidia-smi -L >/dev/null 2>&1; then backend=cuda; fi ;;
        *) fail "TORCH_BACKEND=$TORCH_BACKEND is neither cpu nor cuda" ;;
    esac
    size="6 GB"
    if [[ $backend == cpu ]] && "$1" -c 'import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=10)' $CPU_BUILDS/torch/ 2>/dev/null; then
        export UV_TORCH_BACKEND=cpu PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:-} $CPU_BUILDS"
        size="1 GB"
    fi
}

# make_environment FILE...: set PYTHON to that of $VENV, and install these requirements there.
make_environment() {
    PYTHON=$VENV/bin/python
    refuse_dangling "$PYTHON"
    if satisfied "$PYTHON" "$@"; then
        return
    fi
    local base=${BASE_PYTHON:-python3} is_new=false size
    if [[ ! -e $VENV && ! -L $VENV ]]; then
        is_new=true
        "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
            fail "Python 3.11 or later is needed: install python3, or name one in BASE_PYTHON"
        # Removes only what this run makes. Half an environment would block the next run.
        trap 'rm -rf "$VENV"' EXIT
    elif [[ ! -f $VENV/pyvenv.cfg ]]; then
        fail "$VENV exists, but is not a virtual environment: name another folder in VENV"
    fi
    trap 'exit 130' INT TERM HUP
    choose_torch "$base"
    say "Installing ${*} in $VENV (about 2 minutes, $size)..."
    if command -v uv >/dev/null &&
        { ! $is_new || uv venv --quiet --python "$base" --allow-existing "$VENV"; } &&
        uv pip install --quiet --python "$PYTHON" "${@/#/-r}"; then
        :
    elif { ! $is_new || "$base" -m venv "$VENV"; } &&
        "$PYTHON" -m pip install --quiet --disable-pip-version-check "${@/#/-r}"; then
        :
    else
        say "The packages could not be installed. Install python3-venv (Debian, Ubuntu) or uv, and" \
            "check that the package registry can be reached. Then run this again."
        exit 1
    fi
    trap - EXIT INT TERM HUP
}
