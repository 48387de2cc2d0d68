# Everything lives in .venv; `make help` lists the targets.

# The first Python on the PATH that MemServe supports.
PYTHON ?= $(firstword $(foreach python,python3 python3.12 python3.11,$(shell \
    $(python) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null \
    && echo $(python))))
# An index to ask besides pip's own, for torch's CPU build: see requirements/cpu.lock.
TORCH_INDEX ?=
# Which set-up: cpu, or cuda for GPUs. `make clean` first if .venv holds the other one.
LOCK ?= cpu
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --no-deps --disable-pip-version-check \
    $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# One thread per engine: several instances share the cores, and more threads make steps spike.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup up test check bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.dev-installed ## create .venv with everything in it (again only if a lock changed)

up: $(VENV)/.installed ## install what is missing and start MemServe; ARGS="--mode 1P2D-CC" passes flags
	@exec $(BIN)/memserve up $(ARGS)

test: $(VENV)/.dev-installed ## the whole test suite; ARGS="-k name" passes arguments to pytest
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.dev-installed ## format, lint, types, and the tests that take seconds
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/core tests/test_architecture.py

# These ask for more than a machine: a model's folder, a data set, a GPU.
ASK := $(patsubst %,bench/%.py,fig10_prefill fig11_transfer fig14_cost_model ops_blocks scale)
bench: $(VENV)/.dev-installed ## run every benchmark for this machine; results go to build/bench
	@mkdir -p build/bench
	@set -e; for script in $(sort $(filter-out bench/_% bench/gpu_% $(ASK),$(wildcard bench/*.py))); do \
	    name=$$(basename $$script .py); echo "== $$name"; \
	    $(BIN)/python -m bench.$$name --out build/bench/$$name.json $(ARGS); \
	done

clean: ## remove .venv, caches and build results
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { \
	    echo "make: no Python 3.11 or 3.12 on the PATH; name one: make setup PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: requirements/$(LOCK).lock pyproject.toml | $(BIN)/python
	$(PIP_INSTALL) -r requirements/$(LOCK).lock
	$(PIP_INSTALL) --no-build-isolation -e .
	@touch $@

$(VENV)/.dev-installed: requirements/dev.lock $(VENV)/.installed
	$(PIP_INSTALL) -r requirements/dev.lock
	@touch $@
