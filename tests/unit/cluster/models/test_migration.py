from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cluster.models.migration import migrate_manifests
from deployments.artifacts.manifest import MANIFEST_NAME, ArtifactManifest
from deployments.artifacts.migration import SCHEMA
from deployments.errors import ManifestInvalid
from hundredfold.__main__ import main
from tests.support.artifacts import make_previous, seal_tiny
from tests.support.ordinary_rights import ordinary_rights


def test_migrate_writes_manifests_of_the_previous_schema_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = seal_tiny(tmp_path, "tiny/old"), seal_tiny(tmp_path, "tiny/new")
    make_previous(old)
    untouched = (new / MANIFEST_NAME).read_bytes()
    os.utime(old / MANIFEST_NAME, (1_000, 1_000))
    loaded = ArtifactManifest.read(old)
    for expected in ("1 manifests migrated", "0 manifests migrated"):
        assert main(["models", "migrate", "--store", str(tmp_path)]) == 0
        assert expected in capsys.readouterr().out
    assert json.loads((old / MANIFEST_NAME).read_bytes())["schema_version"] == SCHEMA
    assert ArtifactManifest.read(old) == loaded
    assert (old / MANIFEST_NAME).stat().st_mtime == 1_000, "the time of the seal"
    assert (new / MANIFEST_NAME).read_bytes() == untouched


def test_migration_skips_directories_without_a_manifest(tmp_path: Path) -> None:
    old = seal_tiny(tmp_path, "tiny/old")
    make_previous(old)
    seal_tiny(tmp_path, "tiny/new")
    (tmp_path / "tiny--empty" / "0123456789ab").mkdir(parents=True)
    assert list(migrate_manifests(tmp_path)) == [old]
    assert list(migrate_manifests(tmp_path)) == []


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_migration_names_a_damaged_manifest(tmp_path: Path, content: bytes) -> None:
    damaged = seal_tiny(tmp_path, "tiny/torn")
    (damaged / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(ManifestInvalid, match=f"tiny/torn@{damaged.name}"):
        list(migrate_manifests(tmp_path))


def test_store_that_cannot_be_written_is_reported(
    public_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = seal_tiny(public_directory, "tiny/old")
    make_previous(old)
    old.chmod(0o555)
    with ordinary_rights():
        assert main(["models", "migrate", "--store", str(public_directory)]) == 1
    assert f"cannot migrate the store {public_directory}: " in capsys.readouterr().err
    old.chmod(0o755)


def test_missing_store_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "migrate", "--store", str(tmp_path / "typo")]) == 1
    assert f"there is no store {tmp_path / 'typo'}" in capsys.readouterr().err
