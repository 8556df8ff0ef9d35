#!/usr/bin/env bash
# Make an environment and run every check: lint, format, types, tests.
#
#   ./scripts/test.sh          quick tests: two minutes on two cores
#   ./scripts/test.sh --all    the slow ones too: six minutes
#
# Other arguments go to pytest. MNIST_ROOT names a folder with the real MNIST, if there is one.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh
read_flags scripts/test.sh "$@"

make_environment requirements.txt requirements-dev.txt
PATH=$(cd "$VENV/bin" && pwd):$PATH
make check PYTHON=python PYTEST_FLAGS="${flags[*]/#--all/-m \"\"}"
