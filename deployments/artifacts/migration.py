"""Conversion of manifests from the previous schema to the present one.

Artifacts of the previous schema load without a change of their files. The next release no longer
reads the previous schema. `hundredfold models migrate` rewrites such manifests before that.
"""

from __future__ import annotations

from typing import Any

SCHEMA = 5
PREVIOUS = SCHEMA - 1


def upgrade(raw: dict[str, Any]) -> dict[str, Any]:
    """Convert a manifest of schema PREVIOUS to SCHEMA.

    Schema 5 has no option `arena`, because all sessions share one arena (engines/onnx_memory.py).
    """
    match raw.get("candidates"):
        case list(candidates):
            candidates = [_without_arena(candidate) for candidate in candidates]
        case candidates:  # damaged
            pass
    return {**raw, "schema_version": SCHEMA, "candidates": candidates}


def _without_arena(candidate: Any) -> Any:
    match candidate:
        case {"options": {"arena": _, **options}, **others}:
            return {**others, "options": options}
    return candidate
