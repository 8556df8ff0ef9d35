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

# count_gpus PYTHON: print how many GPUs the torch of that Python can compute on. A driver may be too
# old for torch, and torch may have no code for a GPU. So each GPU adds two numbers here. Why one
# cannot is said on stderr.
count_gpus() {
    PYTHONWARNINGS=ignore "$1" -c '
import sys
try:
    import torch
except ImportError:
    print(0)
    sys.exit()
builds = "https://download.pytorch.org/whl"
here = f"torch {torch.__version__}"
listed = torch.cuda.device_count()  # asks NVML, which knows GPUs that the driver cannot serve
if listed and not torch.cuda.is_available():
    print(
        f"{here} lists {listed} GPUs but cannot use them: update the GPU driver (CUDA 13 needs 580"
        f" or later), or: pip install --index-url {builds}/cu126 \"torch<2.15\" torchvision",
        file=sys.stderr,
    )
    listed = 0
usable = []
for index in range(listed):
    try:
        assert (torch.ones(2, device=f"cuda:{index}") + 1).sum().item() == 4
        usable.append(index)
    except Exception as error:
        reason = str(error).splitlines()[0]
        if "no kernel image" in str(error):
            major, minor = torch.cuda.get_device_capability(index)
            advice = "install a newer torch"
            if (major, minor) < (7, 5):  # torch 2.14 is the last one with builds for CUDA 12
                advice = f"pip install --index-url {builds}/cu126 \"torch<2.15\" torchvision"
            reason = f"it has sm_{major}{minor}, for which {here} has no code: {advice}"
        print(f"GPU {index} cannot be used: {reason}", file=sys.stderr)
if 0 < len(usable) < listed:
    ids = ",".join(map(str, usable))
    print(f"to leave out the others: CUDA_VISIBLE_DEVICES={ids}", file=sys.stderr)
print(len(usable))'
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

# PyTorch's own builds, each in a folder: cpu takes 200 MB, and those with CUDA take 5 GB.
PYTORCH_BUILDS=https://download.pytorch.org/whl

# guess_backend: print the folder of the build for this machine, or cuda for the package index.
guess_backend() {
    local gpus
    if nvidia-smi -L >/dev/null 2>&1; then
        # The build of the package index has CUDA 13. It needs driver 580, and sm_75 or later.
        gpus=$(nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null ||
            nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null || true)
        awk -F ', ' '/^[0-9]/ && ($1 + 0 < 580 || (NF > 1 && $2 + 0 < 7.5)) { old = 1 }
            END { print (old ? "cu126" : "cuda") }' <<<"$gpus"
    elif [[ -e /dev/kfd ]]; then
        echo rocm
    else
        echo cpu
    fi
}

# choose_torch PYTHON: set backend and size, and have uv install this build. TORCH_BACKEND chooses
# one: cpu, cu126, rocm7.1, xpu (Intel) or another folder of PyTorch's builds. cuda is the build of
# the package index, which a machine takes that cannot reach the others.
choose_torch() {
    size="6 GB" backend=${TORCH_BACKEND:-$(guess_backend)}
    [[ ${TORCH_BACKEND:-cpu} =~ ^(cpu|cuda|xpu|cu[0-9]+|rocm[0-9.]+)$ ]] ||
        fail "TORCH_BACKEND=$TORCH_BACKEND is none of cpu, cuda, cu126, rocm7.1, xpu or their like"
    if [[ ${TORCH_BACKEND:-} == cuda ]] || ! "$1" -c 'import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=10)' $PYTORCH_BUILDS/cpu/torch/ 2>/dev/null; then
        backend=cuda
        return
    fi
    [[ $backend != cpu ]] || size="1 GB"
    # uv also finds GPUs of AMD and Intel, and the driver. It does not look at a GPU's age.
    export UV_TORCH_BACKEND=$backend
    if [[ -z ${TORCH_BACKEND:-} && $backend != cu126 ]]; then UV_TORCH_BACKEND=auto; fi
}

# install_with_pip FILE...: install requirements, and torch first, from the folder of its build.
install_with_pip() {
    local pip=("$PYTHON" -m pip install --quiet --disable-pip-version-check)
    if [[ $backend == rocm ]]; then
        say "Without uv, name the build for your AMD GPU: TORCH_BACKEND=rocm7.1, for example, as" \
            "https://pytorch.org/get-started/locally/ says, or cpu."
        return 1
    fi
    if [[ $backend != cuda ]]; then
        "${pip[@]}" --index-url "$PYTORCH_BUILDS/$backend" torch torchvision || return
    fi
    "${pip[@]}" "${@/#/-r}"
}

# is_recent PYTHON: return whether this Python is one of those that torch runs on.
is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# make_environment FILE...: set PYTHON to that of $VENV, and install these requirements there.
make_environment() {
    PYTHON=$VENV/bin/python
    refuse_dangling "$PYTHON"
    if satisfied "$PYTHON" "$@"; then
        return
    fi
    local base=${BASE_PYTHON:-python3} is_new=false size backend
    if [[ ! -e $VENV && ! -L $VENV ]]; then
        is_new=true
        is_recent "$base" ||
            fail "Python 3.11 or later is needed: install python3, or name one in BASE_PYTHON"
        # Removes only what this run makes. Half an environment would block the next run.
        trap 'rm -rf "$VENV"' EXIT
    elif [[ ! -f $VENV/pyvenv.cfg ]]; then
        fail "$VENV exists, but is not a virtual environment: name another folder in VENV"
    elif ! is_recent "$PYTHON"; then
        fail "$VENV has $("$PYTHON" --version 2>/dev/null || echo no Python), and Python 3.11 or" \
            "later is needed: remove it (rm -r $VENV), or name another folder in VENV"
    fi
    trap 'exit 130' INT TERM HUP
    choose_torch "$base"
    say "Installing ${*} in $VENV (about 2 minutes, $size)..."
    if command -v uv >/dev/null &&
        { ! $is_new || uv venv --quiet --python "$base" --allow-existing "$VENV"; } &&
        uv pip install --quiet --python "$PYTHON" "${@/#/-r}"; then
        :
    elif { ! $is_new || "$base" -m venv "$VENV"; } && install_with_pip "$@"; then
        :
    else
        say "The packages could not be installed. Install python3-venv (Debian, Ubuntu) or uv, and" \
            "check that the package registry can be reached. Then run this again."
        exit 1
    fi
    trap - EXIT INT TERM HUP
}
