"""Conversion of manifests from the previous schema to the present one.

Artifacts of the previous schema load without a change of their files. The next release no longer
reads the previous schema. Until then, operators rewrite such manifests with the command
`hundredfold models migrate`.
"""

from __future__ import annotations

from typing import Any

SCHEMA = 5
PREVIOUS = SCHEMA - 1


def upgrade(raw: dict[str, Any]) -> dict[str, Any]:
    """Convert a manifest of schema PREVIOUS to SCHEMA.

    Schema 5 has no option `arena`, because all sessions of ONNX Runtime share one memory arena
    (engines/onnx/memory.py).
    """
    match raw.get("candidates"):
        case list(candidates):
            candidates = [_without_arena(candidate) for candidate in candidates]
        case candidates:  # not a list: validation of the manifest reports the error
            pass
    return {**raw, "schema_version": SCHEMA, "candidates": candidates}


def _without_arena(candidate: Any) -> Any:
    match candidate:
        case {"options": {"arena": _, **options}, **others}:
            return {**others, "options": options}
    return candidate
