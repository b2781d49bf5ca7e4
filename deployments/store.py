"""Where artifacts lie.

    <store>/<model id, "/" written "--">/<version>/manifest.json, tokenizer.json, graphs/
    <store>/<model id, ...>/<version>/hosts/<fingerprint>/        measured on one kind of host
    <store>/<model id, ...>/latest                                text: the default version

What a version holds is sealed, except `hosts/`: measurements belong to the machine that made them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from deployments.errors import ArtifactMissing, ManifestInvalid

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
            raise ArtifactMissing(
                f"`{model_id}` is not built; run `python -m build_artifacts build`"
            ) from exc
    if not VERSION.fullmatch(version) or not (directory / version).is_dir():
        raise ArtifactMissing(f"`{model_id}` has no version `{version}` in {store}")
    return version


def point_latest(store: Path, model_id: str, version: str) -> None:
    """Make `version` the one served by default; atomic."""
    directory = model_directory(store, model_id)
    beside = directory / f".{LATEST_NAME}.{os.getpid()}"
    beside.write_text(version + "\n", encoding="utf-8")
    beside.replace(directory / LATEST_NAME)
