from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from build_artifacts.checkpoint import content_digest
from build_artifacts.errors import BuildError, SourceNotFound, UnsafeSource, UnsupportedModel
from build_artifacts.sources.hub import HuggingFaceHub
from build_artifacts.sources.local import id_part, resolve_directory
from build_artifacts.steps.resolve import resolve
from tests.builders import write_json

Damage = Callable[[Path], None]


def pickle_only(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def cut_weights(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])


def no_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def cut_tokenizer(directory: Path) -> None:
    tokenizer = directory / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes()[:100])


def no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def cut_config(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": ')


def remote_model(directory: Path) -> None:
    write_json(directory / "config.json", {"auto_map": {"AutoModel": "theirs.Model"}})


def remote_tokenizer(directory: Path) -> None:
    write_json(directory / "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["t.T", None]}})


def shards_elsewhere(directory: Path) -> None:
    index = {"weight_map": {"embeddings": "../../secret.safetensors"}}
    write_json(directory / "model.safetensors.index.json", index)


def shard_missing(directory: Path) -> None:
    index = {"weight_map": {"embeddings": "model-00001-of-00002.safetensors"}}
    write_json(directory / "model.safetensors.index.json", index)


def module_elsewhere(directory: Path) -> None:
    write_json(directory / "modules.json", [{"path": "../../etc", "type": "models.Transformer"}])


@pytest.mark.parametrize(
    ("damage", "error", "sentence"),
    [
        (pickle_only, UnsafeSource, "pickled weights only"),
        (no_weights, SourceNotFound, "no `model.safetensors`"),
        (cut_weights, UnsupportedModel, "`model.safetensors` is damaged"),
        (no_tokenizer, SourceNotFound, "no `tokenizer.json`"),
        (cut_tokenizer, UnsupportedModel, "`tokenizer.json` is damaged"),
        (no_config, SourceNotFound, "no `config.json`"),
        (cut_config, UnsupportedModel, "`config.json` is damaged"),
        (remote_model, UnsafeSource, "remote code"),
        (remote_tokenizer, UnsafeSource, "remote code"),
        (shards_elsewhere, UnsafeSource, "outside the checkpoint"),
        (shard_missing, SourceNotFound, "no `model-00001-of-00002.safetensors`"),
        (module_elsewhere, UnsafeSource, "points outside"),
    ],
)
def test_what_must_not_be_built_is_refused_in_one_line(
    tmp_path: Path, embedding_source: Path, damage: Damage, error: type[BuildError], sentence: str
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(embedding_source, directory)
    damage(directory)
    with pytest.raises(error, match=sentence) as caught:
        resolve(str(directory), tmp_path, HuggingFaceHub())
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_a_revision_is_the_content_not_the_place(tmp_path: Path, embedding_source: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(embedding_source, copy)
    (copy / "README.md").write_text("words that are not the model")
    (copy / ".cache").mkdir()
    (copy / ".cache" / "hidden.json").write_text("{}")
    assert content_digest(copy) == content_digest(embedding_source)
    write_json(copy / "config_sentence_transformers.json", {"prompts": {"query": "q: "}})
    assert content_digest(copy) != content_digest(embedding_source)


@pytest.mark.parametrize("ref", ["./nowhere/at/all", "~/no such model", "a/b/c"])
def test_a_source_that_is_nothing_is_refused_without_asking_the_hub(
    tmp_path: Path, ref: str
) -> None:
    with pytest.raises(SourceNotFound, match="no directory"):
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
def test_a_directory_s_name_becomes_an_id(tmp_path: Path, name: str, part: str) -> None:
    assert id_part(name) == part
    if name != "...":
        (tmp_path / name).mkdir()
        assert resolve_directory(str(tmp_path / name)).default_id == f"local/{part}"
