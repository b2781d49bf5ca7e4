"""GGUF and ONNX files in Python packages: no path leads to another package or directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.errors import BuildError, SourceNotFound, UnsafeSource
from build_artifacts.sources.gguf import resolve_gguf
from build_artifacts.sources.hub import HuggingFaceHub
from build_artifacts.sources.onnx_file import resolve_onnx
from build_artifacts.sources.package import locate_file, resolve_package

Resolve = Callable[[str, Path], Checkpoint]
KINDS = pytest.mark.parametrize(
    ("resolve", "suffix"),
    [
        (lambda ref, scratch: resolve_gguf(ref, scratch, HuggingFaceHub()), ".gguf"),
        (resolve_onnx, ".onnx"),
    ],
    ids=["gguf", "onnx"],
)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of installed packages with the package `gt-tiny`."""
    site = tmp_path / "site"
    (site / "gt_tiny-1.5.dist-info").mkdir(parents=True)
    (site / "gt_tiny-1.5.dist-info" / "METADATA").write_text("Name: gt-tiny\nVersion: 1.5\n")
    (site / "gt_tiny-1.5.dist-info" / "top_level.txt").write_text("gt_tiny\n")
    monkeypatch.syspath_prepend(str(site))
    return site


@KINDS
@pytest.mark.parametrize("directory", ["../outside", "gt_tiny/../../outside", "link"])
def test_file_outside_of_the_package_is_refused(
    resolve: Resolve, suffix: str, directory: str, site: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / f"secret{suffix}").write_bytes(b"GGUF")
    (outside / "config.json").write_text("{}")
    (site / "gt_tiny").mkdir()
    (site / "link").symlink_to(outside)
    with pytest.raises(UnsafeSource, match="points outside the package"):
        resolve(f"pypi:gt-tiny/{directory}/secret{suffix}", tmp_path)


def list_files(site: Path, *files: str) -> None:
    record = "".join(f"{file},,\n" for file in files)
    (site / "gt_tiny-1.5.dist-info" / "RECORD").write_text(record)


@KINDS
def test_file_of_another_installed_package_is_refused(
    resolve: Resolve, suffix: str, site: Path, tmp_path: Path
) -> None:
    list_files(site, f"gt_tiny/model{suffix}")
    (site / "other").mkdir()
    (site / "other" / f"model{suffix}").write_bytes(b"GGUF")
    (site / "other" / "config.json").write_text("{}")
    with pytest.raises(SourceNotFound, match=f"`gt-tiny` has no path `other/model{suffix}`"):
        resolve(f"pypi:gt-tiny/other/model{suffix}", tmp_path)


@pytest.mark.parametrize(
    ("path", "error"),
    [("other", SourceNotFound), (".", SourceNotFound), ("gt_tiny/../other", UnsafeSource)],
)
def test_directory_of_another_installed_package_is_refused(
    path: str, error: type[BuildError], site: Path, tmp_path: Path
) -> None:
    list_files(site, "gt_tiny/config.json", "../../bin/gt-tiny")
    for directory in (site, site / "other"):
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text("{}")
    with pytest.raises(error):
        resolve_package(f"pypi:gt-tiny/{path}", tmp_path)


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("other", SourceNotFound),
        (".", SourceNotFound),
        ("gt_tiny-1.5.dist-info", SourceNotFound),
        ("gt_tiny/../other", UnsafeSource),
    ],
)
def test_package_without_a_list_of_files_has_the_directories_that_it_states(
    path: str, error: type[BuildError], site: Path, tmp_path: Path
) -> None:
    for directory in (site, site / "other", site / "gt_tiny"):
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text("{}")
    with pytest.raises(error):
        resolve_package(f"pypi:gt-tiny/{path}", tmp_path)
    assert resolve_package("pypi:gt-tiny/gt_tiny", tmp_path).directory == site / "gt_tiny"


def test_package_without_any_list_has_the_directory_of_its_name(site: Path, tmp_path: Path) -> None:
    (site / "gt_tiny-1.5.dist-info" / "top_level.txt").unlink()
    for directory in ("other", "gt_tiny"):
        (site / directory).mkdir()
        (site / directory / "config.json").write_text("{}")
    assert resolve_package("pypi:gt-tiny/gt_tiny", tmp_path).directory == site / "gt_tiny"
    with pytest.raises(SourceNotFound) as caught:
        resolve_package("pypi:gt-tiny/other", tmp_path)
    assert "name a path below `gt_tiny`" in caught.value.hint


def test_listed_file_may_link_to_the_cache_of_an_installer(site: Path, tmp_path: Path) -> None:
    list_files(site, "gt_tiny/model.gguf")
    cached = tmp_path / "cached"
    cached.write_bytes(b"GGUF")
    (site / "gt_tiny").mkdir()
    (site / "gt_tiny" / "model.gguf").symlink_to(cached)
    located = locate_file("pypi:gt-tiny/gt_tiny/model.gguf", tmp_path)
    assert located == (site / "gt_tiny" / "model.gguf", "1.5+", "pypi/gt-tiny")


@KINDS
def test_missing_file_of_a_package_is_named(
    resolve: Resolve, suffix: str, site: Path, tmp_path: Path
) -> None:
    with pytest.raises(SourceNotFound, match=f"`gt-tiny` has no file `gt_tiny/a{suffix}`"):
        resolve(f"pypi:gt-tiny/gt_tiny/a{suffix}", tmp_path)
