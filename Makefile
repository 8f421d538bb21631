# Every target makes the virtual environment that it needs, and writes nothing outside this folder
# but the package installer's own cache. `make help` lists the targets and the settings.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
VENV ?= .venv
USE_UV ?= 0
ARGS ?=
NODES ?= 5
ACCT ?= 0
CACHE := $(CURDIR)/.cache

# What libraries would else keep in the home folder. A value that is already set is kept.
export HF_HOME ?= $(CACHE)/huggingface
export MPLCONFIGDIR ?= $(CACHE)/matplotlib
export TORCHINDUCTOR_CACHE_DIR ?= $(CACHE)/torchinductor
export TRITON_CACHE_DIR ?= $(CACHE)/triton
export FONTCONFIG_FILE ?= $(CACHE)/fonts.conf

# uv reads neither pip's settings nor pip's form of a list.
comma := ,
empty :=
space := $(empty) $(empty)
ifneq ($(strip $(PIP_FIND_LINKS)),)
export UV_FIND_LINKS ?= $(subst $(space),$(comma),$(strip $(PIP_FIND_LINKS)))
endif

ifeq ($(USE_UV),1)
make_venv = uv venv --quiet --seed --allow-existing --python "$(PYTHON)" $(1)
install = uv pip install --quiet --compile-bytecode --python $(1)/bin/python
venv_needs = USE_UV=1 needs uv on the PATH (pip install uv)
else
make_venv = "$(PYTHON)" -m venv $(1)
install = PYTHONWARNINGS=ignore $(1)/bin/python -m pip install --quiet
venv_needs = Debian and Ubuntu keep that in a package of its own (apt install python3-venv)
endif

.PHONY: help quickstart test check lint fast bench cluster devcluster devcluster-stop clean

help:  ## this list
	@echo "make TARGET [SETTING=value ...]"
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' Makefile | expand -t 20
	@echo "settings"
	@printf '  %s\n' "PYTHON=$(PYTHON)  the Python (3.11 or newer) to make the environment from" \
	  "VENV=$(VENV)  where the environment lies" "USE_UV=1  install with uv instead of pip" \
	  "ARGS='...'  further arguments for hpcgrpo quickstart, pytest or the benchmark" \
	  "NODES=$(NODES) ACCT=$(ACCT)  of the development cluster: how many nodes; 1 for accounting (sacct)"

quickstart: $(VENV)/.installed .cache/fonts.conf  ## install, then train a small model on the CPU and show what it learnt
	$(VENV)/bin/hpcgrpo quickstart $(ARGS)

test: $(VENV)/.installed-test .cache/fonts.conf  ## every test, those on a real Slurm cluster too (needs root)
	@slurm/devcluster.sh install || true
	@findmnt -rno TARGET | grep "^$(CACHE)/pytest/" | xargs -r umount --lazy || true  # of a run that was killed
	$(VENV)/bin/python -m pytest --basetemp="$(CACHE)/pytest" -n 2 --dist loadgroup --no-loadscope-reorder $(ARGS)

check: lint fast  ## what a commit must pass: lint, format, types, layers, the fast tests

lint: $(VENV)/.installed-dev  ## the checks that run nothing: lint, format, types, layers
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

fast: $(VENV)/.installed-dev .cache/fonts.conf  ## the tests that are not marked slow
	$(VENV)/bin/python -m pytest --basetemp="$(CACHE)/pytest-fast" -m "not slow" $(ARGS)

bench: $(VENV)/.installed  ## one table of all benchmarks, beside TRL too (its own environment: .venv-trl); ARGS=--quick
	$(VENV)/bin/python benchmarks/table.py $(ARGS)

cluster: $(VENV)/.installed-test  ## all of it in small: a real Slurm (needs root), a run on three of its nodes with vLLM
	@slurm/devcluster.sh install
	@slurm/devcluster.sh start $(NODES)
	$(VENV)/bin/hpcgrpo tiny-model models/tiny
	slurm/devcluster.sh login $(VENV)/bin/hpcgrpo submit configs/cluster_cpu.yaml --wait $(ARGS)

devcluster:  ## start a real Slurm cluster on this machine (needs root), to try hpcgrpo submit on
	@slurm/devcluster.sh install
	@DEVCLUSTER_ACCT=$(ACCT) slurm/devcluster.sh start $(NODES)

devcluster-stop:  ## stop it, and undo what it changed
	@slurm/devcluster.sh stop

clean:  ## remove environments, caches and builds; runs (logs/) and models stay
	rm -rf .venv .venv-* .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps, so that nothing is installed twice. The development install holds everything the plain one does.
$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "installing hpcgrpo into $(VENV): minutes, and 1.3 GB with the CPU build of torch"
	$(call install,$(VENV)) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	@echo "installing hpcgrpo and its development tools into $(VENV): minutes, and 1.3 GB with the CPU build of torch"
	$(call install,$(VENV)) -e '.[dev]'
	@touch $(VENV)/.installed $@

# A real vLLM and DeepSpeed, which only tests need. Where they cannot be installed, it is tried again the next time.
$(VENV)/.installed-test: pyproject.toml tests/install_engines.sh $(VENV)/.installed-dev
	@tests/install_engines.sh "$(VENV)" $(if $(filter 1,$(USE_UV)),uv) && touch $@ || true

# matplotlib asks fontconfig for fonts, which then writes a cache of its own; matplotlib's fonts are enough.
.cache/fonts.conf:
	@mkdir -p .cache && echo '<fontconfig/>' > $@

%/bin/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "hpcgrpo needs Python 3.11 or newer; '$(PYTHON)' is: $$("$(PYTHON)" --version 2>&1 || true)" >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	@$(call make_venv,$*) || { rm -f $@; echo "No virtual environment could be made: $(venv_needs)." >&2; exit 2; }
