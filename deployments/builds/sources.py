"""Kind and default model id of a source of `hundredfold build`, derived from its text alone."""

from __future__ import annotations

import re
from pathlib import PurePath, PurePosixPath

from deployments.artifacts.store import is_model_id
from deployments.errors import InvalidField

PACKAGE_PREFIX = "pypi:"
GGUF_SUFFIX = ".gguf"
_REVISION = re.compile(r"[\w./-]*")


def is_gguf(source: str) -> bool:
    return source.lower().endswith(GGUF_SUFFIX)


def is_onnx(source: str) -> bool:
    return source.lower().endswith(".onnx")


def is_weight_file(source: str) -> bool:
    """Return whether the source names a file with all weights, not a directory or a model."""
    return is_gguf(source) or is_onnx(source)


def sanitize_id(name: str) -> str:
    """Replace the characters that a model id may not contain."""
    plain = re.sub(r"[^A-Za-z0-9_.]+|\.{2,}", "-", name)
    return re.sub(r"-{2,}", "-", plain).strip("-.") or "model"


def local_model_id(path: PurePath) -> str:
    """Return the default model id of a local directory or file: its name, without the format."""
    name = path.stem if is_weight_file(path.name) else path.name
    return f"local/{sanitize_id(name)}"


def is_hub_id(source: str) -> bool:
    """Return whether the source is `[ORGANIZATION/]NAME[@REVISION]` of a model hub."""
    name, _, revision = source.partition("@")
    is_valid = is_model_id(name) and bool(_REVISION.fullmatch(revision))
    return is_valid and not is_weight_file(source)


def split_hub_file(source: str) -> tuple[str, str, str]:
    """Split `ORGANIZATION/NAME[@REVISION]/PATH` into model id, revision and path.

    Parts that are missing are empty.
    """
    organization, _, rest = source.partition("/")
    named, _, path = rest.partition("/")
    name, _, revision = named.partition("@")
    return f"{organization}/{name}", revision, path


def hide_directory(source: str) -> str:
    """Return the source as clients may see it: of a path of a host, only the last name."""
    return f".../{PurePosixPath(source).name}" if source.startswith(("/", ".", "~")) else source


def default_model_id(source: str) -> str:
    """Return the default model id of a source. Raises InvalidField if the source has none."""
    if is_hub_id(source):
        return source.partition("@")[0]
    if source.startswith(PACKAGE_PREFIX):
        package = source.removeprefix(PACKAGE_PREFIX).partition("/")[0].partition("==")[0]
        return f"pypi/{sanitize_id(package)}"
    if source.startswith("/"):
        return local_model_id(PurePosixPath(source))
    model_id, _, file = split_hub_file(source)
    if is_model_id(model_id) and is_gguf(file):
        return model_id
    raise InvalidField(
        f"`{source}` is not a hub id such as `org/name`, a file `org/name/FILE.gguf` of a hub "
        "model, `pypi:PACKAGE/PATH` or an absolute path. Correct `source`",
        field="source",
    )
