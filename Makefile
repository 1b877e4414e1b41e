# Everything here works on a fresh machine with Python >= 3.11 and make: targets set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH := .venv-bench

.DEFAULT_GOAL := help

.PHONY: help setup train test test-fast test-stack test-swarm lint types bench-replay bench-learner soak-replay clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

setup: $(READY) ## create .venv and install everything

# torch is installed by itself and by exact version: a range would pull a build with several GB of CUDA packages.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Rookery needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	$(BIN)/python -m services.replay.compile
	@touch $(READY)

train: $(READY) ## train 3 agents in treasure hunt for two minutes (ARGS="--seed 1" for more)
	$(BIN)/rookery train $(ARGS)

test: lint types $(READY) ## lint, types, unit tests, integration tests (no Docker)
	$(BIN)/pytest -q tests -m 'not stack and not swarm'

test-fast: $(READY) ## unit tests only
	$(BIN)/pytest -q tests -m 'not integration and not stack and not swarm'

test-stack: $(READY) ## tests in containers; says what is missing where there is no Docker with Compose
	@$(BIN)/python -m rookery.testing.engine
	$(BIN)/pytest -q tests/stack

test-swarm: $(READY) ## tests on a swarm of several nodes, all on this machine; needs privileged containers
	@$(BIN)/python -m rookery.testing.engine
	$(BIN)/pytest -q tests/swarm

lint: $(READY) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## mypy, strict
	$(BIN)/mypy

bench-replay: $(BENCH)/.ready ## replay beside other libraries and bare sockets (about 4 minutes)
	$(BENCH)/bin/python -m bench.replay $(ARGS)

bench-learner: $(READY) ## one update beside a bare loop, workers, and async beside sequential (about 7 minutes)
	$(BIN)/python -m bench.learner $(ARGS)

soak-replay: $(READY) ## kill -9 of a loaded replay service 200 times, its files proven each time (about 6 minutes)
	$(BIN)/python -m bench.replay_kills $(ARGS)

# Other libraries live in an environment of their own: nothing of ours may come to need them.
$(BENCH)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(BENCH)/bin/pip install --quiet --disable-pip-version-check -e '.[bench]' -c constraints.txt
	@touch $@

clean: ## remove environments and caches (runs/ stays)
	rm -rf $(VENV) $(BENCH) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
