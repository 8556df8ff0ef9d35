#!/usr/bin/env bash
# Make an environment in .venv (or VENV), and run every check: lint, format, types, tests.
#
#   ./scripts/test.sh          quick tests: two minutes on two cores
#   ./scripts/test.sh --all    the slow ones too: eight minutes
#
# Other arguments go to pytest. MNIST_ROOT names a folder with the real MNIST, if there is one.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

make_environment requirements.txt requirements-dev.txt
PATH=$(cd "$VENV/bin" && pwd):$PATH
flags=()
for flag in "$@"; do
    if [[ $flag == --all ]]; then flags+=(-m ""); else flags+=("$flag"); fi
done
make check PYTHON=python PYTEST_FLAGS="${flags[*]@Q}"
