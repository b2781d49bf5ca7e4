from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.common import report
from benchmarks.common.errors import BenchmarkError
from benchmarks.common.report import (
    RunMetadata,
    Table,
    git_commit,
    publish,
    publish_at_end,
    read_host_info,
    start_run,
)


def test_git_commit_marks_a_dirty_tree(tmp_path: Path) -> None:
    assert git_commit(tmp_path / "absent") == "unknown"

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    git("commit", "--allow-empty", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert git_commit(tmp_path) == commit
    (tmp_path / "new").touch()
    assert git_commit(tmp_path) == f"{commit}-dirty"
    (tmp_path / "site-packages").mkdir()
    assert git_commit(tmp_path / "site-packages") == "unknown", "an installed copy has no commit"


def test_run_outside_of_a_checkout_is_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "REPOSITORY", tmp_path)
    assert start_run("toy", "bench toy", 0).host.commit == "unknown"
    assert "note: no git checkout" in capsys.readouterr().err


def test_read_host_info_is_complete() -> None:
    facts = read_host_info()
    assert facts.cpu_model
    assert 1 <= facts.usable_cores <= facts.logical_cores
    assert facts.memory_bytes > 0
    assert "numpy" in facts.packages


def test_publish_prints_tables_or_the_result_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table("speed", ("system", "ms"), [("ours", "1.5")])

    def published(*, as_json: bool) -> str:
        arguments = argparse.Namespace(out=tmp_path, json=as_json)
        publish(arguments, start_run("toy", "bench toy", 0), {"ms": 1.5}, [table], notes=["done"])
        captured = capsys.readouterr()
        assert f"wrote {tmp_path}/" in captured.err
        return captured.out

    assert published(as_json=False).splitlines() == ["system   ms", "ours    1.5", "done"]
    assert json.loads(published(as_json=True))["results"] == {"ms": 1.5}


def test_run_that_fails_publishes_its_results_with_the_reason(tmp_path: Path) -> None:
    arguments = argparse.Namespace(out=tmp_path, json=False)
    results: list[float] = []

    def publish_results(run: RunMetadata) -> None:
        publish(arguments, run, results, [])

    def measure() -> None:
        with publish_at_end(start_run("toy", "bench toy", 0), publish_results):
            results.append(1.5)
            raise BenchmarkError("the server has ended")

    with pytest.raises(BenchmarkError, match="has ended"):
        measure()
    (path,) = tmp_path.iterdir()
    written = json.loads(path.read_text())
    assert (written["run"]["incomplete"], written["results"]) == ("the server has ended", [1.5])


def test_run_to_its_end_publishes_once() -> None:
    published: list[RunMetadata] = []
    run = start_run("toy", "bench toy", 0)
    with publish_at_end(run, published.append):
        assert published == []
    assert published == [run]
