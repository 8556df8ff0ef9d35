# `make check` is every check. scripts/test.sh calls it in an environment of its own.
# PYTEST_FLAGS=--all adds the slow tests.
PYTHON ?= python3
# Three at once for two cores, since many tests wait for a while. The tests of a file share what
# they prepare, so a file stays together.
WORKERS ?= 3

.PHONY: check
check:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	shellcheck scripts/*.sh scripts/slurm.sbatch .ci/run
	$(PYTHON) -m mypy
	$(PYTHON) -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_FLAGS)
