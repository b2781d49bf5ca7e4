"""Tests of the builds of `hundredfold serve --model`, with a fake compiler."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from cluster.launcher import command, missing_models
from cluster.launcher.missing_models import build_missing_models
from cluster.launcher.stop_signals import StopSignal, stop_signals_raise
from cluster.progress import StartupProgress
from cluster.start_errors import StartError
from deployments.artifacts.store import LATEST_NAME, model_directory
from tests.support.checked_configs import create_config
from tests.support.ports import free_port
from tests.support.waiting import wait_for

SEALED = "0123456789ab"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Create a store with one version of `acme/built`."""
    directory = model_directory(tmp_path / "store", "acme/built")
    (directory / SEALED).mkdir(parents=True)
    (directory / LATEST_NAME).write_text(SEALED)
    return tmp_path / "store"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the interpreter of builds by a script that logs its arguments. Return the log."""
    log = tmp_path / "builds.log"
    write_compiler(tmp_path, monkeypatch, f'echo "$PWD: $@" >> {log}')
    log.touch()
    return log


def write_compiler(directory: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    script = directory / "compiler.sh"
    script.write_text(f"#!/bin/sh\n{line}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(missing_models, "has_compiler", lambda: True)


def test_only_missing_models_are_built(store: Path, compiler: Path, tmp_path: Path) -> None:
    models = ("acme/built", "acme/new", "other")
    build_missing_models(models, store, tmp_path, StartupProgress())
    assert compiler.read_text().splitlines() == [
        f"{tmp_path}: -m hundredfold build {model} --store {store}" for model in models[1:]
    ]


def test_damaged_latest_is_built_again(store: Path, compiler: Path, tmp_path: Path) -> None:
    (model_directory(store, "acme/built") / LATEST_NAME).write_text("")
    build_missing_models(["acme/built"], store, tmp_path, StartupProgress())
    assert "build acme/built" in compiler.read_text()


def test_failed_build_ends_the_start(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_compiler(tmp_path, monkeypatch, "exit 1")
    with pytest.raises(StartError, match="`acme/new` could not be built"):
        build_missing_models(["acme/new"], store, tmp_path, StartupProgress())


def test_environment_without_compiler_is_named(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(missing_models, "has_compiler", lambda: False)
    with pytest.raises(StartError, match=r"lacks `acme/new`.*no compiler") as refused:
        build_missing_models(["acme/new"], store, tmp_path, StartupProgress())
    assert "pip install" in refused.value.hint
    build_missing_models(["acme/built"], store, tmp_path, StartupProgress())


def test_stop_signal_ends_a_build(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = tmp_path / "pid"
    write_compiler(
        tmp_path,
        monkeypatch,
        f"echo $$ > {running}.new; mv {running}.new {running}; exec sleep 600",
    )

    def stop() -> None:
        wait_for(running.exists)
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(StopSignal), stop_signals_raise():
        build_missing_models(["acme/new"], store, tmp_path, StartupProgress())
    stopper.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int(running.read_text()), 0)


def test_missing_models_are_built_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(create_config({"applications.0.args.store": "/models"})))
    done: list[object] = []
    for name, value in {
        "command.leads_own_session": lambda: True,
        "server.run_edge": lambda *_: nullcontext(),
        "server.build_missing_models": lambda models, store, *_: done.append((models, store)),
        "server.serve_at_edge": lambda *_: done.append("served") or 0,
    }.items():
        monkeypatch.setattr(f"cluster.launcher.{name}", value)
    options = ["--port", str(free_port()), "--model", "a/b", "--model", "c", "--model", "a/b"]
    assert command.run(parse([str(config), *options])) == 0
    assert done == [(("a/b", "c"), Path("/models")), "served"]


@pytest.mark.parametrize("text", ["./model", "pypi:package/model", "a/b@main", ""])
def test_model_of_another_source_is_a_wrong_option(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["--model", text])
    assert f"`{text}` is not a model id" in capsys.readouterr().err


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(arguments)
