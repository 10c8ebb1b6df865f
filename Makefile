# Every target sets up what it needs, in $(VENV), and is quick when that is there. The documentation
# has an environment of its own: its tools need no torch, and the tests should not find them.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-builtin-rules --no-print-directory
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

BIN := $(VENV)/bin
DOCS := $(VENV)-docs
# The constraints keep torch at the version that is tested. Without build isolation, the pinned
# build backend is used and pip makes no second environment. What is never imported is not compiled:
# that would take half a minute.
INSTALL := -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt --no-build-isolation

.PHONY: help
help: ## Show this help
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12   the interpreter that makes the environment, or that has CUDA"
	@echo "  ARGS='-k name -x'   more arguments for pytest, the demo or the benchmark"

.PHONY: demo
demo: $(VENV)/.installed ## Train a small transformer within three budgets of memory, and compare
	$(BIN)/python examples/demo.py $(ARGS)

# Two processes, however many cores there are: every process collects all tests and compiles for
# itself, so that more of them gain little and take the memory of others.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

.PHONY: test
test: check ## Run the checks and the tests that need no GPU, but for those marked slow
	$(PYTEST) -m "not gpu and not slow" $(ARGS)

.PHONY: test-all
test-all: check ## Run the checks and all tests that need no GPU, with more random programs: the full proof
	RECOLLECT_CASES=300 $(PYTEST) --hypothesis-seed 0 -m "not gpu" $(ARGS)

# Chromium must run, so a machine without is given Debian's. Its driver is that of the same package;
# for a Chrome from elsewhere selenium fetches one.
FIND_BROWSER := for name in chromium chromium-browser google-chrome google-chrome-stable; do \
    command -v "$$name" && break; done

.PHONY: test-browser
test-browser: $(VENV)/.browser ## Open the page of a plan in Chromium; installs that on Debian
	@browser=$$($(FIND_BROWSER)) || true; \
	if [ -z "$$browser" ] || { [ "$${browser##*/}" = chromium ] && ! command -v chromedriver >/dev/null; }; then \
	    if ! command -v apt-get >/dev/null; then \
	        echo "make $@: there is no Chromium or Chrome, nor apt-get to install it" >&2; exit 1; \
	    fi; \
	    sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	    echo "installing Debian's chromium and chromium-driver"; \
	    $$sudo apt-get update --quiet=2; \
	    $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes \
	        --no-install-recommends chromium chromium-driver >/dev/null; \
	    browser=$$($(FIND_BROWSER)); \
	fi; \
	set -x; \
	RECOLLECT_BROWSER="$$browser" $(BIN)/python -m pytest -m browser tests/browser $(ARGS)

.PHONY: check
check: $(VENV)/.installed ## Lint, formatting, strict types and the layer rule
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/test_layers.py

.PHONY: format
format: $(VENV)/.installed ## Format the code and fix what the linter can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: bench
bench: $(VENV)/.installed ## Measure what checkpointing adds, and draw memory against time with the peers
	$(BIN)/python benchmarks/overhead.py $(ARGS)
	$(BIN)/python $(INSTALL) '.[bench]'
	$(BIN)/python benchmarks/frontier.py

.PHONY: docs
docs: $(DOCS)/.installed ## Build the documentation into site/, warnings being errors
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	@echo "built site/index.html"

.PHONY: package
package: $(VENV)/.installed ## Build wheel and sdist into dist/, check them, use the wheel in an empty environment
	$(BIN)/python .ci/package.py $(ARGS)

# A machine with a GPU often has its own torch and allows no installs: the first interpreter that
# has what is in NEEDS and sees a CUDA device is used, with the package straight from src.
define run-with-cuda
	@for python in $(PYTHON) $(BIN)/python; do \
	    if command -v "$$python" >/dev/null && "$$python" -c \
	        'import sys, $(NEEDS); sys.exit(not torch.cuda.is_available())' 2>/dev/null; \
	    then found=$$python; break; fi; \
	done; \
	if [ -z "$${found-}" ]; then \
	    echo "make $@: neither $(PYTHON) nor $(BIN)/python has $(NEEDS) and sees a CUDA device;" \
	        "name one that does: make $@ PYTHON=/path/to/python" >&2; \
	    exit 1; \
	fi; \
	set -x; \
	PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" "$$found"
endef

# Side by side where pytest-xdist is there: in turn they take a quarter of an hour, and most of it no
# GPU. (pytest-benchmark, which we do not use, warns of xdist, and warnings are errors.) Then those
# that need the GPU for themselves. pytest's 5 says that ARGS leave none to run.
SIDE_BY_SIDE = $$("$$found" -c 'import xdist' 2>/dev/null \
    && echo --numprocesses auto --maxprocesses 12 --dist worksteal -p no:benchmark || true)

.PHONY: test-gpu
test-gpu: NEEDS := pytest, torch
test-gpu: ## Run the tests that need a GPU, but for slow ones, on PYTHON or else the virtual environment
	$(run-with-cuda) -m pytest -m "gpu and not slow and not alone" $(SIDE_BY_SIDE) $(ARGS) || [ $$? = 5 ]
	$(run-with-cuda) -m pytest -m "gpu and not slow and alone" $(ARGS) || [ $$? = 5 ]

.PHONY: bench-frontier
bench-frontier: NEEDS := torch
bench-frontier: ## Measure memory against time with the peers, on a GPU as test-gpu does, and draw the picture of README
	$(run-with-cuda) benchmarks/frontier.py --json benchmarks/frontier.json $(ARGS)
	$(PYTHON) benchmarks/picture.py benchmarks/frontier.json docs/frontier.svg

.PHONY: bench-offload
bench-offload: NEEDS := torch
bench-offload: ## Measure offload to the memory of the host; needs a GPU, as test-gpu does
	$(run-with-cuda) benchmarks/offload.py $(ARGS)

.PHONY: clean
clean: ## Remove everything that make and the tools have made
	rm -rf $(VENV) $(DOCS) demo.html site build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing recollect and its development tools into $(VENV) (minutes the first time)"
	$(BIN)/python $(INSTALL) hatchling editables
	$(BIN)/python $(INSTALL) --editable '.[dev]'
	@touch $@

$(VENV)/.browser: $(VENV)/.installed
	$(BIN)/python $(INSTALL) selenium
	@touch $@

$(DOCS)/.installed: docs/requirements.txt constraints.txt | $(DOCS)/bin/python
	@echo "installing the documentation tools into $(DOCS)"
	$(DOCS)/bin/python $(INSTALL) --requirement docs/requirements.txt
	@touch $@

%/bin/python:
	$(PYTHON) -m venv $*
