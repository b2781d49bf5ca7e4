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

test: .venv/ready
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

clean:
	rm -rf .venv .run build *.egg-info
