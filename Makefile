# Every target first sees to it, through scripts/bootstrap.sh, that what it needs is in .venv.
# Nothing is written outside the checkout. PYTHON=/path/to/python3.12 says what to build .venv with.

SHELL := bash
RUN := scripts/bootstrap.sh .venv/bin/python
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-of test-fast test-cpus same-as gpu-test test-matrix test-integrations conformance docs lint format clean

# Plans, kernels, simulated ranks, recomputation, parts of the loss, the rules about the code; without
# Megatron, the command line and most real processes, which take most of the time.
FAST := $(addprefix tests/, schedule resolve kernels attention masks checks desync recompute loss \
  tools/job tools/simulate test_shards.py test_slice_makers.py test_config.py test_docs.py test_environment.py test_layers.py) \
  --ignore-glob='*/test_processes.py' --ignore=tests/attention/test_refusals.py \
  --ignore=tests/schedule/test_check.py \
  --ignore=tests/loss/test_linear.py --ignore=tests/loss/test_memory.py

help: ## print this list
	@echo "make TARGET [ARGS='...' for the program that it runs] [PYTHON=/path/to/python]"
	@sed -n 's/^\([a-z-]*\):.* ## /  \1\t/p' Makefile | expand -t 20

install: ## install what all targets need into .venv, which they do by themselves
	@scripts/bootstrap.sh true

demo: ## train a small GPT without and with burst, and compare
	@$(RUN) examples/demo.py $(ARGS)

# Two tests at a time: each starts up to eight processes of its own.
test: ## run the tests, e.g. make test ARGS="-k layout"
	@$(RUN) -m pytest -n 2 --dist worksteal $(ARGS)

test-all: ## run also the cases of which `make test` takes a sample
	@$(RUN) -m pytest -n 2 --dist worksteal --all $(ARGS)

# FILE=megatron_burst/masks/documents.py, for example
test-of: ## run the tests that tests/README.md names for FILE=...
	@$(RUN) scripts/test_of.py "$(FILE)" -n 2 --dist worksteal $(ARGS)

test-fast: ## run a part of the tests, under 3 minutes
	@$(RUN) -m pytest -n 2 --dist worksteal $(FAST) $(ARGS)

test-cpus: ## run the tests whose numbers depend on the processor as other processors would
	@$(RUN) scripts/test_cpus.py $(ARGS)

same-as: ## compare programs, bits, times, plans and refusals with COMMIT=...
	@$(RUN) -m tests.frozen compare $(COMMIT)

# Twelve tests at a time (more do not fit in 80 GB), those that share ranks in
# one worker: most of their time is starting processes and compiling kernels.
gpu-test: ## run only the tests that need CUDA GPUs
	@$(RUN) -m pytest tests/gpu -m gpu -n 12 --dist loadscope --no-loadscope-reorder $(ARGS)

test-matrix: ## run mcore tests with each release of Megatron-Core, and with MEGATRON_LM=clone main
	@scripts/test_matrix.sh $(ARGS)

test-integrations: ## run burst in the frameworks that build on Megatron, e.g. FRAMEWORKS=bridge
	@scripts/test_integrations.sh $(ARGS)

# TE=clone and MEGATRON_LM=clone name what to run; without them it says what to clone.
conformance: ## run tests of TransformerEngine and Megatron-LM with burst in place (TE=, MEGATRON_LM=)
	@$(RUN) -m conformance.run $(ARGS)

docs: ## build the documentation as a site in site/, open each page in a browser, at two widths
	@$(RUN) docs/reference_pages.py
	@$(RUN) docs/family_pages.py
	@SITE=site SCREENSHOTS=.cache/screenshots $(RUN) -m pytest -q --all tests/test_site.py $(ARGS)
	@echo "site/index.html"

lint: ## check style, formatting and types
	@$(RUN) -m ruff check $(ARGS)
	@$(RUN) -m ruff format --check $(ARGS)
	@$(RUN) -m mypy

format: ## fix what lint can fix by itself
	@$(RUN) -m ruff check --fix $(ARGS)
	@$(RUN) -m ruff format $(ARGS)

clean: ## remove build files and test caches (to start over: rm -rf .venv .cache)
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@rm -rf .cache/tmp .cache/pytest .cache/ruff .cache/mypy .cache/hypothesis
	@find . \( -name .git -o -name .venv -o -name .cache \) -prune -o \
	  -name __pycache__ -type d -exec rm -rf {} +
