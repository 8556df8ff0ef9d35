# `make check` is every check. scripts/test.sh calls it in an environment of its own.
# PYTEST_FLAGS='-m ""' adds the slow tests.
PYTHON ?= python3
# Three test processes for two cores, since many tests wait for a while. Tests of one xdist_group,
# which share costly runs, are in one process.
WORKERS ?= 3

.PHONY: check
check:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	shellcheck -x scripts/*.sh scripts/slurm.sbatch .ci/run
	$(PYTHON) -m mypy
	$(PYTHON) -m pytest --numprocesses $(WORKERS) --dist loadgroup $(PYTEST_FLAGS)
