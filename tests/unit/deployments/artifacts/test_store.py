from __future__ import annotations

from pathlib import Path

import pytest

from deployments.artifacts.store import (
    BUILD_NAME,
    build_path,
    list_model_directories,
    list_version_directories,
    model_directory,
    read_model_id,
)

VERSIONS = ["0123456789ab", "ba9876543210"]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with two models, and what else may lie in it."""
    for model_id in ("org/name", "bare"):
        for version in VERSIONS:
            (model_directory(tmp_path, model_id) / version).mkdir(parents=True)
    (tmp_path / ".building").mkdir()
    (tmp_path / "plan.json").touch()
    (tmp_path / "two words").mkdir()
    bare = model_directory(tmp_path, "bare")
    (bare / "latest").write_text(VERSIONS[0])
    (bare / "notes").mkdir()
    (bare / "aaaaaaaaaaaa").touch()
    return tmp_path


def test_models_are_directories_with_the_name_of_a_model(store: Path) -> None:
    directories = list_model_directories(store)
    assert [read_model_id(each) for each in directories] == ["bare", "org/name"]
    assert directories == [model_directory(store, each) for each in ("bare", "org/name")]
    assert list_model_directories(store / "missing") == []


def test_versions_are_directories_with_the_name_of_a_version(store: Path) -> None:
    model = model_directory(store, "bare")
    assert list_version_directories(model) == [model / version for version in VERSIONS]
    assert list_version_directories(store / "missing") == []
    assert list_version_directories(model / "latest") == []


@pytest.mark.parametrize("model_id", ["bare", "org/name", "org/name-with-dash"])
def test_name_of_a_build_gives_its_model_and_version(tmp_path: Path, model_id: str) -> None:
    match = BUILD_NAME.fullmatch(build_path(tmp_path, model_id, VERSIONS[0]).name)
    assert match is not None
    assert (read_model_id(Path(match["model"])), match["version"]) == (model_id, VERSIONS[0])
