"""Check of the store that a command changes."""

from __future__ import annotations

from pathlib import Path

from deployments.errors import BadSetting


def check_store_exists(store: Path) -> None:
    """Raise BadSetting if the store is not a directory. Builds create it, changes need it."""
    if not store.is_dir():
        raise BadSetting(
            f"there is no store {store}; name another with `--store DIR`, or build a model first"
        )
