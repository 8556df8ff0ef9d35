# What has to hold before a change is shared; scripts/test.sh and CI run it in an environment of
# their own. PYTEST_FLAGS=--all adds the slow tests.
PYTHON ?= python3
# Three at once for two cores: many tests wait for a while. A file stays together, for what its
# tests share.
WORKERS ?= 3

.PHONY: check lint types test
check: lint types test

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	shellcheck scripts/*.sh .ci/run

types:
	$(PYTHON) -m mypy

test:
	$(PYTHON) -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_FLAGS)
