"""Subcommands of `hundredfold models` that work on a store, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deployments.plan.plan_file import read_plan
from hundredfold.__main__ import main
from tests.support.artifacts import seal_tiny_version

MODEL, OLD, NEW = "acme/tiny", "000000000001", "000000000002"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for version in (OLD, NEW):
        seal_tiny_version(tmp_path, MODEL, version)
    return tmp_path


def run(store: Path, *words: str) -> int:
    return main(["models", *words, "--store", str(store)])


def test_commands_change_the_plan_and_show_it(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(store, "promote", f"{MODEL}@{OLD}") == 0
    assert run(store, "split", f"{MODEL}@{NEW}", "10") == 0
    assert run(store, "shadow", f"{MODEL}@{NEW}", "5") == 0
    assert run(store, "alias", f"{MODEL}@{OLD}", "old") == 0
    capsys.readouterr()
    assert run(store, "pin", MODEL) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{MODEL} (pinned)",
        f"  {NEW}  10 %  latest  shadows 5 %",
        f"  {OLD}  90 %  stable, old",
    ]
    assert run(store, "alias", MODEL, "old", "--remove") == 0
    assert run(store, "promote", MODEL) == 0
    assert run(store, "rollback", MODEL) == 0
    assert run(store, "unpin", MODEL) == 0
    entry = read_plan(store).find(MODEL)
    assert (entry.pinned, entry.splits, entry.shadow) == (False, {}, None)


def test_commands_print_json(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(*words: str) -> Any:
        assert run(store, *words, "--json") == 0
        return json.loads(capsys.readouterr().out)

    assert answer("promote", f"{MODEL}@{OLD}")["versions"][1]["percent"] == 100
    removed = answer("rm", f"{MODEL}@{NEW}")
    assert removed == {"name": f"{MODEL}@{NEW}", "versions": [NEW]}


def test_commands_know_the_versions_of_the_configuration(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "own.yaml"
    args = {"models": [{"id": MODEL, "version": OLD}]}
    application = {"import_path": "deployments.app:build_app", "args": args}
    config.write_text(json.dumps({"applications": [application]}))
    assert run(store, "rm", f"{MODEL}@{OLD}", "--config", str(config)) == 1
    assert "is used by requests that name no version" in capsys.readouterr().err
    assert run(store, "promote", f"{MODEL}@{NEW}", "--config", str(config)) == 0
    assert run(store, "rollback", MODEL, "--config", str(config)) == 0
    assert read_plan(store).find(MODEL).aliases["stable"] == OLD
    assert run(store, "pin", MODEL, "--config", str(tmp_path / "none.yaml")) == 1
    assert "none.yaml" in capsys.readouterr().err
    config.write_text("serveConfigV2: ''")
    assert run(store, "pin", MODEL, "--config", str(config)) == 1
    assert "has no application of this project" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("promote", "no/such"), "Model no/such does not exist"),
        (("split", MODEL, "101"), "`percent`: "),
        (("rm", MODEL + "@latest"), "is used by requests that name no version"),
        (("rm", "../x"), "is not a model id"),
        (("alias", MODEL, "latest"), "cannot be an alias"),
    ],
)
def test_commands_say_why_they_fail(
    store: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(store, *words) == 1
    assert message in capsys.readouterr().err
