# Two commands do everything from nothing: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test check lint format types contracts clean

$(READY): pyproject.toml requirements/constraints.txt requirements/oracles.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c requirements/constraints.txt torch
	$(BIN)/python -m pip install --quiet -c requirements/constraints.txt -e ".[lab,tensorboard,docs,dev]"
	$(BIN)/python -m pip install --quiet --no-deps -r requirements/oracles.txt
	touch $(READY)

demo: $(READY)  ## rs-kfac in the place of SGD and AdamW on the embedded workloads: tables, sentences, curves, pages
	$(BIN)/rkfac demo

test: $(READY)  ## the whole test suite
	$(BIN)/python -m pytest -n 2

check: lint types contracts test  ## everything CI asks for

lint: $(READY)
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests

format: $(READY)
	$(BIN)/ruff check --fix src tests
	$(BIN)/ruff format src tests

types: $(READY)
	$(BIN)/mypy

contracts: $(READY)
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
