from __future__ import annotations

from pathlib import Path

import pytest

from deployments.artifacts.locks import directory_lock
from deployments.artifacts.store import (
    HOSTS_NAME,
    StoredBuild,
    build_path,
    building_directory,
    create_scratch,
    find_abandoned_scratch,
    find_abandoned_scratch_logs,
    host_directory,
    is_model_id,
    list_artifacts,
    list_builds,
    list_host_files,
    list_logs_without_version,
    list_model_directories,
    list_version_directories,
    lock_path,
    log_path,
    model_directory,
    read_aliased_versions,
    read_model_id,
    set_latest,
)
from deployments.errors import ManifestInvalid
from tests.support.ordinary_rights import ordinary_rights

VERSIONS = ["0123456789ab", "ba9876543210"]
# The directory of `org-/name` is `org---name`, which must not be read as `org/-name`.
MODEL_IDS = ["bare", "bare-", "org/name", "org/name-with-dash", "org-/name"]
NO_MODEL_IDS = [
    "",
    ".hidden",
    "-dash",
    "two words",
    "a/b/c",
    "a--b",
    "a/b--c",
    "a..b",
    "../a",
    "a/",
    f"org/{'x' * 197}",  # leaves no room for the longer names of temporary files
    "plan.json",
    "plan.json.lock",
]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Create a store with two models, and with entries that are neither models nor versions."""
    for model_id in ("org/name", "bare"):
        for version in VERSIONS:
            (model_directory(tmp_path, model_id) / version).mkdir(parents=True)
    (tmp_path / "plan.json").touch()
    for name in (".building", "two words", "two..dots", "one--two--three"):
        (tmp_path / name / VERSIONS[0]).mkdir(parents=True)
    bare = model_directory(tmp_path, "bare")
    set_latest(tmp_path, "bare", VERSIONS[0])
    (bare / "notes").mkdir()
    (bare / "aaaaaaaaaaaa").touch()
    return tmp_path


@pytest.mark.parametrize("model_id", MODEL_IDS)
def test_directory_of_a_model_tells_its_id(tmp_path: Path, model_id: str) -> None:
    assert is_model_id(model_id)
    directory = model_directory(tmp_path, model_id)
    assert directory.parent == tmp_path
    assert read_model_id(directory) == model_id


@pytest.mark.parametrize("text", NO_MODEL_IDS)
def test_text_that_is_no_model_id_has_no_directory(tmp_path: Path, text: str) -> None:
    assert not is_model_id(text)
    with pytest.raises(ManifestInvalid):
        model_directory(tmp_path, text)


def test_models_are_directories_with_the_name_of_a_model(store: Path) -> None:
    directories = list_model_directories(store)
    assert [read_model_id(each) for each in directories] == ["bare", "org/name"]
    assert directories == [model_directory(store, each) for each in ("bare", "org/name")]
    assert list_model_directories(store / "missing") == []


def test_unreadable_store_is_not_an_empty_one(public_directory: Path) -> None:
    public_directory.chmod(0o311)
    with ordinary_rights(), pytest.raises(PermissionError):
        list_model_directories(public_directory)


def test_versions_are_directories_with_the_name_of_a_version(store: Path) -> None:
    model = model_directory(store, "bare")
    assert list_version_directories(model) == [model / version for version in VERSIONS]
    assert list_version_directories(store / "missing") == []
    assert list_version_directories(model / "latest") == []


def test_artifacts_are_the_versions_of_all_models(store: Path) -> None:
    assert list_artifacts(store) == [
        store / model / version for model in ("bare", "org--name") for version in VERSIONS
    ]
    assert list_artifacts(store / "missing") == []


def test_files_in_the_directory_of_a_model_name_versions(store: Path) -> None:
    model = model_directory(store, "bare")
    (model / "stable").write_text(f"{VERSIONS[1]}\n")
    (model / "notes.txt").write_text(f"not {VERSIONS[1]}")
    assert read_aliased_versions(model) == {*VERSIONS}
    (model / "latest").write_text("damaged")
    assert read_aliased_versions(model) is None


def test_files_of_all_hosts_are_found_by_name(tmp_path: Path) -> None:
    assert list_host_files(tmp_path, "*") == []
    expected = []
    for fingerprint in ("aa", "bb"):
        directory = host_directory(tmp_path, fingerprint)
        directory.mkdir(parents=True)
        for name in ("cpu-1.json", "report.json"):
            (directory / name).touch()
        expected.append(directory / "cpu-1.json")
    (tmp_path / HOSTS_NAME / "cpu-1.json").touch()
    assert list_host_files(tmp_path, "cpu-*.json") == expected


@pytest.mark.parametrize("model_id", MODEL_IDS)
def test_build_is_found_by_its_directory_lock_or_log(tmp_path: Path, model_id: str) -> None:
    building = building_directory(tmp_path)
    assert list_builds(building) == []
    path = build_path(tmp_path, model_id, VERSIONS[0])
    assert path.parent == building
    building.mkdir()
    (building / "of-an-earlier-release.log").touch()
    create_scratch(building)
    for each in (log_path(path), lock_path(path), path):
        each.mkdir()
        assert list_builds(building) == [StoredBuild(path, model_id, VERSIONS[0])]
        each.rmdir()
    for each in (log_path(path), lock_path(path), path):
        each.mkdir()
    other = build_path(tmp_path, model_id, VERSIONS[1])
    other.mkdir()
    assert [build.path for build in list_builds(building)] == [path, other]


def test_logs_without_version_belong_to_no_build(tmp_path: Path) -> None:
    assert list_logs_without_version(tmp_path) == []
    build = tmp_path / f"org--name--{VERSIONS[0]}"
    for path in (log_path(build), log_path(tmp_path / "other"), lock_path(tmp_path / "other")):
        path.touch()
    assert list_logs_without_version(tmp_path) == [log_path(tmp_path / "other")]


def test_scratch_is_abandoned_while_no_process_locks_it(tmp_path: Path) -> None:
    root, gone = create_scratch(tmp_path), create_scratch(tmp_path)
    for path in (root, gone):
        log_path(path).touch()
    gone.rmdir()
    with directory_lock(root):
        assert find_abandoned_scratch(tmp_path) == []
    assert find_abandoned_scratch(tmp_path) == [root]
    assert find_abandoned_scratch_logs(tmp_path) == [log_path(gone)]
