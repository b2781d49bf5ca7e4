from __future__ import annotations

from pathlib import Path

import pytest

from build_artifacts.migration import migrate_manifests
from deployments.artifacts.manifest import MANIFEST_NAME
from deployments.errors import ManifestInvalid
from tests.support.artifacts import make_previous, seal_tiny


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
