VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check

# The first Python that is new enough; the lock file was made with 3.11.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null && echo $$python && break; \
	done)

.PHONY: install run test test-causes test-fast test-shaken parts lint bench docs release screenshots lock

install: $(STAMP)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A new checkout with the packages of an earlier one does not ask pip about each of them again.
$(STAMP): pyproject.toml requirements.lock | $(BIN)/python
	cmp -s requirements.lock $(VENV)/locked || \
		{ $(PIP) --require-hashes --requirement requirements.lock && cp requirements.lock $(VENV)/locked; }
	$(PIP) --no-deps --editable .
	@sync # what unpacked fills the disk's queue, and the first databases of tests would wait for it
	@touch $@

run: install
ifdef ENGINE
	$(BIN)/goodput-agent run --engine $(ENGINE)
else
	$(BIN)/goodput-agent demo
endif

# Tests of a site and of an engine wait most of the time, so they run beside the others, which get the
# processor time that these leave: a busy site misses its polls, and a busy engine sends its tokens in bursts.
SITE := tests/end_to_end
ENGINE_TESTS := tests/real_engine
WATCHING := $(SITE) $(ENGINE_TESTS)
# What else runs would be a cause as well, so these start their engines and wait until the others, which
# hold a shared lock on this file, have ended.
CAUSES := tests/real_engine/test_causes.py
BUSY := .pytest_cache/busy
BUSY_WITH := flock --shared --close $(BUSY)
# Tests that start engines of their own: beside those that share one, which take longest.
FRONTS := $(addprefix tests/real_engine/test_,middleware.py middleware_clients.py middleware_hooks.py sglang.py)
PYTEST := $(BIN)/python -m pytest --durations=30 --durations-min=2
# Tests wait for disks and servers, so twice as many processes as processors are soonest done.
BESIDE := --numprocesses $(shell echo $$((2 * $$(getconf _NPROCESSORS_ONLN)))) --dist loadfile

# The tests of real parts that failed, which are run once more, alone: see tests/rerun.py.
FAILED := .pytest_cache/failed-parts

test: parts install
	@rm -f $(FAILED) $(FAILED).reasons
	@mkdir -p $(dir $(BUSY))
	bash .ci/stages engine "$(BUSY_WITH) $(PYTEST) --failed-parts $(FAILED) $(ENGINE_TESTS) \
		$(addprefix --ignore=,$(CAUSES) $(FRONTS))" \
		site "$(BUSY_WITH) $(PYTEST) --failed-parts $(FAILED) $(SITE)" \
		fronts "$(BUSY_WITH) nice $(PYTEST) --failed-parts $(FAILED) $(FRONTS)" \
		lint "$(BUSY_WITH) nice make --no-print-directory lint" \
		tests "$(BUSY_WITH) nice $(PYTEST) --failed-parts $(FAILED) $(BESIDE) --no-loadscope-reorder \
		$(addprefix --ignore=,$(WATCHING))" \
		causes "$(PYTEST) --failed-parts $(FAILED) --after $(BUSY) $(CAUSES)"
	@[ ! -e $(FAILED) ] || bash .ci/stages again "$(PYTEST) --alone $(FAILED) @$(FAILED)"

# Tests that start processes or read clocks, again and again beside busy cores: see tests/shaken.py.
ROUNDS := 20
TESTS := --ignore=$(CAUSES)

test-shaken: parts install
	$(BIN)/python -m tests.shaken --rounds $(ROUNDS) $(TESTS)

# Without an engine, a database server, a browser and a Prometheus: see tests/fast.py.
test-fast: install
	$(PYTEST) --fast $(BESIDE) $(addprefix --ignore=,$(WATCHING))

# On a machine that runs nothing else: as right as the docs say.
test-causes: parts install
	$(PYTEST) --published --log-cli-level INFO $(CAUSES)

parts:
	bash .ci/install-parts

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install
	$(BIN)/python -m benchmarks

# In an environment of its own: the agent's has only what it needs to run and to be tested.
TOOLS := $(VENV)/tools
TOOLS_STAMP := $(TOOLS)/installed

$(TOOLS_STAMP): requirements-tools.lock | $(BIN)/python
	$(BIN)/python -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
		--require-hashes --requirement requirements-tools.lock
	@touch $@

docs: $(TOOLS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(TOOLS)/bin/mkdocs build --strict

release: $(TOOLS_STAMP)
	bash .ci/release $(TOOLS)/bin

# The README's pictures of the page.
screenshots: parts install
	$(BIN)/python -m tests.outputs.page_pictures

# The image's packages are a part of ours, with the same versions.
COMPILE := $(BIN)/pip-compile --quiet --extra demo --extra clickhouse --extra postgres --generate-hashes --strip-extras \
	--no-emit-index-url --no-emit-find-links

lock: | $(BIN)/python
	$(PIP) pip-tools
	$(COMPILE) --extra test --output-file requirements.lock pyproject.toml
	$(COMPILE) --constraint requirements.lock --output-file requirements-image.lock pyproject.toml
	$(COMPILE) --extra docs --extra release --constraint requirements.lock \
		--output-file requirements-tools.lock pyproject.toml
