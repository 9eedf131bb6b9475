# envbus: everything from a fresh clone, on a machine with Python >= 3.10 (with pip) and make.
#
#   make run                      the main job, on 64 CartPole envs
#   make test                     lint, type check, the quick tests
#   make test-all                 the other tests
#   make docs                     the documentation, into site/
#   make PYTHON=python3.12 run    with another interpreter
#
# Paths below are relative, so the clone may stand in any folder, also one with spaces.

.DEFAULT_GOAL := help
.PHONY: help run test test-all test-gymnasium test-with-gymnasium test-libraries test-rllib \
  test-tianshou test-torchrl test-with-library test-sources test-with-sources lint read-tests \
  format docs fuzz soak bench chaos examples clean install-run install-test install-docs install-fuzz install-bench install-library \
  system-packages

# Interpreter to make .venv with; empty: the first suitable one found.
PYTHON ?=
# Tests that run side by side; most of their time is waiting.
TEST_WORKERS ?= 4
# More arguments for pytest, `make test PYTEST_ARGS="-k arena"`, and for `envbus bench`.
PYTEST_ARGS ?=
BENCH_ARGS ?= all --yes
# Releases that `make test-gymnasium` tests with; `newest` is the one that pip finds.
GYMNASIUM ?= 1.2.0 1.2.2 1.3.0 newest
FUZZ_SECONDS ?= 60
SOAK_HAND_OVERS ?= 10000000
# Options of `envbus chaos`, `make chaos CHAOS_ARGS="--seconds 600 --seed 7"`.
CHAOS_ARGS ?=

# Tools and the Debian packages that bring them, for tests of clients in other languages. Which
# program is there decides, so that one that was installed otherwise will do.
SYSTEM_TOOLS := node:nodejs g++:g++ mcs:mono-mcs mono:mono-runtime chromium:chromium

VENV := .venv
BIN := $(VENV)/bin
PYTEST = $(BIN)/python -m pytest --no-header -n $(TEST_WORKERS) --dist loadfile
PACKAGES := bus actors runner bench
FOR_EXAMPLES := .[test,torch,sb3,plot]
FOR_BENCH := .[mujoco,atari,plot]
# What Gymnasium's classes, spaces and wrappers could break.
TESTS_OF_GYMNASIUM := tests/actors tests/contract tests/integration/envs tests/runner/adapters \
  tests/runner/policies tests/runner/pool tests/runner/vector tests/runner/workers
# Adapters of libraries that are tested in an environment of their own.
TESTS_OF_rllib := tests/runner/adapters/test_rllib.py tests/runner/adapters/test_rllib_bridge.py
TESTS_OF_tianshou := tests/runner/adapters/test_tianshou.py \
  tests/integration/envs/test_tianshou_collecting.py
TESTS_OF_torchrl := tests/runner/adapters/test_torchrl.py
# Sources of envs that `make test` does not install.
SOURCES := 'shimmy[dm-control]' 'mujoco<4' envpool 'jax[cpu]' brax gymnax six
FOR_LIBRARY = .[test,$(LIBRARY)]

# Settings of the surrounding shell that would send pip or Python to other places, or have each of
# the many processes compile all sources again.
unexport PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE
unexport PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PIP_USER := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Makes .venv if it is missing, broken, made elsewhere (an environment cannot be moved), or made
# with another interpreter than PYTHON asks for. Python without ensurepip (Debian without
# python3-venv) gets its pip from the pip that is there.
# With the pip that comes with Python 3.10 and 3.11 the search for releases that go together may take
# a quarter of an hour.
define make_venv
	@set -e; \
	identity='import os, sys; print(os.getcwd(), sys.version)'; \
	if [ -x $(BIN)/python ] && [ -f $(VENV)/.identity ] \
	    && have="$$($(BIN)/python -c "$$identity" 2>/dev/null)" \
	    && [ "$$have" = "$$(cat $(VENV)/.identity)" ] \
	    && { [ -z "$(PYTHON)" ] || [ "$$have" = "$$("$(PYTHON)" -c "$$identity" 2>/dev/null)" ]; }; \
	then exit 0; fi; \
	enough='import sys; sys.exit(sys.version_info < (3, 10))'; \
	python=''; \
	for candidate in $(if $(PYTHON),"$(PYTHON)",python3 python python3.13 python3.12 python3.11 \
	    python3.10); do \
	  if "$$candidate" -c "$$enough" >/dev/null 2>&1; then python="$$candidate"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "envbus needs Python 3.10 or newer$(if $(PYTHON), and $(PYTHON) is not);" \
	    "name one: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; \
	  exit 1; \
	fi; \
	echo "Creating $(VENV) with $$("$$python" -V)"; \
	rm -rf $(VENV); \
	if ! "$$python" -m venv $(VENV) >/dev/null 2>&1; then \
	  rm -rf $(VENV); \
	  if ! { "$$python" -m venv --without-pip $(VENV) && "$$python" -m pip install -qq \
	      --target "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	      pip; }; \
	  then \
	    rm -rf $(VENV); \
	    echo "Cannot make a virtual environment with $$python: it has neither ensurepip nor pip." \
	      "On Debian and Ubuntu: apt install python3-venv" >&2; \
	    exit 1; \
	  fi; \
	fi; \
	$(BIN)/python -m pip install -qq --upgrade pip || true; \
	$(BIN)/python -c "$$identity" > $(VENV)/.identity
endef

# $(call install,NAME,WHAT): installs unless it was done with this very pyproject.toml. Several
# extras must come in a variable: a comma in WHAT would end it.
define install
	@set -e; \
	if ! cmp -s pyproject.toml $(VENV)/.installed-$(1); then \
	  echo "Installing envbus$(if $(filter-out .,$(2)), with $(2)) into $(VENV)"; \
	  $(BIN)/python -m pip install -qq --editable '$(2)'; \
	  cp pyproject.toml $(VENV)/.installed-$(1); \
	fi
endef

help: ## List the targets.
	@echo "envbus: make TARGET [PYTHON=python3.12]"
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1\t\2/p' Makefile | expand -t 12

run: install-run ## The main job: 64 CartPole envs, one actor killed on the way.
	@$(BIN)/python -m envbus.bench.entry run CartPole-v1 --num-envs 64 --seconds 5 \
	  --kill-one --compare

test: install-test ## Install, lint, type-check and run the quick tests.
	@$(MAKE) --no-print-directory --jobs=2 lint read-tests
	@$(PYTEST) -m "not slow" $(PYTEST_ARGS)

# Once, beside mypy, so that the processes that run the tests side by side find them compiled.
read-tests: install-test
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null || true # the tests will tell

test-all: install-examples system-packages ## All that `make test` leaves out; installs PyTorch, Stable-Baselines3 and more.
	@$(PYTEST) -m slow $(PYTEST_ARGS)
	@$(BIN)/python -m tests.soak.words --hand-overs 1000000

test-gymnasium: ## The tests that concern Gymnasium, with each of the releases in GYMNASIUM.
	@set -e; for release in $(GYMNASIUM); do \
	  $(MAKE) --no-print-directory VENV=.venvs/gymnasium-$$release RELEASE=$$release \
	    test-with-gymnasium; \
	done

test-with-gymnasium:
	$(make_venv)
	@$(BIN)/python -m pip install -qq --upgrade --editable '.[test]' \
	  'gymnasium$(if $(filter newest,$(RELEASE)),,==$(RELEASE))'
	@$(BIN)/python -c 'import gymnasium; print("Gymnasium", gymnasium.__version__)'
	@$(PYTEST) -m "slow or not slow" tests/runner/test_vector_wrappers.py $(PYTEST_ARGS)
	@$(PYTEST) -m "not slow" $(TESTS_OF_GYMNASIUM) $(PYTEST_ARGS)

# As root on a machine with apt-get only, and never an error: tests skip what is missing and say so.
system-packages: ## Install what tests in other languages need (Node, g++, Mono, Chromium), by apt-get.
	@missing=''; \
	for pair in $(SYSTEM_TOOLS); do \
	  command -v "$${pair%%:*}" >/dev/null 2>&1 || missing="$$missing $${pair#*:}"; \
	done; \
	[ -n "$$missing" ] || exit 0; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then \
	  echo "Not installed, so their tests are skipped:$$missing"; exit 0; \
	fi; \
	echo "Installing$$missing"; \
	install() { \
	  DEBIAN_FRONTEND=noninteractive timeout 600 apt-get install -qq --no-install-recommends \
	    -o DPkg::Lock::Timeout=60 "$$1" >/dev/null 2>&1 </dev/null; \
	}; \
	updated=''; \
	for package in $$missing; do \
	  install "$$package" && continue; \
	  [ -n "$$updated" ] || timeout 120 apt-get update -qq >/dev/null 2>&1; \
	  updated=yes; \
	  install "$$package" || echo "$$package could not be installed; its tests are skipped"; \
	done

lint: install-test ## Ruff (rules and format) and mypy --strict.
	@$(BIN)/python -m ruff check --quiet .
	@$(BIN)/python -m ruff format --check --quiet .
	@$(BIN)/python -m mypy

format: install-test ## Rewrite the sources as ruff would have them.
	@$(BIN)/python -m ruff check --fix --quiet .
	@$(BIN)/python -m ruff format .

docs: install-docs ## The documentation, from docs/ into site/. Warnings are errors.
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "Open site/index.html"

fuzz: install-fuzz ## Fuzz a bridge, the codec and the broker, FUZZ_SECONDS each; the last two need atheris.
	@$(BIN)/python -m tests.fuzz.bridge --seconds $(FUZZ_SECONDS)
	@$(BIN)/python -m tests.fuzz.run --seconds $(FUZZ_SECONDS)

soak: install-test ## Count lost wake-ups of steps in shared memory, in SOAK_HAND_OVERS hand-overs.
	@$(BIN)/python -m tests.soak.words --hand-overs $(SOAK_HAND_OVERS)

bench: install-bench ## Measure; see bench/README.md. BENCH_ARGS are handed on.
	@$(BIN)/python -m envbus.bench.entry bench $(BENCH_ARGS)

chaos: install-run ## Break everything for two minutes and audit what came. CHAOS_ARGS are handed on.
	@$(BIN)/python -m envbus.bench.entry chaos $(CHAOS_ARGS)

examples: install-examples ## Do the examples learn? Short trainings with PyTorch.
	@$(BIN)/python -m pytest --no-header tests/examples $(PYTEST_ARGS)

test-libraries: test-rllib test-tianshou test-torchrl ## The tests of adapters that `make test-all` leaves out; installs their libraries.

# Each in an environment of its own: RLlib, for one, wants a Gymnasium of its own choice.
test-rllib test-tianshou test-torchrl: test-%:
	@$(MAKE) --no-print-directory VENV=.venvs/$* LIBRARY=$* test-with-library

test-with-library: install-library
	@$(BIN)/python -m pytest --no-header -m "slow or not slow" $(TESTS_OF_$(LIBRARY)) $(PYTEST_ARGS)

test-sources: ## The tests of sources of envs; installs EnvPool, JAX, Brax, Gymnax and Shimmy.
	@$(MAKE) --no-print-directory VENV=.venvs/sources test-with-sources

test-with-sources:
	$(make_venv)
	@$(BIN)/python -m pip install -qq --editable '.[test]' $(SOURCES)
	@$(BIN)/python -m pytest --no-header -m "slow or not slow" \
	  tests/integration/envs/test_env_sources.py $(PYTEST_ARGS)

clean: ## Remove the environment and everything generated.
	@rm -rf $(VENV) .venvs build dist site src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +

install-run:
	$(make_venv)
	$(call install,run,.)

install-test:
	$(make_venv)
	$(call install,test,.[test])

install-examples: install-test
	$(call install,examples,$(FOR_EXAMPLES))

install-library:
	$(make_venv)
	$(call install,$(LIBRARY),$(FOR_LIBRARY))

# Without atheris, which is not built for every Python, the command says so.
install-fuzz: install-test
	@$(BIN)/python -m pip install -qq --editable '.[fuzz]' || true

install-docs: install-run
	$(call install,docs,.[docs])

install-bench:
	$(make_venv)
	$(call install,bench,$(FOR_BENCH))
