"""The command `build` on every kind of checkpoint, which gives a build or an error with a hint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from build_artifacts.__main__ import main
from build_artifacts.checkpoints.checkpoint import content_digest
from build_artifacts.presets import CPU_INT8, SEARCH_PRESETS
from build_artifacts.recipes import BuildRecipe
from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.store import BUILDING_NAME
from deployments.tuning.parity import ReferenceOutputs, cosines
from tests.integration.compiler.test_tokenizer import TEXTS, read_words
from tests.support.tiny_encoders import write_json

SourceChange = Callable[[Path], Path | None]


def build(source: Path, store: Path) -> int:
    quickly = ["--search", "quick", "--tune-seconds", "0"]
    return main(["build", str(source), "--store", str(store), *quickly])


@pytest.fixture(autouse=True)
def one_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SEARCH_PRESETS, "quick", BuildRecipe(candidates=(CPU_INT8,)))


@pytest.fixture
def source(tmp_path: Path, embedding_source: Path) -> Path:
    return Path(shutil.copytree(embedding_source, tmp_path / "model"))


def sharded(directory: Path) -> int:
    """Split the weights into files of at most 20 kB. Return the number of files."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(directory)
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="20KB")
    return len(list(directory.glob("model-*.safetensors")))


def with_words_only(directory: Path) -> None:
    """Replace the tokenizer by `vocab.txt`, as in the BERT checkpoints of 2018."""
    words = read_words(directory / "tokenizer.json")
    (directory / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    (directory / "tokenizer.json").unlink()
    write_json(directory / "tokenizer_config.json", {"model_max_length": 512})


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_pointer_of_git_lfs_is_named(
    name: str, tmp_path: Path, source: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
    (source / name).write_text(pointer, encoding="utf-8")
    assert build(source, tmp_path / "store") == 1
    shown = capfd.readouterr().err
    assert f"`{name}` is a pointer of Git LFS" in shown
    assert "git lfs pull" in shown


def test_shards_and_vocabulary_build_same_artifact(
    tmp_path: Path, source: Path, embedding_source: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sharded(source) > 2
    with_words_only(source)
    store = tmp_path / "store"
    assert build(source, store) == 0
    said = capfd.readouterr()
    assert "local/model " in said.out
    assert " is built: " in said.out
    (directory,) = (path for path in (store / "local--model").iterdir() if path.is_dir())
    manifest = ArtifactManifest.read(directory)
    assert manifest.source.revision == content_digest(source)
    assert manifest.candidates[0].parity.cosine_mean > 0.99

    made, own = (
        Tokenizer.from_file(str(place / "tokenizer.json"))
        for place in (directory, embedding_source)
    )
    for text in TEXTS:
        assert made.encode(text).ids == own.encode(text).ids
    # The reference outputs equal those of the original model, whose weights are in one file.
    reference = ReferenceOutputs.read(directory / "reference.npz")
    assert float(cosines(reference.outputs, original(embedding_source, reference)).min()) > 0.99999


def original(source: Path, reference: ReferenceOutputs) -> list[np.ndarray]:
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(source).eval()
    with torch.inference_mode():
        return [
            model(torch.from_numpy(item.ids.astype(np.int64))[None])[0][0].mean(0).numpy()
            for item in reference.items
        ]


def pickle_only(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def gguf_beside_the_config(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "model-Q8_0.gguf")


def a_gguf_file(directory: Path) -> Path:
    gguf_beside_the_config(directory)
    return directory / "model-Q8_0.gguf"


def remote_code(directory: Path) -> None:
    write_json(directory / "config.json", {"model_type": "x", "auto_map": {"AutoModel": "m.M"}})


def no_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def unreadable_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").mkdir()


def half_the_weights(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def a_shard_missing(directory: Path) -> None:
    sharded(directory)
    next(iter(sorted(directory.glob("model-*.safetensors")))).unlink()


def nothing_there(directory: Path) -> Path:
    return directory / "nowhere"


@pytest.mark.parametrize(
    ("change", "error", "hint"),
    [
        (pickle_only, "pickled weights only (`pytorch_model.bin`)", "safetensors"),
        (
            gguf_beside_the_config,
            "GGUF weights only (`model-Q8_0.gguf`)",
            "build from the original safe",
        ),
        (a_gguf_file, "`model-Q8_0.gguf` is corrupt: not a GGUF file", "download or save"),
        (remote_code, "requires remote code (`auto_map`)", "architecture is part of transformers"),
        (no_tokenizer, "no `tokenizer.json` in", "save_pretrained"),
        (unreadable_weights, "cannot be read: a directory, not a file", "permissions"),
        (half_the_weights, "`model.safetensors` is corrupt", "download or save"),
        (a_shard_missing, "no `model-00001-of-", "safetensors weights"),
        (nothing_there, "is not a directory, a `pypi:` source or a model id", "pass a directory"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_unsupported_source_prints_error_and_hint(
    tmp_path: Path,
    source: Path,
    change: SourceChange,
    error: str,
    hint: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    changed = change(source) or source
    store = tmp_path / "store"
    capfd.readouterr()  # discard the output from the change of the checkpoint
    assert build(changed, store) == 1
    said = capfd.readouterr()
    assert said.out == ""
    message, blank, advice = said.err.splitlines()[-3:]
    assert message.startswith("error: ")
    assert error in message
    assert blank == ""
    assert advice.startswith("hint: ")
    assert hint in advice
    assert "Traceback" not in said.err
    assert [path.name for path in store.iterdir()] == [BUILDING_NAME]
    assert list((store / BUILDING_NAME).iterdir()) == []
