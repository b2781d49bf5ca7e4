"""Subcommands of `hundredfold models` that work on a store, without a server."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from deployments.artifacts.store import LATEST_NAME, model_directory
from deployments.config import AppArgs
from deployments.plan.plan_file import read_plan
from hundredfold.__main__ import main
from tests.support.artifacts import seal_tiny_version
from tests.support.fakes import FakeTerminal

MODEL, OLD, NEW = "acme/tiny", "000000000001", "000000000002"
LATER = "000000000003"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for version in (OLD, NEW):
        seal_tiny_version(tmp_path, MODEL, version)
    return tmp_path


def run(store: Path, *words: str) -> int:
    return main(["models", *words, "--store", str(store)])


def write_config(path: Path, *versions: str) -> Path:
    """Write a Serve config with an application for each version of MODEL."""
    listed = [{"models": [{"id": MODEL, "version": version}]} for version in versions]
    applications = [{"import_path": "deployments.app:build_app", "args": args} for args in listed]
    path.write_text(json.dumps({"applications": applications}))
    return path


def list_sealed(store: Path) -> set[str]:
    return {path.name for path in model_directory(store, MODEL).iterdir() if path.is_dir()}


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


def test_commands_change_the_store_that_the_server_uses(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server prefers the store of its config to that of the environment."""
    config = tmp_path / "serve_config.yaml"
    application = {"import_path": "deployments.app:build_app", "args": {"store": str(store)}}
    config.write_text(json.dumps({"applications": [application]}))
    monkeypatch.setenv("HUNDREDFOLD_STORE", str(tmp_path / "other"))
    assert AppArgs(store=store, encoders={}).store_path() == store
    assert main(["models", "pin", MODEL, "--config", str(config)]) == 0
    assert read_plan(store).find(MODEL).pinned
    monkeypatch.chdir(tmp_path)
    assert main(["models", "unpin", MODEL]) == 0
    assert not read_plan(store).find(MODEL).pinned
    capsys.readouterr()
    assert main(["models", "ls", "--json"]) == 0
    assert {entry["version"] for entry in json.loads(capsys.readouterr().out)} == {OLD, NEW}

    application["args"] = {}
    config.write_text(json.dumps({"applications": [application]}))
    assert AppArgs(encoders={}).store_path() == tmp_path / "other"
    assert main(["models", "pin", MODEL]) == 1
    assert f"there is no store {tmp_path / 'other'}; " in capsys.readouterr().err
    config.write_text("[")
    assert main(["models", "ls"]) == 1
    assert "cannot read `serve_config.yaml`: line 1" in (error := capsys.readouterr().err)
    assert "`--store DIR`" in error


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
    config = write_config(tmp_path / "own.yaml", OLD)
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


def test_gc_keeps_the_version_of_the_configuration(store: Path, tmp_path: Path) -> None:
    seal_tiny_version(store, MODEL, LATER)
    config = write_config(tmp_path / "own.yaml", OLD)
    assert run(store, "gc", "--yes", "--config", str(config)) == 0
    assert list_sealed(store) == {OLD, LATER}


def test_versions_of_all_applications_stay(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seal_tiny_version(store, MODEL, LATER)
    config = write_config(tmp_path / "own.yaml", OLD, NEW, LATEST_NAME)
    assert run(store, "gc", "--yes", "--config", str(config)) == 0
    assert run(store, "rm", f"{MODEL}@{OLD}", "--config", str(config)) == 1
    assert "is used by the configuration" in capsys.readouterr().err
    assert list_sealed(store) == {OLD, NEW, LATER}


def test_gc_rejects_an_unreadable_configuration(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(store, "gc", "--yes", "--config", str(tmp_path / "none.yaml")) == 1
    assert "none.yaml" in capsys.readouterr().err


def test_gc_confirms_and_removes_what_nothing_names(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seal_tiny_version(store, MODEL, LATER)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))  # like a pipe, and not a terminal
    assert run(store, "gc") == 1
    captured = capsys.readouterr()
    assert f"{MODEL}@{OLD}" in captured.out
    assert "standard input is not a terminal, so the removal cannot be confirmed" in captured.err
    assert "`--yes`" in captured.err

    for answer in ("n\n", "", "\n"):
        monkeypatch.setattr(sys, "stdin", FakeTerminal(answer))
        assert run(store, "gc") == 0
        assert "remove them? [y/N]" in capsys.readouterr().err
        assert OLD in list_sealed(store)

    assert run(store, "gc", "--keep", f"{MODEL}@{OLD}", "--yes") == 0
    assert list_sealed(store) == {OLD, NEW, LATER}

    monkeypatch.setattr(sys, "stdin", FakeTerminal("yes\n"))
    assert run(store, "gc") == 0
    assert "removed 1, " in capsys.readouterr().out
    assert list_sealed(store) == {NEW, LATER}, "NEW is for a rollback"
    assert run(store, "gc") == 0, "no garbage is left"


def test_gc_keep_requires_version(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(store, "gc", "--keep", MODEL) == 1
    assert f"`{MODEL}` names no version; write `ID@VERSION`" in capsys.readouterr().err


def test_gc_json_lists_items_with_their_removal(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seal_tiny_version(store, MODEL, LATER)
    assert run(store, "gc", "--yes", "--json") == 0
    (item,) = json.loads(capsys.readouterr().out)
    assert (item["kind"], item["is_removed"]) == ("version", True)
    assert OLD not in list_sealed(store)


@pytest.mark.parametrize("options", [["--json"], []])
def test_gc_lists_on_stderr_what_it_asks_about_unless_stdout_is_a_terminal(
    options: list[str],
    store: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seal_tiny_version(store, MODEL, LATER)
    monkeypatch.setattr(sys, "stdin", FakeTerminal("n\n"))
    assert run(store, "gc", *options) == 0
    captured = capsys.readouterr()
    listed, _, question = captured.err.partition("1 to remove")
    assert f"{MODEL}@{OLD}" in listed
    assert "remove them? [y/N]" in question
    if options:
        (item,) = json.loads(captured.out)
        assert item["is_removed"] is False


def test_gc_rejects_a_store_that_does_not_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "none", "gc", "--yes") == 1
    assert "none" in capsys.readouterr().err
