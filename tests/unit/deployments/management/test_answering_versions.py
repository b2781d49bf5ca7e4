"""The version that answers stays: substitutes of the default one, and promotions meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deployments.artifacts.locks import is_locked
from deployments.artifacts.manifest import MANIFEST_NAME
from deployments.artifacts.store import LATEST_NAME, model_directory
from deployments.management import garbage, removal
from deployments.management.garbage import find_garbage
from deployments.plan.plan_file import PLAN_NAME
from tests.support.artifacts import refuse_version, seal_tiny_version

MODEL = "acme/tiny"
OLD, OTHER, NEW = "000000000001", "000000000002", "000000000003"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Create a store of one model with three versions."""
    for version in (OLD, OTHER, NEW):
        seal_tiny_version(tmp_path, MODEL, version)
    return tmp_path


def test_version_that_answers_in_place_of_refused_ones_stays(store: Path) -> None:
    assert [item.path.name for item in find_garbage(store).items] == [OLD]
    for version in (OTHER, NEW):
        refuse_version(store, MODEL, version)
    assert [item.path.name for item in find_garbage(store).items] == [OTHER]


def test_version_that_answers_in_place_of_damaged_ones_stays(store: Path) -> None:
    for version in (OTHER, NEW):
        (model_directory(store, MODEL) / version / MANIFEST_NAME).write_text("{")
    assert find_garbage(store).items == ()


def test_all_versions_stay_while_latest_names_a_missing_one(store: Path) -> None:
    shutil.rmtree(model_directory(store, MODEL) / NEW)
    assert find_garbage(store).items == ()


def test_all_versions_stay_while_latest_cannot_be_read(store: Path) -> None:
    latest = model_directory(store, MODEL) / LATEST_NAME
    latest.unlink()
    latest.mkdir()
    assert find_garbage(store).items == ()


def test_plan_is_locked_while_a_version_is_removed(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = []

    def record(directory: Path, _building: Path) -> None:
        locked.append((directory.name, is_locked(store / f"{PLAN_NAME}.lock")))

    monkeypatch.setattr(removal, "remove_atomically", record)
    monkeypatch.setattr(garbage, "remove_atomically", record)
    garbage.remove(find_garbage(store))
    removal.remove(store, f"{MODEL}@{OTHER}")
    assert locked == [(OLD, True), (OTHER, True)]
