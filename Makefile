# `make` lists the targets. Each of them sets up what it needs: an environment in .venv, the
# requirements, the native modules. Stamps in .venv keep a second run from doing it again.
#
#   PYTHON=python3.12   the interpreter that .venv is made from (3.11 or later)
#   TORCH=torch         another torch than the pinned one, such as the CUDA build; remembered
#   ARGS="..."          more arguments for pytest (test, proof, test-gpu, test-asan) or the demo
#   WORKERS=3           how many processes run tests; they wait for the disk now and then
#   MINUTES=10 SEED=0   how long `make soak` goes on, and what it draws its programs from
#   NVME=DIR PIECE=...  where `make bench-gpu` has its swap files, and the one piece to run

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON := python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := $(wildcard aio swap checkpoint infinity)
CHECKED := $(PACKAGES) $(wildcard tools examples tests) setup.py
C_FILES := $(wildcard */csrc/*.[ch])
ALL_C_FILES := $(C_FILES) $(wildcard tests/*/*.[ch] tools/*/*.[ch] swap/*/*/*.cu)
BUILD_INPUTS := setup.py pyproject.toml MANIFEST.in $(wildcard */_build.py) $(C_FILES)
ARGS :=
WORKERS := 3
MINUTES := 10
SEED := 0
NVME := build/bench
PIECE :=
PYTEST := $(BIN)/python -m pytest -q --durations=10
ASAN_TREE := build/asan
COUNTS := build/counts.json

# Every interpreter of a run reads what the first has compiled, whatever the shell has set.
unexport PYTHONDONTWRITEBYTECODE

# A torch that was asked for once stays, or `make test` would throw a CUDA build out again.
PINNED_TORCH := $(shell sed -n '/^torch==/p' requirements.txt)
TORCH := $(or $(shell cat $(VENV)/torch-choice 2>/dev/null),$(PINNED_TORCH))

.PHONY: help build demo test proof soak test-frameworks test-gpu test-asan check bench bench-gpu format clean FORCE

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: $(VENV)/built ## Set up .venv and build the native modules

demo: $(VENV)/built ## Train a model bigger than its memory budget; results in demo-output
	$(BIN)/python examples/train_gpt.py $(ARGS)

test: $(VENV)/built ## Run the tests, without those that take long
	$(PYTEST) -n $(WORKERS) --dist worksteal --ignore=tests/integrations \
	    -m "not proof and not frameworks" $(ARGS)

# Programs that take all processors run one after the other. What takes two minutes takes five where
# others compute beside it, and is no hang.
proof: $(VENV)/built ## Run the tests that take long, and properties on many more examples
	mkdir -p build && rm -f $(COUNTS)
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "(proof or hypothesis) and not alone" \
	    --hypothesis-profile=proof --timeout=900 --counts=$(COUNTS) $(ARGS)
	$(PYTEST) -m alone --timeout=900 --counts=$(COUNTS) $(ARGS)

soak: $(VENV)/built ## Run random programs with faults and kills for MINUTES, by SEED
	$(BIN)/python tools/soak.py --minutes $(MINUTES) --seed $(SEED) $(ARGS)

test-frameworks: $(VENV)/built ## Run the tests of the trainers and loops of others
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "frameworks and not proof" $(ARGS)

test-gpu: $(VENV)/built ## Run the tests that need a CUDA device
	$(PYTEST) -m gpu tests/gpu $(ARGS)

# The sanitizers need a build of their own, so the tests run in a copy of the tree. Leaks are
# not looked for: the interpreter keeps memory until it ends.
test-asan: $(VENV)/built ## Run the tests of the C code under address and undefined sanitizers
	rm -rf $(ASAN_TREE) && mkdir -p $(ASAN_TREE)
	cp -r $(PACKAGES) tests setup.py pyproject.toml LICENSE $(ASAN_TREE)
	find $(ASAN_TREE) -name '*.so' -delete
	cd $(ASAN_TREE) && CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -g" \
	    LDFLAGS="-fsanitize=address,undefined" \
	    $(CURDIR)/$(BIN)/python setup.py -q build_ext --inplace --force
	cd $(ASAN_TREE) && ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 \
	    LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	    $(CURDIR)/$(BIN)/python -m pytest -q tests/aio tests/swap $(ARGS)

check: $(VENV)/built ## Check style, types and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(CHECKED)
	$(BIN)/clang-format --dry-run --Werror $(ALL_C_FILES)

format: $(VENV)/built ## Put Python and C sources into the style that `check` asks for
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(ALL_C_FILES)

bench: $(VENV)/built ## Run the benchmarks in tools; takes half an hour, needs 10 GB of disk
	mkdir -p build/bench
	$(BIN)/python tools/bench_adam.py
	$(BIN)/python tools/bench_offload.py --nvme build/bench --serial

bench-gpu: $(VENV)/built ## Run the tests and all measurements that need a GPU, in 25 minutes
	$(BIN)/python tools/bench_gpu.py --nvme $(NVME) --out build/bench-gpu \
	    $(addprefix --piece ,$(PIECE)) $(ARGS)

clean: ## Remove everything that `make` made, .venv included
	rm -rf $(VENV) build dist demo-output *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f $(wildcard */_native*.so */_native.c)

$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is older than Python 3.11; say PYTHON=python3.x" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

# Rewritten when the wanted torch changes, and only then; pip would take any torch for "torch".
$(VENV)/torch: $(VENV)/created FORCE
	@if [ "$$(cat $@ 2>/dev/null || true)" != "$(TORCH)" ]; then \
	    if [ -f $@ ]; then $(BIN)/python -m pip uninstall -q -y torch; fi; \
	    echo "$(TORCH)" > $@; \
	    if [ "$(TORCH)" = "$(PINNED_TORCH)" ]; then rm -f $(VENV)/torch-choice; \
	    else echo "$(TORCH)" > $(VENV)/torch-choice; fi; fi

$(VENV)/installed: $(VENV)/torch requirements.txt
	@if [ "$(TORCH)" = "$(PINNED_TORCH)" ]; then cp requirements.txt $(VENV)/requirements.txt; \
	else sed '/^torch==/,/^$$/c $(TORCH)' requirements.txt > $(VENV)/requirements.txt; fi
	$(BIN)/python -m pip install -q --disable-pip-version-check -r $(VENV)/requirements.txt
	touch $@

$(VENV)/built: $(VENV)/installed $(BUILD_INPUTS)
	$(BIN)/python -m pip install -q --disable-pip-version-check \
	    --no-build-isolation --no-deps -e .
	touch $@
