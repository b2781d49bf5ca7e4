"""Checkpoint in a local directory."""

from __future__ import annotations

from pathlib import Path

from build_artifacts.checkpoints.checkpoint import (
    Checkpoint,
    content_digest,
    is_plain_file,
    unreadable_source_error,
)
from build_artifacts.checkpoints.file_formats import unread_weights_error
from build_artifacts.errors import BuildError, SourceNotFound
from deployments.artifacts.manifest import ModelSource
from deployments.builds.sources import local_model_id


def find_directory(ref: str) -> Path | None:
    """Return the directory `ref`, or None if it does not exist.

    Raises BuildError for an empty `ref`, and for a path that exists but is no directory, or that
    cannot be read.
    """
    if not ref.strip():  # the path of an empty text is the working directory
        raise SourceNotFound(
            "SOURCE is empty", hint="pass a directory or a hub id; `.` is the working directory"
        )
    path = _expand(ref)
    if path is None:
        return None
    try:
        if path.is_dir():
            return path.resolve()
        if not path.parent.is_dir() or not is_plain_file(path):
            return None
    except OSError as exc:
        raise unreadable_source_error(path, str(exc.strerror)) from exc
    raise not_a_directory_error(path)


def find_file(ref: str) -> Path | None:
    """Return the absolute path of the file `ref`, or None if there is no such file.

    A link to a file stays unresolved: a blob of the Hugging Face cache has no suffix that states
    its format. Raises SourceUnreadable for a path that exists but is no file, or that cannot be
    read.
    """
    path = _expand(ref)
    if path is None or not is_plain_file(path):
        return None
    return path.parent.resolve() / path.name


def absolute_ref(ref: str) -> str:
    """Return the absolute path of a local file, whose directory clients do not see; else `ref`."""
    return str(find_file(ref) or ref)


def _expand(ref: str) -> Path | None:
    """Return the path `ref`; None for `~` of an unknown user, and for a null byte."""
    try:
        return None if "\0" in ref else Path(ref).expanduser()
    except RuntimeError:
        return None


def not_a_directory_error(path: Path) -> BuildError:
    """Build the error for a SOURCE that is a file."""
    return unread_weights_error(f"`{path}`", [path.name]) or SourceNotFound(
        f"`{path}` is a file; SOURCE must be the directory of a checkpoint",
        hint=f"pass its directory: `{path.parent}`",
    )


def resolve_directory(directory: Path) -> Checkpoint:
    """Return the checkpoint in `directory`, pinned by the digest of its files."""
    source = ModelSource(ref=str(directory), revision=content_digest(directory))
    return Checkpoint(directory, source, default_id=local_model_id(directory))
