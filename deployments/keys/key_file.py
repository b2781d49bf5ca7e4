"""The key file: JSON with the digests and permissions of all keys.

    {"keys": [{"id": "1f0c…", "name": "alice", "sha256": "…", "scopes": ["infer"], …}]}

`hundredfold keys` writes the file, servers only read it. It is replaced as a whole, so that a
reader never sees a partial change. A Kubernetes secret mounted as a file works too.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError, field_validator

from deployments.artifacts.locks import exclusive_lock
from deployments.artifacts.types import FrozenModel
from deployments.errors import BadSetting
from deployments.files import write_atomically
from deployments.keys.key import ApiKey


class KeyFile(FrozenModel):
    """All keys, in the order in which they were added."""

    keys: tuple[ApiKey, ...] = ()

    @field_validator("keys")
    @classmethod
    def _check_unique(cls, keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
        for kind in ("id", "name"):
            counts = Counter(getattr(key, kind) for key in keys)
            if repeated := {value for value, count in counts.items() if count > 1}:
                raise ValueError(f"two keys have the {kind} `{min(repeated)}`")
        return keys


def read_key_file(path: Path) -> KeyFile:
    """Read the keys. Raises BadSetting, which names the file and the invalid entry."""
    try:
        return KeyFile.model_validate_json(path.read_bytes())
    except OSError as exc:
        raise BadSetting(
            f"cannot read the key file `{path}`: {exc.strerror}. Create a key with "
            f"`hundredfold keys add NAME --file {path}`."
        ) from exc
    except ValidationError as exc:
        lines = (f"`{'.'.join(map(str, e['loc']))}`: {e['msg']}" for e in exc.errors()[:5])
        raise BadSetting(f"the key file `{path}` is invalid: " + "; ".join(lines)) from exc


def change_key_file(path: Path, change: Callable[[KeyFile], KeyFile]) -> None:
    """Replace the contents of the file with `change(contents)`. A missing file counts as empty.

    Concurrent changes take turns. If `path` is a link, change the file that it points to, so that
    the link stays. Raises BadSetting if the file is invalid or cannot be written.
    """
    try:
        path = Path(os.path.realpath(path))  # unlike `resolve`, accepts a circular link
        path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(path.with_name(f"{path.name}.lock"), lambda _: None):
            changed = change(read_key_file(path) if path.exists() else KeyFile())
            content = changed.model_dump_json(indent=1, exclude_defaults=True) + "\n"
            write_atomically(path, content.encode(), mode=0o600)
    except OSError as exc:
        raise BadSetting(f"cannot write the key file `{path}`: {exc.strerror}") from exc
