# The same commands for people, pre-commit and CI.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install check test bench docs
.DEFAULT_GOAL := check

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

install: $(VENV)/.installed

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/budget.py
	$(BIN)/python scripts/generate_reference.py --check

# Every test but those that need a GPU or more than 20 seconds.
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu and not slow"

# On a quiet machine; about ten minutes.
bench: install
	mkdir -p benchmarks/results
	$(BIN)/python -m benchmarks.bench_scheduler
	GOMP_SPINCOUNT=0 $(BIN)/python -m benchmarks.bench_engine --json benchmarks/results/engine.json
	$(BIN)/python -m benchmarks.bench_mesh --out benchmarks/results/mesh.json
	$(BIN)/python -m benchmarks.trace_cost --out benchmarks/results/tracing.json -- --engine sim

docs: install
	$(BIN)/python scripts/generate_reference.py
