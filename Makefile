# make start: set up and run the main job.  make test: set up and pass the tests.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BUDGET ?= 0.35-gpu-hours

.PHONY: setup start test test-services test-slow test-gpu test-validity faults lint audit docs clean

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@echo "installing into $(VENV): some minutes and about 6 GB the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

start: setup
	$(BIN)/tune start --budget $(BUDGET)

# Two workers for what keeps one core busy; one after the other what starts ranks or a cluster and is timed.
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not e2e and not slow and not gpu and not faults and not services"
	$(BIN)/python -m pytest -m "e2e and not slow and not gpu and not faults and not services"

# What needs programs beyond Python's: Debian's chromium (LEDGERTUNE_CHROMIUM names another), postgresql and prometheus.
test-services: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-services.lock
	$(BIN)/python -m pytest -n 2 --dist loadfile -m services tests/services

faults: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m faults tests/faults

test-slow: setup
	$(BIN)/python -m pytest -m slow

# Knobs that no CPU can run; skipped one by one where the machine has too few GPUs. float8 also wants torchao.
test-gpu: setup
	$(BIN)/python -m pytest -m gpu tests/gpu

test-validity: setup
	$(BIN)/python -m pytest -m slow tests/trial_runner/dry_run/test_validity.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Known faults of the locked dependencies; asks the registry's vulnerability service.
audit:
	PYTHON=$(PYTHON) .ci/audit

# The pages that are made from the code.
docs: setup
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) .venv-audit studies build dist *.egg-info
