# `make check` is every check. scripts/test.sh calls it in an environment of its own.
# PYTEST_FLAGS='-m ""' adds the slow tests.
PYTHON ?= python3
# Four at once for two cores, since many tests wait for a while. Who has finished takes tests from
# the others: no file of long waits runs on alone at the end.
WORKERS ?= 4

.PHONY: check
check:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	shellcheck scripts/*.sh scripts/slurm.sbatch .ci/run
	$(PYTHON) -m mypy
	$(PYTHON) -m pytest --numprocesses $(WORKERS) --dist worksteal $(PYTEST_FLAGS)
