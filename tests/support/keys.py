"""API key files for tests."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deployments.keys.key import ApiKey, generate_key, hash_key, key_id
from deployments.keys.key_file import KeyFile, change_key_file


def add_key(path: Path, name: str = "alice", *, key: str | None = None, **facts: Any) -> str:
    """Add `key`, or a new one, to the file. Return its text. `facts` holds fields of ApiKey."""
    key = key or generate_key()
    entry = ApiKey(
        id=key_id(key),
        name=name,
        sha256=hash_key(key).hex(),
        created=datetime.now(UTC),
        **facts,
    )
    change_key_file(path, lambda content: KeyFile(keys=(*content.keys, entry)))
    return key


def remove_key(path: Path, name: str) -> None:
    change_key_file(
        path, lambda content: KeyFile(keys=tuple(k for k in content.keys if k.name != name))
    )


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
