# `make` alone lists the targets. Everything happens inside .venv; a second run of any target finds it ready.
PYTHON ?= python3
WORKERS ?= 4
MINUTES ?= 5
SEED ?= 0
VERSIONS ?= lowest-direct
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt
# One environment, four stamps. Each adds packages to what is there and reinstalls none of it.
DEMO := .venv/.ready-demo
TEST := .venv/.ready-test
TEST_ALL := .venv/.ready-test-all
DOCS := .venv/.ready-docs
# Four workers on two cores, because many tests wait for processes that they start. One thread per worker: workers that each
# take every core are slower together than one alone. Bytecode is kept for the
# many processes that tests start. Stolen work keeps neighbours, and so what they share, in one worker.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all suite suite-all torture test-gpu test-versions kernels lint style types format bench docs figures notebook tree clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(TEST) ## create .venv with what tests and development need (PYTHON=python3.12 picks another Python)

# Bytecode is written when a module is first used: to compile all of torch here takes as long as the rest.
$(DEMO): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) was not found; install Python 3.11 or newer, or name yours: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"error: rebased needs Python 3.11 or newer and $(PYTHON) is {v[0]}.{v[1]}; name a newer one: make PYTHON=python3.12")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv || { echo "error: $(PYTHON) cannot create environments; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(PIP) -e ".[lab]"
	@touch $@

# The package is installed already, so pip installs only what the extra adds. Then one process writes the bytecode of all
# that tests import: four workers that begin without it each compile all of torch.
$(TEST): $(DEMO)
	$(PIP) "rebased[dev]"
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --collect-only -qq >/dev/null || true
	@touch $@

$(TEST_ALL): $(TEST)
	$(PIP) "rebased[test-all]"
	@touch $@

$(DOCS): $(DEMO)
	$(PIP) "rebased[docs]"
	@touch $@

demo: $(DEMO) ## five small models on one recall task, on a page: runs/demo/report.html (2 to 3 minutes)
	$(BIN)/rebased demo

# mypy takes one core, so it runs beside the tests.
test: style ## ruff, mypy and the tests: what CI runs
	@$(MAKE) --no-print-directory -j2 types suite

test-all: style $(TEST_ALL) ## make test, and the heavier tests that a release needs; on 8 cores or more, all kernels too
	@$(MAKE) --no-print-directory -j2 types suite-all
	@if [ "$$(nproc)" -ge 8 ]; then $(MAKE) --no-print-directory kernels; \
	else echo "this machine has fewer than 8 cores: all kernels are not compiled (make kernels does so, in hours)"; fi

kernels: $(TEST) ## compile every class of kernel for all architectures; goes on where tests/kernels/compiled.json ends
	PYTHONPATH=src:tests $(BIN)/python -m kernels.compile_classes

suite: $(TEST)
	$(PYTEST)

suite-all: $(TEST_ALL)
	$(PYTEST) --all

torture: $(TEST) ## mutated inputs, kills and full disks, for MINUTES (5); python -m tests.torture --help says more
	$(BIN)/python -m tests.torture --minutes $(MINUTES) --seed $(SEED) --workers

# Kernels compile at some 6 per second on 16 cores, and all classes are 7,000: what is left goes on in the next run.
test-gpu: $(TEST) ## the tests that need a CUDA device, then classes of kernels against fp64, for some minutes
	$(BIN)/python -m pytest -m gpu -n 14 --dist worksteal
	PYTHONPATH=src:tests $(BIN)/python -m kernels.compute_classes --for 150

# uv, because pip cannot take the lowest versions. Triton's kernels are interpreted, compiled and launched by stand-ins.
test-versions: ## test the kernels with the lowest versions that pyproject.toml allows (VERSIONS=highest: the newest)
	@$(PYTHON) -m venv --clear build/versions
	build/versions/bin/python -m pip install --no-compile --disable-pip-version-check uv
	build/versions/bin/uv pip install --python build/versions/bin/python --resolution $(VERSIONS) -e ".[dev]"
	build/versions/bin/python -c 'import numpy, torch, triton; print(*(f"{each.__name__} {each.__version__}" for each in (torch, triton, numpy)))'
	OMP_NUM_THREADS=1 build/versions/bin/python -m pytest --all tests/ops/test_backend.py tests/ops/test_kernel_launch.py tests/ops/test_interpreted.py tests/ops/test_polynomial_aot.py tests/ops/*_triton.py

lint: style types ## ruff and mypy; changes nothing

style: $(TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TEST)
	$(BIN)/mypy

format: $(TEST) ## let ruff fix and format what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEMO) ## measure the operator on this machine's CPU and add a record to benchmarks/results/
	$(BIN)/python benchmarks/poly_cpu.py

docs: $(DOCS) ## build the documentation into build/docs; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "wrote build/docs/index.html"

figures: $(DEMO) ## draw the documentation's figures and compute docs/scaling.md again, from committed records
	$(BIN)/python docs/images/make_kernels.py
	$(BIN)/python docs/images/make_recall.py
	$(BIN)/python docs/images/make_speed.py
	$(BIN)/python docs/images/make_scaling.py
	$(BIN)/python docs/images/make_suite.py
	$(BIN)/python benchmarks/scale_report.py

notebook: $(DOCS) ## run docs/notebooks/first_hour.ipynb again and keep its outputs
	$(BIN)/python -m nbconvert --to notebook --execute --ExecutePreprocessor.record_timing=False --inplace docs/notebooks/first_hour.ipynb

tree: $(DEMO) ## write the list of folders in docs/architecture.md from the first line of each package
	$(BIN)/python docs/make_tree.py

clean: ## remove .venv and caches; runs/ stays
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
