#!/usr/bin/env bash
# Make an environment and run every check: lint, format, types, tests.
#
#   ./scripts/test.sh          quick tests: three minutes on two cores
#   ./scripts/test.sh --all    the slow ones too: a quarter of an hour
#
# Other arguments go to pytest. MNIST_ROOT names a folder with the real MNIST, if there is one.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh
read_flags scripts/test.sh "$@"

make_environment requirements.txt requirements-dev.txt
PATH=$(cd "$VENV/bin" && pwd):$PATH
ruff check .
ruff format --check .
shellcheck scripts/*.sh scripts/slurm.sbatch .ci/run
mypy
# Three at once for two cores, since many tests wait for a while. The tests of a file share what
# they prepare, so a file stays together.
python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder "${flags[@]}"
