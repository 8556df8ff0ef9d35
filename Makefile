# `make check` is every check that needs no GPU. scripts/test.sh makes an environment and calls it.
# PYTEST_FLAGS='-m ""' adds the slow tests. .ci/run calls scripts/test.sh --all and `make gpu-tests`.
PYTHON ?= $(firstword $(wildcard .venv/bin/python) python3)
# Three test processes for two cores, since many tests wait for a while. A process that has finished
# takes tests from the others, so that no file of long tests runs on alone at the end.
WORKERS ?= 3
# shellcheck is installed beside Python.
export PATH := $(PATH):$(CURDIR)/.venv/bin
PYTEST = $(PYTHON) -m pytest --numprocesses $(WORKERS) --dist worksteal

.PHONY: check gpu-tests
check:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	shellcheck -x scripts/*.sh scripts/slurm.sbatch .ci/run tests/pretended_gpus/nvidia-smi
	$(PYTHON) -m mypy
	$(PYTEST) $(PYTEST_FLAGS)

# The tests that need two GPUs, on a machine without one. The status 77 means that pretended GPUs
# cannot be built here, and that a line has said why.
gpu-tests:
	$(PYTHON) tests/pretended_gpus/run.py 2 $(PYTEST) -p tests.pretended_gpus.no_skips -m gpu \
		|| [ $$? -eq 77 ]
