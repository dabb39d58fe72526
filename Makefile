# Two commands do everything from nothing: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
LAB    := $(VENV)/.lab
READY  := $(VENV)/.ready
PIP    := -m pip install --quiet -c requirements/constraints.txt
CODE   := src tests examples .ci

.PHONY: demo test check lint format types contracts docs wheel clean

$(LAB): pyproject.toml requirements/constraints.txt  # what the demonstration needs, and no more
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) torch
	$(BIN)/python $(PIP) -e ".[lab]"
	touch $(LAB)

$(READY): $(LAB) requirements/oracles.txt  # what developers need, on top of that
	$(BIN)/python $(PIP) -e ".[lab,tensorboard,docs,dev]"
	$(BIN)/python -m pip install --quiet --no-deps -r requirements/oracles.txt
	touch $(READY)

demo: $(LAB)  ## rs-kfac in the place of SGD and AdamW on the embedded workloads: tables, sentences, curves, pages
	$(BIN)/rkfac demo

# Shapes in signatures are checked while these run; in all other tests that would only cost time.
SHAPED := tests/linalg tests/layers tests/curvature tests/operators tests/optim/test_trajectory.py tests/optim/test_ekfac_trajectory.py

test: $(READY)  ## the whole test suite
	$(BIN)/python -m pytest -n 2 $(SHAPED)
	RKFAC_SHAPES=0 $(BIN)/python -m pytest -n 2 $(addprefix --ignore ,$(SHAPED))

check: lint types contracts docs test wheel  ## everything CI asks for

lint: $(READY)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

format: $(READY)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

types: $(READY)
	$(BIN)/mypy

contracts: $(READY)
	$(BIN)/lint-imports

docs: $(READY)  ## the documentation site, in site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel:  ## builds the wheel, installs rkfac[lab] from it in a clean environment, and trains
	rm -rf build
	$(PYTHON) -m venv build/clean
	build/clean/bin/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	build/clean/bin/python $(PIP) torch
	build/clean/bin/python $(PIP) "$$(ls build/wheel/rkfac-*.whl)[lab]"
	cd build && clean/bin/python ../.ci/try_wheel.py clean/bin/rkfac

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
