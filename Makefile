VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check

# The first Python that is new enough; the lock file was made with 3.11.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null && echo $$python && break; \
	done)

.PHONY: install run test test-fast parts lint bench lock

install: $(STAMP)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml requirements.lock | $(BIN)/python
	$(PIP) --require-hashes --requirement requirements.lock
	$(PIP) --no-deps --editable .
	@touch $@

run: install
ifdef ENGINE
	$(BIN)/goodput-agent run --engine $(ENGINE)
else
	$(BIN)/goodput-agent demo
endif

# Tests of the agent, of a site and of an engine wait most of the time, so they run beside others.
# Those of the engine go first: on a busy machine it sends its tokens in bursts.
SITE_TESTS := tests/end_to_end
ENGINE_TESTS := tests/real_engine
AGENT_TESTS := $(wildcard tests/test_app*.py)
PYTEST := $(BIN)/python -m pytest --durations=30 --durations-min=2
PARALLEL := --numprocesses logical --dist loadfile

test: parts install
	bash .ci/stages engine "$(PYTEST) $(ENGINE_TESTS)" \
		tests "nice $(PYTEST) $(PARALLEL) $(addprefix --ignore=,$(ENGINE_TESTS) $(SITE_TESTS) $(AGENT_TESTS))"
	bash .ci/stages site "$(PYTEST) $(SITE_TESTS)" agent "$(PYTEST) $(PARALLEL) $(AGENT_TESTS)" \
		lint "make --no-print-directory lint"

# Without an engine, a database server, a browser and a Prometheus: see tests/fast.py.
test-fast: install
	$(PYTEST) $(PARALLEL) --fast

parts:
	bash .ci/install-parts

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install
	$(BIN)/python -m benchmarks

lock: | $(BIN)/python
	$(PIP) pip-tools
	$(BIN)/pip-compile --quiet --extra demo --extra test --generate-hashes --strip-extras \
		--no-emit-index-url --no-emit-find-links --output-file requirements.lock pyproject.toml
