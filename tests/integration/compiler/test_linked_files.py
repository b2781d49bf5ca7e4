"""Files of the Hugging Face cache, which are links to files whose names have no format."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from build_artifacts.sources.hub import HuggingFaceHub
from build_artifacts.steps.dequantize_gguf import dequantize_gguf
from build_artifacts.steps.resolve import resolve
from tests.support.tiny_decoders import tiny_llama, write_gguf
from tests.support.tiny_encoders import tiny_checkpoint


def link_to_blob(path: Path) -> Path:
    """Move the file `path` to a directory of blobs, and leave a link as the cache does."""
    blob = path.parents[1] / "blobs" / "0123abcd"
    blob.parent.mkdir(exist_ok=True)
    path.rename(blob)
    path.symlink_to(blob)
    return path


def test_gguf_file_of_the_cache_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    llama = tiny_llama(tmp_path / "llama")
    file = link_to_blob(write_gguf(llama, tmp_path / "snapshot" / "tiny.gguf"))
    checkpoint = resolve(str(file), tmp_path, HuggingFaceHub())
    assert checkpoint.packed == file
    assert checkpoint.source.ref == str(file)
    (tmp_path / "whole").mkdir()
    dequantize_gguf(checkpoint, tmp_path / "whole")
    assert (tmp_path / "whole" / "model.safetensors").is_file()


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """An ONNX file beside the files of its checkpoint. No test reads its content."""
    directory = tiny_checkpoint(tmp_path / "snapshot", layers=1)
    (directory / "model.onnx").write_bytes(b"a graph")
    return directory / "model.onnx"


def test_onnx_file_of_the_cache_has_its_config_beside_the_link(graph: Path, tmp_path: Path) -> None:
    file = link_to_blob(graph)
    checkpoint = resolve(str(file), tmp_path, HuggingFaceHub())
    assert (checkpoint.packed, checkpoint.directory) == (file, file.parent)


def test_link_to_an_onnx_file_has_its_config_beside_the_file(graph: Path, tmp_path: Path) -> None:
    link = tmp_path / "elsewhere" / "deep" / "model.onnx"
    link.parent.mkdir(parents=True)
    link.symlink_to(graph)
    checkpoint = resolve(str(link), tmp_path, HuggingFaceHub())
    assert (checkpoint.packed, checkpoint.directory) == (link, graph.parent)


def test_relative_path_has_the_config_of_its_directory(
    graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    shutil.copytree(graph.parent, tmp_path / "copy")
    checkpoint = resolve("../copy/model.onnx", tmp_path, HuggingFaceHub())
    assert checkpoint.source.ref == str(tmp_path / "copy" / "model.onnx")
