# Two commands matter: `make demo` (install, distil a tiny student, show what happened) and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# A machine without a GPU takes the CPU build of torch; CONSTRAINTS= (empty) lifts that.
CONSTRAINTS ?= $(shell command -v nvidia-smi >/dev/null 2>&1 || echo -c constraints.txt)
# One thread a process: more of them on few, busy cores are slower by an order of magnitude.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help setup demo test test-unit test-env test-e2e test-leaks test-slow check format bench clean

help:  ## List the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v < (3, 13) else f"Python {v[0]}.{v[1]} found; 3.10 to 3.12 needed (textworld breaks on 3.13). Remedy: make PYTHON=python3.11 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e '.[all,dev]'
	@touch $@

setup: $(VENV)/.installed  ## Create .venv and install everything

demo: setup  ## Distil a tiny student on ALFWorld houses and write runs/demo/report.html (at most 10 minutes)
	$(BIN)/python examples/tiny/demo.py

test: setup  ## Install everything and run the unit and environment tests
	$(BIN)/python -m pytest -m 'not e2e and not gpu and not slow'

test-unit: setup  ## The quick tests alone (no engine, no training loop)
	$(BIN)/python -m pytest

test-env: setup  ## Real environments
	$(BIN)/python -m pytest -m 'env and not slow'

test-e2e: setup  ## The whole loop on a CPU and the ladder of tiny models
	$(BIN)/python -m pytest -m e2e

test-leaks: setup  ## A thousand episodes leave nothing behind
	$(BIN)/python -m pytest tests/gym/test_leaks.py -m slow

test-slow: setup  ## Everything that takes minutes
	$(BIN)/python -m pytest -m slow

check: setup  ## Lint and format check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup  ## Mend what the linter can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## Run the benchmarks; JSON on stdout
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

clean:  ## Remove the environment, caches and runs
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache runs
