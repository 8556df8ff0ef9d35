# The Python environment of quickstart.sh, test.sh and gpu_check.sh, which source this file.
# shellcheck shell=bash

VENV=${VENV:-.venv}
PROMPT=mnist-data-parallel # in pyvenv.cfg it marks an environment that this file has made

fail() {
    echo "${0##*/}: error: $*" >&2
    exit 2
}

# satisfied PYTHON FILE...: return whether that Python has what the requirements files ask for.
satisfied() {
    "$1" - "${@:2}" 2>/dev/null <<'END'
import sys
from importlib.metadata import version
from packaging.requirements import Requirement  # which tensorboard brings

lines = [line.partition("#")[0].strip() for file in sys.argv[1:] for line in open(file)]
wanted = [Requirement(line) for line in lines if line]
sys.exit(not all(one.specifier.contains(version(one.name), prereleases=True) for one in wanted))
END
}

# install FILE...: make $VENV, if it is not there, and install the requirements files.
install() {
    local base=${BASE_PYTHON:-python3}
    if command -v uv >/dev/null; then
        # The build of torch that fits this machine's GPU and driver, or the one that a user names.
        export UV_TORCH_BACKEND=${UV_TORCH_BACKEND:-auto}
        { [[ -x $PYTHON ]] || uv venv --quiet --prompt "$PROMPT" --python "$base" "$VENV"; } &&
            uv pip install --quiet --python "$PYTHON" "${@/#/-r}" && return
    fi
    { [[ -x $PYTHON ]] || "$base" -m venv --prompt "$PROMPT" "$VENV"; } &&
        "$PYTHON" -m pip install --quiet --disable-pip-version-check "${@/#/-r}"
}

# make_environment FILE...: set PYTHON to that of $VENV, which has these requirements then.
make_environment() {
    PYTHON=$VENV/bin/python
    if satisfied "$PYTHON" "$@"; then
        return
    fi
    if [[ -e $VENV ]] && ! grep -qs "^prompt = .*$PROMPT" "$VENV/pyvenv.cfg"; then
        fail "$VENV lacks packages of $*, and is yours: install them there (pip install" \
            "${*/#/-r }), or name a new folder in VENV"
    fi
    echo "Installing ${*} in $VENV: minutes, and 6 GB (without a GPU 1 GB, if you have uv)" >&2
    install "$@" >"$VENV.log" 2>&1 ||
        fail "the packages could not be installed ($(tail -n 1 "$VENV.log")): is this Python 3.11" \
            "or later, is python3-venv installed, and can the package index be reached?"
    rm "$VENV.log"
}
