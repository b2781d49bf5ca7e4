"""SOURCE is a directory on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from build_artifacts.checkpoint import Checkpoint, content_digest
from deployments.manifest import Source


def resolve_directory(ref: str) -> Checkpoint:
    """The checkpoint in the directory `ref`, pinned by the digest of its files."""
    directory = Path(ref).expanduser().resolve()
    source = Source(ref=str(directory), revision=content_digest(directory))
    return Checkpoint(directory, source, default_id=f"local/{id_part(directory.name)}")


def id_part(name: str) -> str:
    """`name` reduced to what a model id may contain."""
    plain = re.sub(r"[^A-Za-z0-9_.]+|\.{2,}", "-", name)
    return re.sub(r"-{2,}", "-", plain).strip("-.") or "model"
