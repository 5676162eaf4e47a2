# make demo        compile and run a small sharded transformer on this machine, before and after
# make test        everything that guards a promise, with coverage, on all cores: 12 minutes on two;
#                  ARGS="tests/graph -x" runs pytest with these only
# make test-quick  what needs no ranks and is quick: 90 seconds on two cores
# make test-all    all there is: every fault on 4 ranks, environments of tutorial, template and
#                  wheels, benchmarks at toy sizes, large random sets, more examples
#                  TORCH=2.14.1 with any of them: with this torch, in .venv-2.14.1
# make fuzz        the Hypothesis tests with new seeds: MINUTES=10 JOBS=cores; SEED=7 tries that one
#                  seed, SEED=7 SEEDS=50 so many from it on. It prints how to repeat a finding
# make lint        ruff and mypy
# make bench       print the numbers that are times
# make clean       remove everything that the others made
#
# Each of them sets up .venv first. PYTHON=/path/to/python picks the interpreter (3.11 or newer).

VENV := .venv$(TORCH:%=-%)
BIN := $(VENV)/bin
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
SOURCES := overlap_core $(filter-out %.egg-info,$(wildcard plugins/*/overlap_*)) \
	examples/thirdparty_model_lib/video_blocks

IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c '$(IS_NEW_ENOUGH)' 2>/dev/null && echo $$python && break; done)

# What is installed depends on these files' contents, so the stamp is named after them.
SETUP_FILES := constraints.txt pyproject.toml $(PLUGINS:%=%/pyproject.toml)
STAMP := $(VENV)/.installed-$(shell cat $(SETUP_FILES) | cksum | cut -d ' ' -f 1)

.DEFAULT_GOAL := test
.PHONY: demo test test-quick test-all fuzz lint bench setup clean

# One thread a process: tests share the cores among themselves.
test test-quick test-all: export OMP_NUM_THREADS = 1
SHARED := -n $(or $(JOBS),auto) --maxprocesses 8 --no-loadscope-reorder

demo: $(STAMP)
	$(BIN)/overlap-core demo $(ARGS)

test: $(STAMP)
ifeq ($(ARGS),)
	rm -f .coverage .coverage.*
# Not through pytest-cov: pytest loads our plugin, and so our package, before that one starts.
	$(BIN)/coverage run -m pytest $(SHARED) -m "not full" --durations=25
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report
else
	$(BIN)/python -m pytest $(ARGS)
endif

test-quick: $(STAMP)
	$(BIN)/python -m pytest $(SHARED) -m "not ranks and not slow and not full" --hypothesis-profile quick $(ARGS)

test-all: $(STAMP)
	$(BIN)/python -m pytest $(SHARED) --durations=25 --hypothesis-profile thorough $(ARGS)

fuzz: $(STAMP)
	$(BIN)/python tests/fuzz.py $(if $(SEED),--seed $(SEED)) $(if $(SEEDS),--seeds $(SEEDS)) \
		$(if $(MINUTES),--minutes $(MINUTES)) $(if $(JOBS),--jobs $(JOBS)) $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(SOURCES)

bench: $(STAMP)
	$(BIN)/python benchmarks/pass_alone.py

setup: $(STAMP)

# A torch that is there already stays as it is: whatever is installed is pinned for the second step.
$(STAMP):
	@if [ -z "$(PYTHON)" ]; then \
		echo "no Python 3.11 or newer found; say which with: make PYTHON=/path/to/python" >&2; exit 2; fi
	$(PYTHON) -c '$(IS_NEW_ENOUGH)'
	@rm -f $(VENV)/.installed-*
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || \
		$(BIN)/python -m pip install $(if $(TORCH),torch==$(TORCH),--constraint constraints.txt torch)
	$(BIN)/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' \
		> $(VENV)/torch.txt
	$(BIN)/python -m pip install --constraint $(VENV)/torch.txt \
		--editable '.[dev]' $(PLUGINS:%=--editable %)
	@touch $@

clean:
	rm -rf $(VENV) build dist .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
	rm -rf *.egg-info plugins/*/*.egg-info
