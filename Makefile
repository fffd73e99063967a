# make demo   a real model answers in this terminal, from nothing
# make test   the whole test suite, from nothing
# make lint   ruff, mypy, import-linter
# make bench  benchmarks (see benchmarks/)
# make support  docs/support.md and its picture, from what the plugins decide now

PYTHON ?= python3
BIN := .venv/bin
PROMPT ?= Write two sentences about the sea.
PIP_ARGS ?=
BENCH_ARGS ?=
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_ARGS)

.PHONY: demo test lint bench support clean

demo: .venv/engine
	$(BIN)/runnerctl explain smollm2-135m
	$(BIN)/runnerctl generate --max-tokens 100 --stats "$(PROMPT)"

test: .venv/dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/dev
	$(BIN)/python benchmarks/bench_decide.py
	$(BIN)/python benchmarks/bench_peers.py $(BENCH_ARGS)

support: .venv/dev
	$(BIN)/python docs/support.py

clean:
	rm -rf .venv

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("runnerctl needs Python 3.11 or newer; say which with: make PYTHON=/path/to/python3 ...")'
	$(PYTHON) -m venv .venv

# torch first and alone: then no other package can choose a build of it
.venv/engine: .venv/bin/python pyproject.toml constraints.txt
	@echo "Installing into .venv (torch and transformers: a minute or two) ..."
	$(PIP) torch
	$(PIP) --editable '.[engine]'
	@touch $@

.venv/dev: .venv/engine
	$(PIP) --editable '.[engine,dev]'
	@touch $@
