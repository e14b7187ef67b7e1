# `make` alone lists the targets. Everything happens inside .venv; a second run of any target finds it ready.
PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test suite test-gpu lint style types format bench tree clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## create .venv and install the package with all it needs (PYTHON=python3.12 picks another Python)

# Bytecode is written when a module is first used: to compile all of torch and Ray here takes as long as the rest.
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) was not found; install Python 3.11 or newer, or name yours: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"error: rebased needs Python 3.11 or newer and $(PYTHON) is {v[0]}.{v[1]}; name a newer one: make PYTHON=python3.12")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv || { echo "error: $(PYTHON) cannot create environments; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: setup ## train ReBased, Based and attention on a small MQAR, then write runs/demo/report.html (3 minutes)
	$(BIN)/rebased demo

# One thread a worker: workers that each take every core are slower together than one alone. Bytecode is kept for the
# many processes that tests start. Stolen work keeps neighbours, and so what they share, in one worker.
# mypy takes one core, so it goes beside the tests.
test: setup style ## lint, types and the whole test suite
	@$(MAKE) --no-print-directory -j2 types suite

suite: setup
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-gpu: setup ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

lint: style types ## ruff and mypy, changing nothing

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

format: setup ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## measure the operator on this machine's CPU; the result is appended to benchmarks/
	$(BIN)/python benchmarks/poly_cpu.py

tree: setup ## write the README's file tree from the first line of each file
	$(BIN)/python docs/make_tree.py

clean: ## remove .venv and caches; runs/ stays
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
