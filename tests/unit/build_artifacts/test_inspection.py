from __future__ import annotations

from pathlib import Path

import pytest

from build_artifacts.inspection import format_costs, migrate_manifests
from deployments.artifacts.manifest import MANIFEST_NAME
from deployments.errors import ManifestInvalid
from deployments.tuning.costs import read_costs
from tests.support.artifacts import make_previous, seal_tiny
from tests.support.tuning_artifacts import seal_tunable, write_table


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


def test_costs_list_rejected_and_unmeasured_candidates(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, names=["plain", "far", "astray"])
    reasons = {"rejected": {"astray": "mean cosine 0.1 < 0.985"}, "unmeasured": {"far": "no GPU"}}
    write_table(target, {"1x16": "plain"}, **reasons)
    table = read_costs(target)
    assert table is not None
    assert format_costs(table).splitlines()[-2:] == [
        "astray violates the gate here: mean cosine 0.1 < 0.985",
        "far was not measured here: no GPU",
    ]
