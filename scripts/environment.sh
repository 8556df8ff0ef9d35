# Find or make a Python environment. Sourced by quickstart.sh and test.sh; sets PYTHON.
# shellcheck shell=bash

VENV=${VENV:-.venv}

say() { printf '%s\n' "$*" >&2; }

# satisfied PYTHON FILE...: whether that Python has what the requirements files ask for.
satisfied() {
    command -v "$1" >/dev/null || return 1
    "$1" - "${@:2}" <<'PYTHON_CODE'
import re
import sys
from importlib.metadata import PackageNotFoundError, version


def numbers(text):
    return [int(n) for n in re.findall(r"\d+", text.partition("+")[0])]


if sys.version_info < (3, 10):
    sys.exit(1)
for file in sys.argv[1:]:
    for line in open(file):
        match = re.match(r"([\w-]+)(>=|==)([\d.]+)", line)
        if not match:
            continue
        name, relation, wanted = match.groups()
        try:
            found = numbers(version(name))
        except PackageNotFoundError:
            sys.exit(1)
        if found < numbers(wanted) or (relation == "==" and found != numbers(wanted)):
            sys.exit(1)
PYTHON_CODE
}

# make_environment FILE...: make $VENV with these requirements, unless it has them already.
make_environment() {
    PYTHON=$VENV/bin/python
    if satisfied "$PYTHON" "$@"; then
        return
    fi
    local base=${BASE_PYTHON:-python3} file requirements=()
    for file in "$@"; do requirements+=(-r "$file"); done
    if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        say "Python 3.10 or later is needed: install python3, or name one in BASE_PYTHON."
        exit 2
    fi
    say "Making an environment in $VENV and installing ${*} (about 2 minutes, 6 GB)..."
    # What an interrupt leaves half-made would be taken for an environment the next time.
    trap 'rm -rf "$VENV"; exit 130' INT TERM
    if command -v uv >/dev/null && uv venv --quiet --python "$base" --allow-existing "$VENV" \
        && uv pip install --quiet --python "$PYTHON" "${requirements[@]}"; then
        :
    elif "$base" -m venv "$VENV" \
        && "$PYTHON" -m pip install --quiet --disable-pip-version-check "${requirements[@]}"; then
        :
    else
        rm -rf "$VENV"
        say "No environment could be made. Install python3-venv (Debian, Ubuntu) or uv, and see" \
            "that the package registry can be reached; then run this again."
        exit 1
    fi
    trap - INT TERM
}
