# Two targets matter: `make serve` and `make test`. Each builds the environment it needs, once.

PYTHON ?= python3.11
BIN := .venv/bin
PORT ?=
HOST ?=
KEYS ?=
NO_AUTH ?=
SERVE_OPTIONS := $(if $(PORT),--port $(PORT)) $(if $(HOST),--host $(HOST)) \
	$(if $(KEYS),--keys $(KEYS)) $(if $(NO_AUTH),--no-auth)
WORKERS ?= 2
PIP_INSTALL := -m pip install --disable-pip-version-check --progress-bar on
PACKAGES := hundredfold deployments build_artifacts cluster benchmarks

.PHONY: serve test test-fast lint constraints clean

# `exec`, so that a signal to make's child reaches the launcher itself.
serve: .venv/serve-ready
	@$(BIN)/hundredfold demo
	@exec $(BIN)/hundredfold serve $(SERVE_OPTIONS)

# Unit tests: no Ray cluster, no torch, in parallel.
test-fast: .venv/dev-ready
	$(BIN)/python -m pytest tests/unit -n $(WORKERS)

# Everything. Integration tests share builds per file; the cluster tests have the machine alone.
test: .venv/dev-ready .venv-clients/ready
	$(BIN)/python -m pytest tests/unit -n $(WORKERS)
	$(BIN)/python -m pytest tests/integration -n $(WORKERS) --dist loadfile --no-loadscope-reorder
	$(BIN)/python -m pytest tests/end_to_end

lint: .venv/dev-ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(PACKAGES)
	$(BIN)/hundredfold check
	$(BIN)/hundredfold render --check

# What serving and the demo builds need; `dev` adds every engine, the tests and the linters.
# pip takes the build of torch that its index has: set PIP_EXTRA_INDEX_URL for one without CUDA.
.venv/serve-ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e ".[cpu,build]"
	@touch $@

.venv/dev-ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e ".[dev]"
	@touch .venv/serve-ready $@

# Clients that conflict with packages of .venv; the tests run them as separate programs.
.venv-clients/ready: tests/support/clients/requirements.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python $(PIP_INSTALL) -r $<
	@touch $@

# Pin what is installed now.
constraints: .venv/dev-ready
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' > constraints.new
	@(sed '/^# The environment/q' constraints.txt; sort -f constraints.new) > constraints.tmp
	@mv constraints.tmp constraints.txt; rm constraints.new

clean:
	rm -rf .venv .venv-clients .run build dist
