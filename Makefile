# `make check` is every check. scripts/test.sh calls it in an environment of its own.
# PYTEST_FLAGS='-m ""' adds the slow tests.
PYTHON ?= python3
# Three test processes for two cores, since many tests wait for a while. A process that has finished
# takes tests from the others, so that no file of long tests runs on alone at the end.
WORKERS ?= 3

.PHONY: check
check:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	shellcheck -x scripts/*.sh scripts/slurm.sbatch .ci/run
	$(PYTHON) -m mypy
	$(PYTHON) -m pytest --numprocesses $(WORKERS) --dist worksteal $(PYTEST_FLAGS)
