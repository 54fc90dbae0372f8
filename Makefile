.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(VENV)/.ready ## make .venv with everything the other verbs need

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet "pip>=25.1"
	$(PIP) install --quiet --constraint constraints.txt --editable '.[native,gguf,lora,tensorboard,wandb,data,maths,gym,plot]' --group dev
	@touch $@

demo: setup ## train a tiny model on the CPU, with SortedRL and with the baseline (minutes)
	$(BIN)/sortedrl demo

check: setup ## lint, format check, types, import order
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

browser: ## Chromium, for the tests of the report page, where it can be installed
	@if for name in chromium chromium-browser google-chrome; do command -v $$name; done | grep -q .; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core; \
	else echo "no Chromium here: the tests of the report page in a browser are left out"; fi

test: check browser ## everything CI runs: check, then the tests
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

bench: setup ## time the scheduler itself (a few minutes)
	$(BIN)/python benchmarks/scheduler.py

format: setup ## format the code and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: help setup demo check browser test bench format
