"""Checkpoints on disk: the files that a build reads, their contents and their digest."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Never, TypeVar

from build_artifacts.errors import (
    SourceUnreadable,
    UnsafeSource,
    UnsupportedModel,
)
from deployments.artifacts.manifest import ModelSource
from deployments.artifacts.store import file_sha256, resolve_inside
from deployments.errors import PathOutsideArtifact

_HASHED_SUFFIXES = (".json", ".txt", ".jinja", ".safetensors")
# Weights that no build reads: copies in the formats of Mistral and Meta, and training checkpoints.
_UNREAD_WEIGHTS = re.compile(
    r"((.*/)?consolidated[^/]*|(original|checkpoint-\d+)/.*)\.safetensors", re.DOTALL
)
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # start of a pointer file
CONFIG_NAME = "config.json"
SAFETENSORS_NAME = "model.safetensors"
SAFETENSORS_INDEX_NAME = f"{SAFETENSORS_NAME}.index.json"  # with the file of each tensor, by name
ADAPTER_CONFIG_NAME = "adapter_config.json"
MODULES_NAME = "modules.json"
DAMAGED_HINT = "download or save the checkpoint again"
# Module types of sentence-transformers that the build supports, in the order of their use.
MODULE_TYPES = ("Transformer", "Pooling", "Dense", "Normalize")
# Those of a SPLADE model. sentence-transformers 5.4 replaced MLMTransformer by Transformer.
SPLADE_POOLING = "SpladePooling"
SPLADE_MODULE_TYPES = (("MLMTransformer", SPLADE_POOLING), ("Transformer", SPLADE_POOLING))

Json = Any  # parsed JSON
T = TypeVar("T")
_TYPE_NAMES = {dict: "an object", list: "a list", str: "a string", int: "an integer"}


class SentenceModule(NamedTuple):
    """An entry of modules.json, which lists the modules of a sentence-transformers model."""

    type: str  # import path of the class
    path: str  # directory within the checkpoint

    @property
    def class_name(self) -> str:
        return self.type.rpartition(".")[2]


@dataclass(frozen=True)
class Checkpoint:
    """Model on disk, pinned to a revision: its files do not change.

    `packed` is a GGUF or ONNX file with the weights, or None. `directory` has all other files, such
    as the modules.json of a sentence-transformers model.
    """

    directory: Path
    source: ModelSource
    default_id: str
    packed: Path | None = None

    @cached_property
    def weights(self) -> Path:
        """Directory of config.json, tokenizer.json and the weights, which modules.json may name.

        Raises UnsafeSource as `module` does, and the errors of `read_modules`.
        """
        modules = read_modules(self.directory)
        return self.module(modules[0].path) if modules else self.directory

    def count_bytes(self) -> int:
        """Return the bytes of `packed` or, without it, of the `hashed_files` of `directory`."""
        files = [self.packed] if self.packed else [p for _, p in hashed_files(self.directory)]
        return sum(path.stat().st_size for path in files)

    def module(self, path: str) -> Path:
        """Return the directory of a sentence-transformers module.

        Raises UnsafeSource if `path` points outside the checkpoint.
        """
        try:
            return resolve_inside(self.directory, path)
        except PathOutsideArtifact as exc:
            raise UnsafeSource(
                f"`{MODULES_NAME}` points outside the checkpoint: `{path}`",
                hint="use a trusted checkpoint",
            ) from exc


def unreadable_source_error(path: Path, reason: str) -> SourceUnreadable:
    """Build the error for an existing path that cannot be read."""
    return SourceUnreadable(
        f"`{path}` cannot be read: {reason}",
        hint="check owner and permissions; download or copy the file again",
    )


def is_plain_file(path: Path) -> bool:
    """Return whether `path` is a readable file; False when nothing exists there.

    Raises SourceUnreadable for a directory, a broken link, a pipe or missing permissions.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would block until a writer connects.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError as exc:
        if path.is_symlink():
            raise unreadable_source_error(path, f"broken link to `{path.readlink()}`") from exc
        return False
    except OSError as exc:
        raise unreadable_source_error(path, str(exc.strerror)) from exc
    try:
        mode = os.fstat(descriptor).st_mode
    finally:
        os.close(descriptor)
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "a device or a pipe"
        raise unreadable_source_error(path, f"{kind}, not a file")
    return True


def read_json(path: Path, default: Json = None) -> Json:
    """Return the JSON value in `path`, or `default` when the file is missing.

    Raises UnsupportedModel for invalid JSON and SourceUnreadable for an unreadable file.
    """
    if not is_plain_file(path):
        return default
    try:
        return json.loads(path.read_bytes())
    except OSError as exc:
        raise unreadable_source_error(path, str(exc.strerror)) from exc
    except (ValueError, RecursionError) as exc:
        raise corrupt_file_error(path, str(exc)) from exc


def corrupt_file_error(path: Path, reason: str) -> UnsupportedModel:
    """Build the error for a file with invalid content."""
    if _is_lfs_pointer(path):
        return UnsupportedModel(
            f"`{path.name}` is a pointer of Git LFS, not the file itself",
            hint="run `git lfs install` and `git lfs pull` in the checkpoint, or download it with "
            "`hf download`",
        )
    return UnsupportedModel(f"`{path.name}` is corrupt: {reason}", hint=DAMAGED_HINT)


def _is_lfs_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        return False


def read_object(path: Path) -> dict[str, Json]:
    """Return the JSON object in `path`, empty when the file is missing.

    Raises UnsupportedModel if the file has no JSON object, SourceUnreadable if it is unreadable.
    """
    value = read_json(path, default={})
    if not isinstance(value, dict):
        raise corrupt_file_error(path, "not a JSON object")
    return value


def read_field(path: Path, name: str, kind: type[T]) -> T | None:
    """Return a field of the JSON object in `path`, None if the field or the file is missing.

    Raises UnsupportedModel for a value of another type than `kind`, and the errors of
    `read_object`.
    """
    value = read_object(path).get(name)
    if value is not None and not isinstance(value, kind):
        raise corrupt_file_error(path, f"`{name}` is not {_TYPE_NAMES[kind]}")
    return value


def read_modules(directory: Path) -> list[SentenceModule]:
    """Return the modules in modules.json, empty when the file is missing.

    Raises UnsupportedModel if the file has no module list, SourceUnreadable if it is unreadable.
    """
    path = directory / MODULES_NAME
    modules = read_json(path, default=[])
    if not isinstance(modules, list) or not all(map(_is_module, modules)):
        raise corrupt_file_error(path, "not a list of modules with `type` and `path`")
    return [SentenceModule(module["type"], module["path"]) for module in modules]


def is_splade_model(directory: Path) -> bool:
    """Return whether the modules are those of a sparse encoder. Raises as `read_modules` does."""
    return any(module.class_name == SPLADE_POOLING for module in read_modules(directory))


def check_modules(directory: Path, *, sparse: bool) -> None:
    """Check the types, the order and the number of the sentence-transformers modules.

    `sparse` selects the modules of a SPLADE model instead of those of an embedding model. A
    checkpoint without modules passes.

    Raises UnsupportedModel for other modules. Those of an embedding model are of MODULE_TYPES, in
    this order, with one Transformer and at most one Pooling. Raises the errors of `read_modules`.
    """
    names = [module.class_name for module in read_modules(directory)]
    if sparse:
        _check_splade_modules(names)
        return
    hint = f"supported: {', '.join(MODULE_TYPES)}"
    for name in names:
        if name not in MODULE_TYPES:
            raise UnsupportedModel(
                f"`{MODULES_NAME}` has the unsupported module `{name}`", hint=hint
            )
    if names != sorted(names, key=MODULE_TYPES.index):
        raise UnsupportedModel(
            f"`{MODULES_NAME}` has the modules in the unsupported order {', '.join(names)}",
            hint=hint,
        )
    if names and (names.count("Transformer") != 1 or names.count("Pooling") > 1):
        raise UnsupportedModel(
            f"`{MODULES_NAME}` has the modules {', '.join(names)}; one Transformer and at most one "
            "Pooling are supported",
            hint="use a checkpoint with one Transformer",
        )


def _check_splade_modules(names: Sequence[str]) -> None:
    if names and tuple(names) not in SPLADE_MODULE_TYPES:
        raise UnsupportedModel(
            f"`{MODULES_NAME}` has the modules {', '.join(names)}, which are not those of a SPLADE "
            "model",
            hint=f"supported: {' or '.join(map(', '.join, SPLADE_MODULE_TYPES))}",
        )


def _is_module(value: Json) -> bool:
    keys = SentenceModule._fields
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in keys)


def is_hashed(name: str) -> bool:
    """Return whether the build downloads the file `name` and includes it in the revision digest."""
    return name.endswith(_HASHED_SUFFIXES) and not _UNREAD_WEIGHTS.fullmatch(name)


def hashed_files(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield relative name and path of the files that `is_hashed` accepts, sorted by path.

    Hidden files and directories are left out, and links to directories other than those of
    sentence-transformers modules inside `directory`. Raises SourceUnreadable if a directory or one
    of these files cannot be read, and the errors of `read_modules`.
    """
    modules = [directory / module.path for module in read_modules(directory)]
    inside = directory.resolve()

    def is_entered(path: Path) -> bool:
        if path.name.startswith("."):
            return False
        is_module = any(module.is_relative_to(path) for module in modules)
        return not path.is_symlink() or (is_module and path.resolve().is_relative_to(inside))

    paths = []
    for top, below, names in os.walk(directory, onerror=_raise_unreadable, followlinks=True):
        below[:] = [name for name in below if is_entered(Path(top, name))]
        paths += [Path(top, name) for name in names if not name.startswith(".")]
    for path in sorted(paths):
        name = path.relative_to(directory).as_posix()
        if is_hashed(name) and is_plain_file(path):
            yield name, path


def list_weight_files(weights: Path) -> list[Path]:
    """Return the files of the weights. As in transformers, one whole file precedes shards."""
    if (weights / SAFETENSORS_NAME).is_file():
        return [weights / SAFETENSORS_NAME]
    shards = read_object(weights / SAFETENSORS_INDEX_NAME)["weight_map"].values()
    return [weights / shard for shard in sorted(set(shards))]


def write_index(weights: Path, shards: Mapping[str, str], size: int) -> None:
    """Write the file with the shard of each tensor, by name. `size` is that of all, in bytes."""
    index = {"metadata": {"total_size": size}, "weight_map": shards}
    (weights / SAFETENSORS_INDEX_NAME).write_text(json.dumps(index), encoding="utf-8")


def copy_without_weights(
    directory: Path, into: Path, *, weights: Path, without: Collection[str] = ()
) -> None:
    """Copy `hashed_files` to `into`, except the weights in `weights` and the names in `without`.

    Weights of sentence-transformers modules such as Dense are copied, because these modules have
    directories of their own.
    Raises SourceUnreadable if a file cannot be read.
    """
    for name, path in hashed_files(directory):
        is_weight = name.endswith((".safetensors", ".safetensors.index.json"))
        is_model = is_weight and path.parent == weights
        if not is_model and name not in without:
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, into / name)


def _raise_unreadable(error: OSError) -> Never:
    raise unreadable_source_error(Path(str(error.filename)), str(error.strerror)) from error


def content_digest(directory: Path) -> str:
    """Return the hex digest of names and contents of `hashed_files`.

    Raises SourceUnreadable if a file cannot be read.
    """
    digest = hashlib.sha256()
    for name, path in hashed_files(directory):
        try:
            line = f"{name}\0{file_sha256(path)}\n"
        except OSError as exc:
            raise unreadable_source_error(path, str(exc.strerror)) from exc
        digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()
