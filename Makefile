# ekiden: everything a developer types. `make` alone prints the list.
#
# Needs python3 (3.11 or newer) and make, nothing else: `setup` makes .venv and installs what
# uv.lock names into it. Another interpreter: make test PYTHON=python3.13

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
TESTS  ?= tests
SEEDS  ?= 1..200
KILLS  ?= 50
BENCH  ?= noop latency recovery

RUN   := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format simulate chaos bench clean distclean

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: $(READY)  ## make .venv with all dependencies (quick when nothing changed)

$(READY): pyproject.toml uv.lock scripts/setup.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/setup.sh
	@touch $@

demo: $(READY)  ## start a grid, run real jobs, show their results, stop
	@$(RUN)/python -m ekiden.cli.demo

check: $(READY)  ## style, types, import rules
	$(RUN)/ruff check .
	$(RUN)/ruff format --check --quiet src tests
	$(RUN)/mypy
	$(RUN)/lint-imports --no-logo

test: check  ## check, then every test (TESTS=tests/unit for some)
	@bash scripts/tools.sh
	$(RUN)/pytest -n $(JOBS) --dist loadfile $(TESTS)

format: $(READY)  ## rewrite the code in the house's layout
	$(RUN)/ruff format .
	$(RUN)/ruff check --fix-only .

simulate: $(READY)  ## seeded universes with crashes and torn writes (SEEDS=1..2000)
	$(RUN)/python -m ekiden.simulation --seeds $(SEEDS)
	$(RUN)/python -m ekiden.simulation --mutants

chaos: $(READY)  ## kill -9 real brokers under load (KILLS=50)
	EKIDEN_KILLS=$(KILLS) $(RUN)/pytest -n 0 --timeout 3600 tests/integration -k kill

bench: $(READY)  ## measure this machine (BENCH="noop latency recovery soak")
	@for what in $(BENCH); do $(RUN)/ekiden bench $$what || exit 1; done

clean:  ## remove caches and build output
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage htmlcov
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## also remove .venv
	rm -rf $(VENV)
