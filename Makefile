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

# Which small changes of a module does no test notice? Not part of `check`, since each change takes a
# run of the tests. It works in a copy of what is committed.
#
#   make mutants MODULE=utils/optim.py TESTS="tests/test_optim.py tests/test_effects.py"
MODULE ?= utils/optim.py
TESTS ?= tests/test_optim.py
MUTANTS ?= /tmp/mutants

.PHONY: mutants
mutants:
	rm -rf $(MUTANTS) && mkdir -p $(MUTANTS)
	git archive HEAD | tar -x -C $(MUTANTS)
	sed -i 's#MODULE"#$(MODULE)"#; s#PYTHON#$(PYTHON)#; s#TESTS#$(TESTS)#' $(MUTANTS)/tests/mutants.toml
	cd $(MUTANTS) && cosmic-ray init tests/mutants.toml session.sqlite
	cd $(MUTANTS) && cr-filter-operators session.sqlite tests/mutants.toml
	cd $(MUTANTS) && cosmic-ray exec tests/mutants.toml session.sqlite
	cd $(MUTANTS) && cr-report session.sqlite --surviving-only --show-diff
