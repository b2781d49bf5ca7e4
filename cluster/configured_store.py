"""The store that commands use without `--store`: that of the server with the same config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster.config_entries import find_store, read_args
from cluster.default_config import find_config
from cluster.linting.document import UnreadableConfig, read_document
from deployments.errors import BadSetting


def find_configured_store(config: Path | None) -> Path:
    """Return the store of a Serve config; None stands for the config that `serve` would read.

    Raises BadSetting if the config cannot be read, or if the user has no home.
    """
    path = find_config(config)
    try:
        return find_first_store(read_config(path))
    except BadSetting as error:
        raise BadSetting(f"{error.message}. Or name the store: `--store DIR`") from error


def find_first_store(document: Any) -> Path:
    """Return the store of the first application that names one, else the default store."""
    return find_store(next((args for args in read_args(document) if args.get("store")), {}))


def read_config(config: Path) -> Any:
    """Return the content of a config. Raises BadSetting if it cannot be read."""
    try:
        return read_document(config.read_text(encoding="utf-8")).value
    except (OSError, UnicodeDecodeError, UnreadableConfig) as exc:
        raise BadSetting(f"cannot read `{config}`: {exc}") from exc
