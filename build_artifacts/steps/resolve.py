"""Resolution of SOURCE, the argument of `build`, to a validated checkpoint at one revision."""

from __future__ import annotations

import re
from pathlib import Path

from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.checks import check_checkpoint, check_description
from build_artifacts.errors import SourceNotFound
from build_artifacts.sources.gguf import resolve_gguf
from build_artifacts.sources.hub import CheckpointCheck, Hub, resolve_hub_model
from build_artifacts.sources.local import find_directory, find_file, resolve_directory
from build_artifacts.sources.onnx_file import resolve_onnx
from build_artifacts.sources.package import resolve_package
from build_artifacts.sources.tokenizer import ensure_fast_tokenizer
from deployments.artifacts.manifest import ModelSource
from deployments.artifacts.store import is_model_id
from deployments.builds.sources import PACKAGE_PREFIX, is_gguf, is_onnx, is_weight_file

# Revision of a hub model. Revisions of all other sources contain a sha256 digest, which is longer.
_COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve(
    ref: str, scratch: Path, hub: Hub, check: CheckpointCheck = check_description
) -> Checkpoint:
    """Return the checkpoint of `ref`. Unpacked and converted files go to `scratch`.

    `check` may refuse a hub model by its files without weights, before these are downloaded.
    Raises SourceNotFound, SourceUnreadable, UnsafeSource or UnsupportedModel, and BuildError if a
    download cannot be stored.
    """
    if is_gguf(ref):
        return resolve_gguf(ref, scratch, hub)
    checkpoint = resolve_onnx(ref, scratch) if is_onnx(ref) else _locate(ref, scratch, hub, check)
    check_checkpoint(checkpoint)
    return ensure_fast_tokenizer(checkpoint, scratch / "converted")


def make_absolute(ref: str) -> str:
    """Return the absolute path of a local source, for a process in another directory.

    Return any other source unchanged. Raises BuildError for a path that `resolve` rejects.
    """
    path = find_file(ref) if is_weight_file(ref) else find_directory(ref)
    return ref if path is None else str(path)


def pin_to_revision(source: ModelSource) -> str:
    """Return the ref of `source`. For a hub model, the ref names the commit instead of a branch.

    The files of a branch such as `main` may change. The files of a commit never change.
    """
    model_id = source.ref.partition("@")[0]
    is_commit = _COMMIT.fullmatch(source.revision) is not None
    return f"{model_id}@{source.revision}" if is_commit and is_model_id(model_id) else source.ref


def _locate(ref: str, scratch: Path, hub: Hub, check: CheckpointCheck) -> Checkpoint:
    if ref.startswith(PACKAGE_PREFIX):
        return resolve_package(ref, scratch)
    directory = find_directory(ref)
    if directory is not None:
        return resolve_directory(directory)
    if is_model_id(ref.partition("@")[0]):
        return resolve_hub_model(ref, hub, check)
    raise SourceNotFound(
        f"`{ref}` is not a directory, a `pypi:` source or a model id",
        hint="pass a directory, `pypi:PACKAGE==VERSION/PATH`, or a hub id such as `org/name`; "
        "each may name a `.gguf` file, the first two an `.onnx` file",
    )
