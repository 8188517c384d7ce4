# Needs make, Python 3.11 or later and a package index that pip can reach. `make help` lists the targets.

PYTHON      ?= python3
VENV        ?= .venv
EXTRAS      ?= dev
CONSTRAINTS ?= constraints.txt
ARGS        ?=

VENV_PYTHON := $(VENV)/bin/python
STAMP       := $(VENV)/.installed
UNFINISHED  := $(VENV)/.unfinished
INSTALLED   := $(CURDIR) $(EXTRAS)
PYTEST      := OMP_NUM_THREADS=1 $(VENV_PYTHON) -m pytest -q
TWO         := -n 2 --dist worksteal
KERNEL_JIT   := tests/tools/test_kernel_jit.py
KERNEL_TOOLS := $(KERNEL_JIT) $(addprefix tests/tools/test_,decode_launches.py gpu_first_run.py kernel_report.py)
TRACED       := one_graph or compiles or graphs_too
OF_TWO       := tensor_parallel or fsdp2_losses or dha_fsdp or test_converted
NO_TRITON    := $(addprefix --ignore=,tests/kernels $(KERNEL_TOOLS))

# A stamp counts only if the environment still runs and was installed from this folder with these extras.
ifneq ($(shell $(VENV_PYTHON) -c pass 2>/dev/null && cat $(STAMP) 2>/dev/null),$(INSTALLED))
.PHONY: $(STAMP)
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-fast test-long test-kernels test-kernel-tools test-distributed test-min test-new test-extras test-gpu lint format docs-check bench bench-gpu gpu-first-run kernel-report kernel-roofline hf-contract clean mutation-check test-deepspeed

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo 'Variables: PYTHON=$(PYTHON) VENV=$(VENV) EXTRAS=$(EXTRAS) ARGS="options for the command that a target runs"'

setup: $(STAMP) ## create or refresh the virtual environment

# .unfinished marks an install that was cut short: the next call starts from an empty environment.
$(STAMP): setup.py pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: PYTHON=$(PYTHON) is missing or older than 3.11 ($$($(PYTHON) --version 2>&1));" \
	    "choose another: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	@if [ -e $(UNFINISHED) ] \
	    || ! $(VENV_PYTHON) -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	  if [ -n "$$(ls -A $(VENV) 2>/dev/null)" ] && [ '$(VENV)' != .venv ] \
	      && [ ! -e $(UNFINISHED) ] && [ ! -e $(VENV)/pyvenv.cfg ]; then \
	    echo "error: VENV=$(VENV) is a folder with other things in it, not a virtual environment;" \
	      "name a new or an empty folder" >&2; exit 1; \
	  fi; \
	  rm -rf $(VENV) && echo "creating $(VENV) ..." && $(PYTHON) -m venv $(VENV); \
	fi
	@rm -f $@ && touch $(UNFINISHED)
	$(VENV_PYTHON) -m pip install --disable-pip-version-check --no-input -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	@rm -f $(UNFINISHED) && echo '$(INSTALLED)' > $@

# Nothing here may reach for the network; the tokenizers' threads would fight with the data loaders' processes.
demo test test-fast test-long test-kernels test-kernel-tools test-distributed test-gpu docs-check bench bench-gpu hf-contract: export HF_HUB_OFFLINE = 1
demo test test-fast test-long test-kernels test-kernel-tools test-distributed test-gpu docs-check bench bench-gpu hf-contract: export TOKENIZERS_PARALLELISM = false

demo: $(STAMP) ## run the demonstration on the bundled checkpoint
	$(VENV_PYTHON) examples/demo.py $(ARGS)

test: $(STAMP) ## run all tests but those of the next targets, two at a time, e.g. ARGS="-k cache -x"
	$(PYTEST) $(TWO) $(NO_TRITON) -m 'not distributed and not long' $(ARGS)

test-fast: $(STAMP) ## run those of them that are not marked slow
	$(PYTEST) $(TWO) $(NO_TRITON) -m 'not slow and not distributed and not long' $(ARGS)

test-kernels: $(STAMP) ## run the kernels' tests in Triton's interpreter, two at a time, e.g. ARGS="-k decode"
	TRITON_INTERPRET=1 $(PYTEST) $(TWO) tests/kernels -m 'not long' $(ARGS)

test-long: $(STAMP) ## run the longest tests, of programs and of kernels, which the targets above leave out
	$(PYTEST) $(TWO) $(NO_TRITON) -m 'long and not distributed' $(ARGS)
	TRITON_INTERPRET=1 $(PYTEST) $(TWO) tests/kernels -m long $(ARGS)

test-kernel-tools: $(STAMP) ## run the tests of the kernels' tools: first GPU run, report of registers, launches
	$(PYTEST) $(TWO) $(KERNEL_TOOLS) $(ARGS)

test-distributed: $(STAMP) ## run the tests that start two processes (gloo, on CPUs): FSDP2, tensor parallelism, evaluation
	$(PYTEST) -m distributed $(ARGS)

# An environment of its own, of 6 GB: of the lowest torch the package index has only the CUDA build, and that build does
# not load without its CUDA libraries.
test-min: build/constraints-min.txt ## run test-fast and some of two processes, compile models and kernels with the lowest versions
	$(MAKE) --no-print-directory test-fast VENV=.venv-min EXTRAS=dev CONSTRAINTS=$<
	$(MAKE) --no-print-directory test-distributed VENV=.venv-min EXTRAS=dev CONSTRAINTS=$< ARGS='tests/distributed -k "$(OF_TWO)"'
	$(MAKE) --no-print-directory test-kernel-tools VENV=.venv-min EXTRAS=dev CONSTRAINTS=$< KERNEL_TOOLS=$(KERNEL_JIT)
	$(MAKE) --no-print-directory test-kernels VENV=.venv-min EXTRAS=dev CONSTRAINTS=$< ARGS='-k "$(TRACED)"'

# torch and its Triton stay: the newest torch is a CUDA build of several GB where a package index has nothing else.
test-new: ## run test-fast with the newest versions that pyproject.toml allows, in a new environment
	@mkdir -p build && grep -E '^(torch|triton)==' constraints.txt > build/constraints-new.txt
	rm -rf .venv-new
	$(MAKE) --no-print-directory test-fast VENV=.venv-new EXTRAS=dev CONSTRAINTS=build/constraints-new.txt

build/constraints-min.txt: pyproject.toml .ci/lowest_versions.py
	@mkdir -p build
	$(PYTHON) .ci/lowest_versions.py > $@

test-deepspeed: ## add DeepSpeed to the environment and run the tests that start it (two processes, on CPUs)
	$(MAKE) test-distributed EXTRAS='$(EXTRAS),deepspeed' ARGS='-k deepspeed $(ARGS)'

# These make no environment, which would hide the torch with CUDA of a machine that has one: PYTHON has to bring it.
test-gpu: ## run the kernels' tests on a GPU, with what PYTHON has, e.g. ARGS="-n 8"
	PYTHONPATH=src $(PYTHON) -m pytest -q -c tests/gpu.ini --rootdir . -m gpu tests/kernels $(ARGS)

bench-gpu: ## check and measure on a GPU, in 8 minutes, with what PYTHON has, e.g. ARGS="--sections op train"
	PYTHONPATH=src $(PYTHON) benchmarks/gpu_suite.py $(ARGS)

gpu-first-run: ## check, measure and settle everything on a GPU, in 8 minutes, with what PYTHON has, e.g. ARGS="--resume"
	@$(PYTHON) tools/gpu_first_run.py $(ARGS)

test-extras: $(STAMP) ## install the package with each extra alone and run its command, e.g. ARGS="base jax"; takes minutes
	$(VENV_PYTHON) tests/check_extras.py $(ARGS)

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

kernel-report: $(STAMP) ## compile every kernel for sm_80 to sm_120: registers, spills, shared memory
	@$(VENV_PYTHON) tools/kernel_report.py $(ARGS)

kernel-roofline: $(STAMP) ## estimate how fast the kernels could be, from arithmetic
	@$(VENV_PYTHON) tools/kernel_roofline.py $(ARGS)

hf-contract: $(STAMP) ## run Transformers' own model tests on our models; fetches them once (10 MB), e.g. ARGS="-k fsdp"
	OMP_NUM_THREADS=1 $(VENV_PYTHON) tools/hf_contract/run.py $(ARGS)

mutation-check: $(STAMP) ## make small wrong changes to copies of the source; tests must notice each, e.g. ARGS="--only cache"
	$(VENV_PYTHON) tools/mutation_check.py $(ARGS)

clean: ## delete build products and caches (not the virtual environment, not runs/)
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests tools examples benchmarks conversion_scripts -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
