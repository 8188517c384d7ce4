# Needs make, Python 3.10 or later and a package index that pip can reach. `make help` lists the targets.

PYTHON      ?= python3
VENV        ?= .venv
EXTRAS      ?= dev
ARGS        ?=
HF_CONTRACT ?= ../shared/tools/hf_contract/run

VENV_PYTHON := $(VENV)/bin/python
STAMP       := $(VENV)/.installed
UNFINISHED  := $(VENV)/.unfinished
INSTALLED   := $(CURDIR) $(EXTRAS)

# A stamp counts only if the environment still runs and was installed from this folder with these extras.
ifneq ($(shell $(VENV_PYTHON) -c pass 2>/dev/null && cat $(STAMP) 2>/dev/null),$(INSTALLED))
.PHONY: $(STAMP)
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-fast test-distributed test-gpu lint format docs-check bench bench-gpu kernel-report kernel-roofline hf-contract clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo 'Variables: PYTHON=$(PYTHON) VENV=$(VENV) EXTRAS=$(EXTRAS) ARGS="options for the command that a target runs"'

setup: $(STAMP) ## create or refresh the virtual environment

# .unfinished marks an install that was cut short: the next call starts from an empty environment.
$(STAMP): setup.py pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: PYTHON=$(PYTHON) is missing or older than 3.10 ($$($(PYTHON) --version 2>&1));" \
	    "choose another: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@if [ -e $(UNFINISHED) ] \
	    || ! $(VENV_PYTHON) -c 'import pip, sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then \
	  if [ -n "$$(ls -A $(VENV) 2>/dev/null)" ] && [ '$(VENV)' != .venv ] \
	      && [ ! -e $(UNFINISHED) ] && [ ! -e $(VENV)/pyvenv.cfg ]; then \
	    echo "error: VENV=$(VENV) is a folder with other things in it, not a virtual environment;" \
	      "name a new or an empty folder" >&2; exit 1; \
	  fi; \
	  rm -rf $(VENV) && echo "creating $(VENV) ..." && $(PYTHON) -m venv $(VENV); \
	fi
	@rm -f $@ && touch $(UNFINISHED)
	$(VENV_PYTHON) -m pip install --disable-pip-version-check --no-input -c constraints.txt -e '.[$(EXTRAS)]'
	@rm -f $(UNFINISHED) && echo '$(INSTALLED)' > $@

# Nothing here may reach for the network; the tokenizers' threads would fight with the data loaders' processes.
demo test test-fast test-distributed test-gpu docs-check bench bench-gpu: export HF_HUB_OFFLINE = 1
demo test test-fast test-distributed test-gpu docs-check bench bench-gpu: export TOKENIZERS_PARALLELISM = false

demo: $(STAMP) ## run the demonstration on the bundled checkpoint
	$(VENV_PYTHON) examples/demo.py $(ARGS)

test: $(STAMP) ## run all tests but those of several processes, two at a time, e.g. ARGS="-k cache -x"
	OMP_NUM_THREADS=1 $(VENV_PYTHON) -m pytest -q -n 2 --dist worksteal -m 'not distributed' $(ARGS)

test-fast: $(STAMP) ## run the tests that are not marked slow
	OMP_NUM_THREADS=1 $(VENV_PYTHON) -m pytest -q -n 2 --dist worksteal -m 'not slow and not distributed' $(ARGS)

test-distributed: $(STAMP) ## run the tests that start two processes (gloo, on CPUs): FSDP2, tensor parallelism, evaluation
	OMP_NUM_THREADS=1 $(VENV_PYTHON) -m pytest -q -m distributed $(ARGS)

test-gpu: $(STAMP) ## run the tests that need a GPU, on a machine that has one, e.g. ARGS="-n 8"
	$(VENV_PYTHON) -m pytest -q -m gpu tests/kernels $(ARGS)

docs-check: $(STAMP) ## run the snippets of README and docs
	$(VENV_PYTHON) -m pytest -q tests/test_docs.py $(ARGS)

lint: $(STAMP) ## check style, format and types
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy

format: $(STAMP) ## sort imports, apply safe fixes, format
	$(VENV_PYTHON) -m ruff check --fix-only .
	$(VENV_PYTHON) -m ruff format .

bench: $(STAMP) ## measure on this machine's CPU
	$(VENV_PYTHON) benchmarks/cpu_suite.py $(ARGS)

bench-gpu: $(STAMP) ## check and measure on a GPU, in 8 minutes, e.g. ARGS="--sections op train"
	$(VENV_PYTHON) benchmarks/gpu_suite.py $(ARGS)

kernel-report: $(STAMP) ## compile every kernel for sm_80, sm_89 and sm_90: registers, spills, shared memory
	$(VENV_PYTHON) -m dcformer.kernels.report --arch 80 89 90 $(ARGS)

kernel-roofline: $(STAMP) ## estimate how fast the kernels could be, from arithmetic
	$(VENV_PYTHON) -m dcformer.kernels.roofline $(ARGS)

hf-contract: $(STAMP) ## run Transformers' own model tests on DCFormer (HF_CONTRACT=runner script)
	@test -x '$(HF_CONTRACT)' || { \
	  echo "error: no runner script at HF_CONTRACT=$(HF_CONTRACT); give its path: make hf-contract HF_CONTRACT=..." >&2; \
	  exit 1; }
	PYTHON="$$(cd $(VENV) && pwd)/bin/python" '$(HF_CONTRACT)' $(ARGS)

clean: ## delete build products and caches (not the virtual environment, not runs/)
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests examples benchmarks conversion_scripts -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
