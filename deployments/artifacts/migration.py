"""Manifests of the previous schema, in terms of the present one.

Artifacts of the previous schema load without a change of their files. `hundredfold models migrate`
writes their manifests anew, before the release after this one stops to read them.
"""

from __future__ import annotations

from typing import Any

SCHEMA = 5
PREVIOUS = SCHEMA - 1


def upgrade(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest of the schema PREVIOUS as one of SCHEMA.

    Schema 5 has no option `arena`: all sessions share one (engines/onnx_memory.py).
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
