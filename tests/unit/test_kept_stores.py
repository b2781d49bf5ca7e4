"""The store that runs of the tests share belongs to one version of the compiler."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support import kept_stores, source_digests
from tests.support.kept_stores import UNUSED_S, name_store, use_store

SOURCES = ("build_artifacts/pipeline.py", "deployments/engines/base.py", "constraints.txt")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in SOURCES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("first")
    monkeypatch.setattr(source_digests, "REPOSITORY", tmp_path)
    return tmp_path


@pytest.mark.parametrize(("changed", "is_new"), [*zip(SOURCES, (True, False, True), strict=True)])
def test_changed_compilers_have_stores_of_their_own(
    changed: str, is_new: bool, sources: Path
) -> None:
    before = name_store()
    assert name_store() == before
    (sources / changed).write_text("second")
    assert (name_store() != before) == is_new


def test_store_is_not_that_of_users(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = name_store()
    monkeypatch.setenv("HUNDREDFOLD_STORE", str(sources))
    assert name_store() == before
    assert before.parent == kept_stores.DIRECTORY


def test_stores_that_no_run_has_used_for_a_day_are_removed(tmp_path: Path) -> None:
    used, old, recent, user = (
        tmp_path / name for name in ("test-store-a", "test-store", "test-store-b", "store")
    )
    for directory in (used, old, recent, user):
        directory.mkdir()
        (directory / "model").write_text("")
    long_ago = time.time() - UNUSED_S - 60
    for directory in (used, old, user):
        os.utime(directory, (long_ago, long_ago))
    use_store(used)
    assert {path.name for path in tmp_path.iterdir()} == {"test-store-a", "test-store-b", "store"}
    use_store(used)
    assert (used / "model").exists(), "the first use marks the store as recent"
