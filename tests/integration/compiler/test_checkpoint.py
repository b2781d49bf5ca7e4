from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from build_artifacts.checkpoints.checkpoint import (
    content_digest,
    copy_without_weights,
    hashed_files,
)
from build_artifacts.errors import (
    BuildError,
    SourceNotFound,
    SourceUnreadable,
    UnsafeSource,
    UnsupportedModel,
)
from build_artifacts.sources.hub import HuggingFaceHub
from build_artifacts.sources.local import resolve_directory
from build_artifacts.steps.resolve import resolve
from deployments.builds.sources import sanitize_id
from tests.support.ordinary_rights import ordinary_rights
from tests.support.tiny_encoders import write_json

CheckpointDamage = Callable[[Path], None]
INDEX_NAME = "model.safetensors.index.json"


def pickle_only(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def only_a_trainer_s_state(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "training_args.bin").write_bytes(b"\x80\x04")


def gguf_beside_the_config(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "model-Q4_K_M.GGUF")


def gguf_alone(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()
    (directory / "model.gguf").write_bytes(b"GGUF")


def cut_to(size: int) -> CheckpointDamage:
    def cut(directory: Path) -> None:
        weights = directory / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:size])

    return cut


def pickle_under_a_safe_name(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00")


def header_without_end(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")


def no_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def cut_tokenizer(directory: Path) -> None:
    tokenizer = directory / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes()[:100])


def no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def adapter_beside_the_weights(directory: Path) -> None:
    write_json(directory / "adapter_config.json", {"peft_type": "LORA"})


def adapter_alone(directory: Path) -> None:
    (directory / "config.json").unlink()
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")
    write_json(directory / "adapter_config.json", {"base_model_name_or_path": "org/base"})


def cut_config(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": ')


def deep_config(directory: Path) -> None:
    (directory / "config.json").write_text("[" * 100_000)


def list_config(directory: Path) -> None:
    (directory / "config.json").write_text("[1]")


def own_program(directory: Path) -> None:
    write_json(directory / "config.json", {"model_type": "their_bert"})
    (directory / "modeling_their_bert.py").write_text("raise SystemExit('ran')")


def own_module(directory: Path) -> None:
    write_json(directory / "modules.json", [{"path": "", "type": "custom_st.Transformer"}])


def modules(value: object) -> CheckpointDamage:
    return lambda directory: write_json(directory / "modules.json", value)


def dangling(name: str) -> CheckpointDamage:
    def link(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).symlink_to("../../blobs/gone")

    return link


def directory_for(name: str) -> CheckpointDamage:
    def replace(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).mkdir()

    return replace


def pipe_for_config(directory: Path) -> None:
    (directory / "config.json").unlink()
    os.mkfifo(directory / "config.json")


def weight_map(value: object) -> CheckpointDamage:
    def index(directory: Path) -> None:
        write_json(directory / INDEX_NAME, {"weight_map": value})

    return index


def shard_promised_more(directory: Path) -> None:
    shard = "model-00001-of-00001.safetensors"
    (directory / "model.safetensors").rename(directory / shard)
    write_json(directory / INDEX_NAME, {"weight_map": {"pooler.lost": shard}})


def remote_model(directory: Path) -> None:
    write_json(directory / "config.json", {"auto_map": {"AutoModel": "theirs.Model"}})


def remote_kernels(directory: Path) -> None:
    write_json(directory / "config.json", {"attn_implementation": "theirs/kernels"})


def remote_tokenizer(directory: Path) -> None:
    write_json(directory / "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["t.T", None]}})


def shards_elsewhere(directory: Path) -> None:
    index = {"weight_map": {"embeddings": "../../secret.safetensors"}}
    write_json(directory / INDEX_NAME, index)


def shard_missing(directory: Path) -> None:
    index = {"weight_map": {"embeddings": "model-00001-of-00002.safetensors"}}
    write_json(directory / INDEX_NAME, index)


def static_embedding(directory: Path) -> None:
    (directory / "config.json").unlink()
    kind = "sentence_transformers.models.StaticEmbedding"
    write_json(directory / "modules.json", [{"path": "", "type": kind}])


def module_elsewhere(directory: Path) -> None:
    write_json(directory / "modules.json", [{"path": "../../etc", "type": "models.Transformer"}])


def pooling_elsewhere(directory: Path) -> None:
    pooling = directory / "1_Pooling"
    pooling.symlink_to(pooling.rename(directory.with_name("pooling")))


@pytest.mark.parametrize(
    ("damage", "error", "sentence"),
    [
        (pickle_only, UnsafeSource, "pickled weights only .`pytorch_model.bin`"),
        (no_weights, SourceNotFound, "no `model.safetensors`"),
        (only_a_trainer_s_state, SourceNotFound, "no `model.safetensors`"),
        (gguf_beside_the_config, UnsupportedModel, "GGUF weights only .`model-Q4_K_M.GGUF`"),
        (gguf_alone, UnsupportedModel, "GGUF weights only .`model.gguf`"),
        (cut_to(-7), UnsupportedModel, "`model.safetensors` is corrupt"),
        (cut_to(300), UnsupportedModel, "`model.safetensors` is corrupt"),
        (cut_to(0), UnsupportedModel, "`model.safetensors` is corrupt"),
        (pickle_under_a_safe_name, UnsupportedModel, "`model.safetensors` is corrupt"),
        (header_without_end, UnsupportedModel, "`model.safetensors` is corrupt"),
        (directory_for("model.safetensors"), SourceUnreadable, "safetensors.*a directory, not"),
        (dangling("model.safetensors"), SourceUnreadable, "broken link to `../../blobs/gone`"),
        (no_tokenizer, SourceNotFound, "no `tokenizer.json`"),
        (cut_tokenizer, UnsupportedModel, "`tokenizer.json` is corrupt"),
        (directory_for("tokenizer.json"), SourceUnreadable, "tokenizer.json.*a directory, not"),
        (no_config, SourceNotFound, "no `config.json`"),
        (adapter_beside_the_weights, UnsupportedModel, "the checkpoint also has a LoRA adapter"),
        (adapter_alone, UnsupportedModel, "a LoRA adapter of `org/base`, and no model"),
        (cut_config, UnsupportedModel, "`config.json` is corrupt"),
        (deep_config, UnsupportedModel, "`config.json` is corrupt"),
        (list_config, UnsupportedModel, "`config.json` is corrupt: not a JSON object"),
        (directory_for("config.json"), SourceUnreadable, "config.json.*a directory, not a file"),
        (dangling("config.json"), SourceUnreadable, "config.json.*broken link"),
        (pipe_for_config, SourceUnreadable, "config.json.*a device or a pipe"),
        (remote_model, UnsafeSource, "`config.json` requires remote code"),
        (remote_kernels, UnsafeSource, "remote code .`attn_implementation`"),
        (remote_tokenizer, UnsafeSource, "`tokenizer_config.json` requires remote code"),
        (own_program, UnsafeSource, "`modeling_their_bert.py` is remote code"),
        (own_module, UnsafeSource, r"`modules.json` requires remote code .`custom_st.Transf"),
        (modules([{"path": ""}]), UnsupportedModel, "`modules.json` is corrupt: not a list of mod"),
        (modules([{"type": "t"}]), UnsupportedModel, "`modules.json` is corrupt: not a list of"),
        (modules(None), UnsupportedModel, "`modules.json` is corrupt: not a list of modules"),
        (shards_elsewhere, UnsafeSource, "outside the checkpoint"),
        (weight_map({"a": ".."}), UnsafeSource, "outside the checkpoint"),
        (weight_map({"a": 7}), UnsafeSource, "outside the checkpoint"),
        (weight_map({}), UnsupportedModel, f"`{INDEX_NAME}` is corrupt"),
        (weight_map(["a"]), UnsupportedModel, f"`{INDEX_NAME}` is corrupt"),
        (shard_missing, SourceNotFound, "no `model-00001-of-00002.safetensors`"),
        (shard_promised_more, UnsupportedModel, "00001.safetensors` is corrupt.*`pooler.lost`"),
        (module_elsewhere, UnsafeSource, "points outside"),
        (pooling_elsewhere, UnsafeSource, "points outside the checkpoint: `1_Pooling`"),
        (static_embedding, UnsupportedModel, "unsupported module `StaticEmbedding`"),
    ],
)
def test_unsafe_checkpoint_is_rejected_in_one_line(
    tmp_path: Path,
    embedding_source: Path,
    damage: CheckpointDamage,
    error: type[BuildError],
    sentence: str,
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(embedding_source, directory)
    damage(directory)
    with pytest.raises(error, match=sentence) as caught:
        resolve(str(directory), tmp_path, HuggingFaceHub())
    assert caught.value.hint
    assert "\n" not in caught.value.message


@pytest.fixture
def public_copy(embedding_source: Path, public_directory: Path) -> Path:
    """A checkpoint in a directory that every user can read, unlike `tmp_path`."""
    copy = public_directory / "model"
    shutil.copytree(embedding_source, copy)
    for path in copy.rglob("*"):
        path.chmod(0o755)
    return copy


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "modules.json", "1_Pooling", "."]
)
def test_unreadable_file_is_named(public_copy: Path, name: str) -> None:
    (public_copy / name).chmod(0)
    with ordinary_rights(), pytest.raises(SourceUnreadable, match="Permission denied") as caught:
        resolve(str(public_copy), public_copy, HuggingFaceHub())
    assert f"`{(public_copy / name)}" in caught.value.message


def test_inaccessible_directory_is_named(public_copy: Path) -> None:
    public_copy.parent.chmod(0)
    with ordinary_rights(), pytest.raises(SourceUnreadable, match=f"`{public_copy}` cannot"):
        resolve(str(public_copy), public_copy, HuggingFaceHub())


@pytest.mark.parametrize(
    ("name", "error", "sentence"),
    [
        ("model.gguf", UnsupportedModel, "cannot be read"),
        ("pytorch_model.bin", UnsafeSource, "pickled weights only"),
        ("model.safetensors", SourceNotFound, "is a file"),
        ("model.zip", SourceNotFound, "is a file"),
    ],
)
def test_file_source_is_rejected(
    tmp_path: Path, name: str, error: type[BuildError], sentence: str
) -> None:
    (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(error, match=sentence) as caught:
        resolve(str(tmp_path / name), tmp_path, HuggingFaceHub())
    assert name in caught.value.message


def test_broken_link_source_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(tmp_path / "gone")
    with pytest.raises(SourceUnreadable, match="broken link"):
        resolve(str(tmp_path / "model"), tmp_path, HuggingFaceHub())


def test_sharded_weights_are_accepted(tmp_path: Path, embedding_source: Path) -> None:
    from transformers import AutoModel

    directory = tmp_path / "model"
    shutil.copytree(embedding_source, directory)
    (directory / "model.safetensors").unlink()
    AutoModel.from_pretrained(embedding_source).save_pretrained(directory, max_shard_size="30KB")
    assert len(list(directory.glob("model-*.safetensors"))) > 1
    assert resolve(str(directory), tmp_path, HuggingFaceHub()).weights == directory


def test_links_and_unused_programs_are_accepted(tmp_path: Path, embedding_source: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(embedding_source, directory)
    (directory / "modeling_bert.py").write_text("raise SystemExit('ran')")
    for name in ("config.json", "model.safetensors"):
        (directory / name).rename(tmp_path / name)
        (directory / name).symlink_to(tmp_path / name)
    checkpoint = resolve(str(directory), tmp_path, HuggingFaceHub())
    assert checkpoint.source.revision == content_digest(embedding_source)


def test_revision_depends_on_content_only(tmp_path: Path, embedding_source: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(embedding_source, copy)
    (copy / "README.md").write_text("words that are not the model")
    (copy / ".cache").mkdir()
    (copy / ".cache" / "hidden.json").write_text("{}")
    assert content_digest(copy) == content_digest(embedding_source)
    write_json(copy / "config_sentence_transformers.json", {"prompts": {"query": "q: "}})
    assert content_digest(copy) != content_digest(embedding_source)


def test_revision_depends_on_linked_modules(tmp_path: Path, embedding_source: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(embedding_source, copy)
    pooling = copy / "1_Pooling"
    shutil.copytree(pooling, copy / "other")
    write_json(copy / "other" / "config.json", {"pooling_mode": "cls"})
    pooling.rename(copy / "mean")
    revisions = set()
    for target in ("mean", "other"):
        pooling.symlink_to(target)
        revisions.add(content_digest(copy))
        pooling.unlink()
    assert len(revisions) == 2


def test_links_of_modules_that_leave_the_checkpoint_are_not_entered(
    tmp_path: Path, embedding_source: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(embedding_source, source)
    pooling = source / "1_Pooling"
    outside = pooling.rename(tmp_path / "outside")
    (outside / "gone.json").symlink_to(tmp_path / "nowhere")  # an error if it were read
    pooling.symlink_to(outside)
    assert "1_Pooling/config.json" not in dict(hashed_files(source))


def test_linked_modules_are_copied(tmp_path: Path, embedding_source: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(embedding_source, source)
    pooling = source / "1_Pooling"
    pooling.symlink_to(pooling.rename(source / "mean").name)
    (source / "again").symlink_to(".")  # no module, and endless
    copy_without_weights(source, tmp_path / "copy", weights=source)
    read = (tmp_path / "copy" / "1_Pooling" / "config.json").read_bytes()
    assert read == (source / "mean" / "config.json").read_bytes()
    assert not (tmp_path / "copy" / "again").exists()


@pytest.mark.parametrize(
    "ref", ["./nowhere/at/all", "~/no such model", "~nobody-of-this-name/model", "a/b/c", "a\0b"]
)
def test_missing_source_is_rejected_without_hub_call(tmp_path: Path, ref: str) -> None:
    with pytest.raises(SourceNotFound, match="is not a directory"):
        resolve(ref, tmp_path, HuggingFaceHub())


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("checkpoint-500", "checkpoint-500"),
        ("my model (v2)", "my-model-v2"),
        ("a--b..c", "a-b-c"),
        ("...", "model"),
    ],
)
def test_directory_name_becomes_id(tmp_path: Path, name: str, part: str) -> None:
    assert sanitize_id(name) == part
    if name != "...":
        (tmp_path / name).mkdir()
        assert resolve_directory(tmp_path / name).default_id == f"local/{part}"
