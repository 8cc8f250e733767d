# Every target first sees to it, through scripts/bootstrap.sh, that what it needs is in .venv.
# Nothing is written outside the checkout. PYTHON=/path/to/python3.12 says what to build .venv with.

SHELL := bash
RUN := scripts/bootstrap.sh .venv/bin/python
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test gpu-test lint format clean

help: ## print this list
	@echo "make TARGET [ARGS='...' for the program that it runs] [PYTHON=/path/to/python]"
	@sed -n 's/^\([a-z-]*\):.* ## /  \1\t/p' Makefile | expand -t 14

demo: ## train a small GPT without and with burst, and compare
	@$(RUN) examples/demo.py $(ARGS)

# Two tests at a time: each starts up to eight processes of its own.
test: ## run the tests, e.g. make test ARGS="-k layout"
	@$(RUN) -m pytest -n 2 --dist worksteal $(ARGS)

gpu-test: ## run only the tests that need CUDA GPUs
	@$(RUN) -m pytest -m gpu $(ARGS)

lint: ## check style and formatting
	@$(RUN) -m ruff check $(ARGS)
	@$(RUN) -m ruff format --check $(ARGS)

format: ## mend what lint can mend by itself
	@$(RUN) -m ruff check --fix $(ARGS)
	@$(RUN) -m ruff format $(ARGS)

clean: ## remove build files and test caches (to start over: rm -rf .venv .cache)
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	@rm -rf .cache/tmp .cache/pytest .cache/ruff .cache/hypothesis
	@find . \( -name .git -o -name .venv -o -name .cache \) -prune -o \
	  -name __pycache__ -type d -exec rm -rf {} +
