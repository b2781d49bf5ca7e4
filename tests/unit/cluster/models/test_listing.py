from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.models.listing import list_versions, table
from deployments.plan import changes
from hundredfold.__main__ import main
from tests.support.artifacts import GRAPH_NAME, refuse_version, seal_tiny, seal_tiny_version
from tests.support.fakes import FakeTerminal
from tests.support.ordinary_rights import ordinary_rights

# Packages of the extra `build`.
BUILD_PACKAGES = ("torch", "transformers", "safetensors", "onnx")


def test_list_has_the_aliases_of_the_plan(tmp_path: Path) -> None:
    for version in ("000000000001", "000000000002"):
        seal_tiny_version(tmp_path, "acme/tiny", version)
    changes.promote(tmp_path, "acme/tiny", "000000000001")
    changes.set_alias(tmp_path, "acme/tiny", "canary", "000000000002")
    entries = list_versions(tmp_path)
    assert [(entry.version, entry.is_latest, entry.aliases) for entry in entries] == [
        ("000000000001", False, ("stable",)),
        ("000000000002", True, ("canary",)),
    ]
    assert entries[0].to_json()["aliases"] == ["stable"]
    assert "000000000002 * canary" in table(entries)


def test_refused_version_is_listed_with_the_reason(tmp_path: Path) -> None:
    for version in ("000000000001", "000000000002"):
        seal_tiny_version(tmp_path, "acme/tiny", version)
    refuse_version(tmp_path, "acme/tiny", "000000000002")
    old, new = list_versions(tmp_path)
    assert (old.refused, new.to_json()["refused"]) == ("", "its graph does not open")
    _, refused, candidate, *_ = table([new]).splitlines()
    assert "000000000002 *  refused" in refused
    assert refused.endswith("its graph does not open")
    assert "000000000002" not in candidate


def test_ls_of_empty_store_prints_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "ls", "--store", str(tmp_path / "none")]) == 0
    assert "hundredfold demo" in capsys.readouterr().out


def test_ls_of_unreadable_store_names_it(
    public_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    public_directory.chmod(0o311)
    with ordinary_rights():
        assert main(["models", "ls", "--store", str(public_directory)]) == 1
    assert f"cannot read the store {public_directory}: Permission" in capsys.readouterr().err


def test_ls_of_a_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("no store")
    assert main(["models", "ls", "--store", str(tmp_path / "notes.txt")]) == 1
    assert "notes.txt/plan.json`: Not a directory" in capsys.readouterr().err


def test_ls_json_lists_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seal_tiny(tmp_path, "tiny/model")
    assert main(["models", "ls", "--store", str(tmp_path), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["id"], entry["is_latest"]) == ("tiny/model", True)


def test_damaged_version_is_listed_with_the_reason(tmp_path: Path) -> None:
    (seal_tiny(tmp_path, "tiny/torn") / GRAPH_NAME).write_bytes(b"not the graph")
    seal_tiny(tmp_path, "tiny/sound")
    head, *lines = table(list_versions(tmp_path)).splitlines()
    assert head.split() == ["MODEL", "VERSION", "TASKS", "CANDIDATE", "MB", "PARITY", "SOURCE"]
    assert [line.split()[0] for line in lines] == ["tiny/sound", "tiny-gpu", "tiny/torn"]
    assert "damaged (digest_mismatch)" in lines[-1]


def test_ls_needs_no_compiler(tmp_path: Path) -> None:
    seal_tiny(tmp_path, "tiny/model")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({BUILD_PACKAGES!r})); "
        "sys.modules['build_artifacts'] = None; "
        "from cluster.__main__ import main; "
        f"sys.exit(main(['models', 'ls', '--store', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tiny/model" in done.stdout


def test_digests_are_counted_on_a_terminal_and_the_output_stays_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tiny/first", "tiny/second"):
        seal_tiny(tmp_path, name)
    command = ["models", "ls", "--store", str(tmp_path), "--json"]
    assert main(command) == 0
    piped = capsys.readouterr()
    assert (len(json.loads(piped.out)), piped.err) == (2, "")
    monkeypatch.setattr(sys, "stderr", screen := FakeTerminal())
    assert main(command) == 0
    assert capsys.readouterr().out == piped.out
    assert "verifying digests" in screen.getvalue()
    assert "2 of 2 versions" in screen.getvalue()
