# Two commands matter: `make serve` and `make test`. Both build the environment they need, once.

PYTHON ?= python3.11
BIN := .venv/bin
PORT ?=
HOST ?=
UP_OPTIONS := $(if $(PORT),--port $(PORT)) $(if $(HOST),--host $(HOST))

.PHONY: serve test lint clean

# `exec`, so that a signal to make's child reaches the launcher itself.
serve: .venv/ready
	@$(BIN)/python -m build_artifacts demo
	@exec $(BIN)/python -m cluster up $(UP_OPTIONS)

test: .venv/ready .venv-clients/ready
	$(BIN)/python -m pytest

lint: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy deployments build_artifacts cluster benchmarks
	$(BIN)/python -m cluster check
	$(BIN)/python -m cluster render --check

# Reinstalled when the pins change; torch comes as pip finds it (README, "Environment").
.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on \
	    -e ".[cpu,openvino,build,bench,dev]"
	@touch $@

# Clients that do not install beside those of .venv; the tests run them as programs of their own.
.venv-clients/ready: tests/support/clients/requirements.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --disable-pip-version-check --progress-bar on -r $<
	@touch $@

clean:
	rm -rf .venv .venv-clients .run build *.egg-info
