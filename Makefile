# Two targets matter: `make serve` and `make test`. Each builds the environment it needs, once.

# The first of these that runs. pyenv has commands for versions that it does not select: they fail.
PYTHON ?= $(or $(shell for one in python3.11 python3.12 python3.13; do \
	$$one -c "" 2>/dev/null && echo $$one && break; done),python3.11)
# The newest Python that pyproject.toml allows; pyenv takes it from this variable.
NEWEST_PYTHON ?= PYENV_VERSION=3.13 python3.13
BIN := .venv/bin
PORT ?=
HOST ?=
KEYS ?=
NO_AUTH ?=
SERVE_OPTIONS := $(if $(PORT),--port $(PORT)) $(if $(HOST),--host $(HOST)) \
	$(if $(KEYS),--keys $(KEYS)) $(if $(NO_AUTH),--no-auth) $(if $(NO_GPU),--no-gpu)
# NO_GPU=1 leaves an NVIDIA GPU out: packages, demo models and Ray.
NO_GPU ?=
NO_GPU_OPTION := $(if $(NO_GPU),--no-gpu)
VARIANT := $(if $(NO_GPU),-cpu)
# More than cores, because some tests wait; those with servers and processes wait more.
WORKERS ?= $(shell expr $$(nproc) + 1)
INTEGRATION_WORKERS ?= $(shell expr $$(nproc) + 2)
PIP_INSTALL := -m pip install --disable-pip-version-check --progress-bar on
PACKAGES := hundredfold deployments build_artifacts cluster benchmarks
# Without cached bytecode, each of the thousand processes of the tests compiles every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve test test-fast test-newest lint gpu-check constraints clean

# `exec`, so that a signal to make's child reaches the launcher itself.
serve: .venv/serve-ready$(VARIANT)
	@$(BIN)/hundredfold demo --first $(NO_GPU_OPTION)
	@exec $(BIN)/hundredfold serve $(SERVE_OPTIONS)

# Unit tests: no Ray cluster, no torch, in parallel.
test-fast: .venv/dev-ready$(VARIANT)
	$(BIN)/python -m pytest tests/unit -n $(WORKERS)

# Unit tests with the newest Python, in an environment without torch, so that some are skipped.
test-newest: .venv-newest/ready
	REQUIRE_ALL_TESTS= .venv-newest/bin/python -m pytest tests/unit -n $(WORKERS)

# Everything. Integration tests share builds per file. Their models are tiny, so that a second thread
# of torch only waits for the first: one thread takes a third less time. The cluster tests have the
# machine alone. Their models are built before, on what the other tests leave of the cores. The
# cluster tests wait for these builds and build what is missing.
test: .venv/dev-ready$(VARIANT) .venv-clients/ready
	@mkdir -p build; nice -n 19 $(BIN)/python -m tests.support.served_models >build/models.log 2>&1 &
	$(BIN)/python -m pytest tests/unit -n $(WORKERS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integration -n $(INTEGRATION_WORKERS) \
		--dist loadfile --no-loadscope-reorder
	$(BIN)/python -m pytest tests/end_to_end

lint: .venv/dev-ready$(VARIANT)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(PACKAGES)
	$(BIN)/hundredfold check
	$(BIN)/hundredfold render --check

# Parity, speed and memory on a GPU, in parts of minutes; run again, it continues.
gpu-check: .venv/dev-ready$(VARIANT)
	$(BIN)/hundredfold bench gpu

# What serving and the demo builds need; `dev` adds every engine, the tests and the linters. With an
# NVIDIA GPU the packages are those for CUDA (cluster/installation.py). On the CPU pip takes the
# build of torch that its index has: set PIP_EXTRA_INDEX_URL for one without CUDA.
.venv/serve-ready$(VARIANT): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m cluster.installation serve $(NO_GPU_OPTION)
	@rm -f .venv/*-ready*
	@touch $@

.venv/dev-ready$(VARIANT): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m cluster.installation dev $(NO_GPU_OPTION)
	@rm -f .venv/*-ready*
	@touch .venv/serve-ready$(VARIANT) $@

# Clients that conflict with packages of .venv; the tests run them as separate programs.
.venv-clients/ready: tests/support/clients/requirements.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python $(PIP_INSTALL) -r $<
	@touch $@

.venv-newest/ready: pyproject.toml constraints.txt
	$(NEWEST_PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/python $(PIP_INSTALL) --constraint constraints.txt --editable ".[test]"
	@touch $@

# Pin what is installed now.
constraints: .venv/dev-ready$(VARIANT)
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' > constraints.new
	@(sed '/^# The environment/q' constraints.txt; sort -f constraints.new) > constraints.tmp
	@mv constraints.tmp constraints.txt; rm constraints.new

clean:
	rm -rf .venv .venv-clients .venv-newest .run build dist
