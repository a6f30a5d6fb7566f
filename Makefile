# make run: set up .venv and show the main job; make test: the quick tests; make test-all: all of them;
# make check: linters, types, sizes, all tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# One thread for each process: tests and tables run side by side, and more threads than cores cost a third more time.
export OMP_NUM_THREADS := 1
export OPENBLAS_NUM_THREADS := 1
# Tests start some hundred processes, each of which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-all check lint types sizes fuzz accuracy wheel clean

run: $(VENV)/.installed
	@$(BIN)/python -m paleo.demo

test: $(VENV)/.tested
	$(BIN)/python -m pytest -n auto -m "not slow" $(ARGS)

# With notebooks, whole tables, whole networks of other libraries, exhaustive searches.
test-all: $(VENV)/.tested
	$(BIN)/python -m pytest -n auto $(ARGS)

check: lint types sizes test-all

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.tested
	$(BIN)/mypy

# Hostile inputs of every kind in a process a core; FUZZ="--seed 7 --inputs 100000" for others.
fuzz: $(VENV)/.tested
	$(BIN)/python -m tests.fuzz $(FUZZ)

# docs/accuracy.md and the ledger of README.md from every measured table: some minutes on two cores.
TABLES ?= $(wildcard ../shared/measurements/*.csv ../shared/measurements/*.csv.gz ../shared/measurements/mlperf/*.csv)
accuracy: $(VENV)/.tested
	$(BIN)/python docs/pages.py $(TABLES)

# The wheel in an empty environment of each Python that is there.
wheel: $(VENV)/.tested
	BUILDER=$(BIN)/python .ci/wheel

sizes: $(VENV)/.tested
	@$(BIN)/python tests/sizes.py

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml
	$(PIP) install --editable .
	@touch $@

# The newest torch that the tests were run with; any from 2.4 on should do.
$(VENV)/.tested: $(VENV)/.installed pyproject.toml
	$(PIP) install --editable '.[dev]' 'torch==2.13.0' 'transformers>=4.48' 'onnx>=1.16'
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
