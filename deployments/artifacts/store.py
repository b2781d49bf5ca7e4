"""The files of an artifact: where they may lie, and whether they are what was sealed."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Container
from pathlib import Path, PurePosixPath

from deployments.errors import ArtifactMissing, DigestMismatch, ManifestInvalid, PathOutsideArtifact

LATEST_NAME = "latest"
HOSTS_NAME = "hosts"

# One optional organisation, then a name; never "..", never a leading dot or dash.
MODEL_ID = re.compile(r"(?:[A-Za-z0-9_][\w.-]*/)?[A-Za-z0-9_][\w.-]*")
VERSION = re.compile(r"[0-9a-f]{12}")


def model_directory(store: Path, model_id: str) -> Path:
    """Where the versions of `model_id` live. Raises ManifestInvalid for an id that is no id."""
    if not MODEL_ID.fullmatch(model_id) or ".." in model_id or "--" in model_id:
        raise ManifestInvalid(f"`{model_id}` is not a model id")
    return store / model_id.replace("/", "--")


def resolve_version(store: Path, model_id: str, version: str) -> str:
    """The version `latest` points to, or `version` itself. Raises ArtifactMissing."""
    directory = model_directory(store, model_id)
    if version == LATEST_NAME:
        try:
            version = (directory / LATEST_NAME).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as exc:
            raise ArtifactMissing(f"`{model_id}` is not built; run `hundredfold build`") from exc
    if not VERSION.fullmatch(version) or not (directory / version).is_dir():
        raise ArtifactMissing(f"`{model_id}` has no version `{version}` in {store}")
    return version


def set_latest(store: Path, model_id: str, version: str) -> None:
    """Make `version` the one served by default; atomic."""
    directory = model_directory(store, model_id)
    beside = directory / f".{LATEST_NAME}.{os.getpid()}"
    beside.write_text(version + "\n", encoding="utf-8")
    beside.replace(directory / LATEST_NAME)


def check_file(directory: Path, name: str, sha256: str, size: int) -> None:
    """Raise DigestMismatch unless `name` is the plain file of that digest and size."""
    path = resolve_inside(directory, name)
    if path.is_symlink() or not path.is_file():
        raise DigestMismatch(f"{directory}: `{name}` is missing or not a plain file")
    found = path.stat().st_size
    if found != size:
        raise DigestMismatch(f"{directory}: `{name}` has {found} bytes, sealed with {size}")
    if file_sha256(path) != sha256:
        raise DigestMismatch(f"{directory}: `{name}` is not the file that was sealed (sha256)")


def check_no_extra_files(directory: Path, graph: str, files: Container[str]) -> None:
    """A graph may read weights from files beside it, so nothing unsealed may lie there."""
    for path in resolve_inside(directory, graph).parent.rglob("*"):
        name = path.relative_to(directory).as_posix()
        if not path.is_dir() and name not in files:
            raise DigestMismatch(f"{directory}: `{name}` lies beside a graph and was not sealed")


def resolve_inside(directory: Path, name: str) -> Path:
    """`directory / name`, refused with PathOutsideArtifact when it leads elsewhere."""
    pure = PurePosixPath(name)
    inside = not pure.is_absolute() and ".." not in pure.parts and "\\" not in name
    path = directory / pure
    try:
        if inside and path.resolve().is_relative_to(directory.resolve()):
            return path
    except (OSError, RuntimeError, ValueError) as exc:  # links in a circle, a null byte
        raise PathOutsideArtifact(f"{directory}: `{name}` leads nowhere: {exc}") from exc
    raise PathOutsideArtifact(f"{directory}: `{name}` leads out of the artifact")


def file_sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
